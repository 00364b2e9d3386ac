"""8-bit products with per-tensor current scaling: what a matmul reads, and the format it reads it in.

A tensor is stored as float8 times one power of two per tensor, chosen from the largest magnitude of the whole tensor (over all devices, so
that every mesh quantises alike). Values and parameters are e4m3 (3 bits of mantissa), gradients e5m2 (2 bits, more range): Micikevicius et
al., FP8 formats for deep learning, arXiv 2209.05433, section 3. A power of two costs up to one bit of range and no precision; it is exact
in bfloat16, which XLA needs: on GPUs it recognises `dot(float8 -> bfloat16 * scale, ...)` and runs cuBLASLt's 8-bit kernel with the
scales as arguments. On CPUs the same program computes the same values in bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from configs.errors import UserError
from planner.hardware import find_hardware

if TYPE_CHECKING:
    from jax.sharding import Mesh

VALUES = jnp.dtype(jnp.float8_e4m3fn)
"""Of activations and parameters."""
GRADIENTS = jnp.dtype(jnp.float8_e5m2)
"""Of gradients of activations."""


def quantise(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Return x in an 8-bit dtype and the scale it has to be multiplied by, a float32 scalar and power of two.

    The largest magnitude lands in the upper half of the format's range. All zeros have scale 1; with a value that is not finite the scale
    is not finite either, so that the product is NaN and the step is skipped.
    """
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    largest = float(jnp.finfo(dtype).max)
    # Smallest power of two >= amax / largest, from the exponent's bits: log2 would round at the edges.
    mantissa, exponent = jnp.frexp(jnp.maximum(amax / largest, 2.0**-100))
    power = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    scale = jnp.where(amax > 0, jnp.ldexp(jnp.float32(1), power), jnp.float32(1))
    scale = jnp.where(jnp.isfinite(amax), scale, jnp.float32(jnp.nan))
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def dequantise(q: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return q times its scale in the compute dtype: exact, as the scale is a power of two."""
    return q.astype(dtype) * scale.astype(dtype)


def check_mesh(mesh: Mesh | AbstractMesh) -> None:
    """Raise UserError when the mesh's GPUs have no 8-bit tensor cores; XLA would compute in 16 bits without a word."""
    if isinstance(mesh, AbstractMesh):
        return
    kind = mesh.devices.flat[0].device_kind
    device = find_hardware(kind)
    if device is not None and "float8" not in device.peak_flops:
        raise UserError(f"precision.matmul=fp8: {device.name} ({kind}) has no 8-bit tensor cores; use precision.matmul=compute")
