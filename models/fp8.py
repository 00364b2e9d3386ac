"""8-bit products with a scale per tensor: what a matmul reads, and the format it reads it in.

A tensor is stored as float8 times one power of two per tensor, chosen from the largest magnitude of the whole tensor (over all devices, so
that every mesh quantises alike), in this step or (delayed scaling) in the steps before: then nothing waits for
the magnitude. Values and parameters are e4m3 (3 bits of mantissa), gradients e5m2 (2 bits, more range): Micikevicius et
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


def largest(x: jax.Array) -> jax.Array:
    """Return the largest magnitude of a tensor, over all devices: a float32 scalar, NaN or infinite where an element is."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def quantise(x: jax.Array, dtype: jnp.dtype, recent: jax.Array | None = None, start: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Return x in an 8-bit dtype and the scale it has to be multiplied by, a float32 scalar and power of two.

    Current scaling: the largest magnitude lands in the upper half of the format's range; all zeros have scale 1. Delayed scaling: `recent`,
    the largest magnitude of earlier steps (float32 scalar), lands there, and what is larger saturates; where it is 0 the scale is `start`.
    What is not finite becomes NaN, so that the product is NaN and the step is skipped.
    """
    if recent is None:
        amax = largest(x)
        scale = jnp.where(jnp.isfinite(amax), _scale(amax, dtype, 1.0), jnp.float32(jnp.nan))
        return (x.astype(jnp.float32) / scale).astype(dtype), scale
    scale, top = _scale(recent, dtype, start), float(jnp.finfo(dtype).max)
    wide = x.astype(jnp.float32) / scale
    return jnp.where(jnp.isfinite(wide), jnp.clip(wide, -top, top), jnp.nan).astype(dtype), scale


def _scale(amax: jax.Array, dtype: jnp.dtype, otherwise: float) -> jax.Array:
    return jnp.where(amax > 0, power_of_two(amax / float(jnp.finfo(dtype).max)), jnp.float32(otherwise))


def power_of_two(x: jax.Array) -> jax.Array:
    """Return the smallest power of two >= x and 2^-100, from the exponent's bits: log2 would round at the edges. float32."""
    mantissa, exponent = jnp.frexp(jnp.maximum(x, 2.0**-100))
    return jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))


def dequantise(q: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return q times its scale in the compute dtype: exact, as the scale is a power of two."""
    return q.astype(dtype) * scale.astype(dtype)


def check_mesh(mesh: Mesh | AbstractMesh, matmul: str = "fp8") -> None:
    """Raise UserError when the mesh's GPUs have no 8-bit tensor cores; XLA would compute in 16 bits without a word."""
    if isinstance(mesh, AbstractMesh):
        return
    kind = mesh.devices.flat[0].device_kind
    device = find_hardware(kind)
    if device is not None and "float8" not in device.peak_flops:
        raise UserError(f"precision.matmul={matmul}: {device.name} ({kind}) has no 8-bit tensor cores; use precision.matmul=compute")
