"""8-bit products with a scale per tensor: what a matmul reads, and the format it reads it in.

A tensor is stored as float8 times one power of two, chosen from its largest magnitude in this step or (delayed scaling, for inputs and
gradients) in the steps before. Values and parameters are e4m3 (3 bits of mantissa), gradients e5m2 (2 bits, more range): Micikevicius et
al., FP8 formats for deep learning, arXiv 2209.05433, section 3. A power of two costs up to one bit of range and no precision; it is exact
in bfloat16, which XLA needs: on GPUs it recognises `dot(float8 -> bfloat16 * scale, ...)` and runs cuBLASLt's 8-bit kernel with the
scales as arguments. On CPUs the same program computes the same values in bfloat16.

A parameter has one scale over all devices. Inputs and gradients have one per row shard: rows never leave their devices, so nobody else
needs to know, and nothing waits for a sum over devices. As scales are powers of two, a mesh changes only which tiny elements underflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from ridgeline.configs.errors import UserError
from ridgeline.planner.hardware import find_hardware

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ridgeline.sharding.partition import Partitioner

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
    # NaN for what is not finite, by arithmetic: a select would read an array of NaN, which JAX keeps in memory for the whole step.
    return (jnp.clip(wide, -top, top) + (wide - wide)).astype(dtype), scale


def _scale(amax: jax.Array, dtype: jnp.dtype, otherwise: float) -> jax.Array:
    return jnp.where(amax > 0, power_of_two(amax / float(jnp.finfo(dtype).max)), jnp.float32(otherwise))


def power_of_two(x: jax.Array) -> jax.Array:
    """Return the smallest power of two >= x and 2^-100, from the exponent's bits: log2 would round at the edges. float32."""
    mantissa, exponent = jnp.frexp(jnp.maximum(x, 2.0**-100))
    return jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))


def dequantise(q: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return q times its scale in the compute dtype: exact, as the scale is a power of two."""
    return q.astype(dtype) * scale.astype(dtype)


def rounded(partitioner: Partitioner, x: jax.Array, dtype: jnp.dtype, recent: jax.Array | None, start: float) -> jax.Array:
    """Return x [B, T, ...] as a product reads it: rounded to an 8-bit dtype, each row shard by its scale, and in its own dtype again.

    `recent`: float32 [row shards of B, of T], or None for current scaling; `start` as in `quantise`.
    """

    def local(x: jax.Array, *recent: jax.Array) -> jax.Array:
        return dequantise(*quantise(x, dtype, recent[0][0, 0] if recent else None, start), x.dtype)

    return _on_row_shards(partitioner, local)(x, *([] if recent is None else [recent]))


def largest_of_rows(partitioner: Partitioner, x: jax.Array) -> jax.Array:
    """Return the largest magnitude of every row shard of x [B, T, ...]: float32 [row shards of B, of T]."""
    return _on_row_shards(partitioner, lambda x: largest(x)[None, None])(x)


def row_shards(partitioner: Partitioner) -> tuple[int, int]:
    """Return into how many pieces the mesh cuts rows and the tokens of a row."""
    return partitioner.axis_size("batch"), partitioner.axis_size("seq")


def _on_row_shards(partitioner: Partitioner, fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Run once per row shard; what other axes of the mesh cut is left to XLA."""
    cut = tuple(tuple(a for a in partitioner.rules.mesh_axes(logical) if partitioner.mesh.shape[a] > 1) for logical in ("batch", "seq"))
    if not any(cut):
        return fn
    spec, manual = PartitionSpec(*cut), {axis for axes in cut for axis in axes}
    run: Callable[..., jax.Array] = jax.shard_map(
        fn, mesh=partitioner.mesh, in_specs=spec, out_specs=spec, axis_names=manual, check_vma=False
    )
    return run


def check_mesh(mesh: Mesh | AbstractMesh, matmul: str = "fp8") -> None:
    """Raise UserError when the mesh's GPUs have no 8-bit tensor cores; XLA would compute in 16 bits without a word."""
    if isinstance(mesh, AbstractMesh):
        return
    kind = mesh.devices.flat[0].device_kind
    device = find_hardware(kind)
    if device is not None and "float8" not in device.peak_flops:
        raise UserError(f"precision.matmul={matmul}: {device.name} ({kind}) has no 8-bit tensor cores; use precision.matmul=compute")
