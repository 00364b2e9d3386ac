"""Float8 quantization with one power-of-two scale per tensor.

A tensor is stored as float8 times a scale, chosen from its amax (largest absolute value): of this step (current scaling), or for inputs
and gradients of earlier steps (delayed scaling). Activations and parameters are e4m3 (3 mantissa bits), gradients e5m2 (2 mantissa bits,
more range): Micikevicius et al., FP8 formats for deep learning, arXiv 2209.05433, section 3.

A power-of-two scale costs up to one bit of range and no precision. It is exact in bfloat16, which XLA needs: on GPUs it rewrites
`dot(float8 -> bfloat16 * scale, ...)` to cuBLASLt's float8 kernel with the scales as arguments. On CPUs the same program computes the same
values in bfloat16.

A parameter has one scale over all devices. Inputs and gradients have one scale per row shard (the tokens of one device), so quantizing
them needs no communication. Because scales are powers of two, the mesh changes only which elements underflow.

Legend: B batch, T sequence.
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
"""Dtype of activations and parameters."""
GRADIENTS = jnp.dtype(jnp.float8_e5m2)
"""Dtype of gradients of activations."""


def amax_of(x: jax.Array) -> jax.Array:
    """Return the largest absolute value of a tensor over all devices: float32 scalar, NaN or infinite where an element is."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def quantize(x: jax.Array, dtype: jnp.dtype, amax: jax.Array | None = None, initial_scale: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Return x in a float8 dtype and its scale (x is about values * scale), a float32 scalar and power of two.

    Current scaling (`amax` None): the scale maps the amax of x to the upper half of the format's range; the scale of all zeros is 1.
    Delayed scaling: the scale follows from `amax` of earlier steps (float32 scalar) and larger values saturate; where `amax` is 0 the
    scale is `initial_scale`. Values that are not finite become NaN, so that the result of the matmul is NaN and the step is skipped.
    """
    if amax is None:
        current = amax_of(x)
        scale = jnp.where(jnp.isfinite(current), _scale(current, dtype, 1.0), jnp.float32(jnp.nan))
        return (x.astype(jnp.float32) * (1 / scale)).astype(dtype), scale  # exact, and a GPU divides slower than it reads
    scale, top = _scale(amax, dtype, initial_scale), float(jnp.finfo(dtype).max)
    scaled = x.astype(jnp.float32) * (1 / scale)
    # `scaled - scaled` is NaN where x is not finite. A select would read an array of NaN, which JAX keeps in memory for the whole step.
    return (jnp.clip(scaled, -top, top) + (scaled - scaled)).astype(dtype), scale


def _scale(amax: jax.Array, dtype: jnp.dtype, if_zero: float) -> jax.Array:
    return jnp.where(amax > 0, power_of_two(amax / float(jnp.finfo(dtype).max)), jnp.float32(if_zero))


def power_of_two(x: jax.Array) -> jax.Array:
    """Return the smallest power of two >= x and 2^-100, float32. Taken from the exponent bits: log2 rounds at powers of two."""
    mantissa, exponent = jnp.frexp(jnp.maximum(x, 2.0**-100))
    return jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))


def dequantize(q: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return q times its scale in the compute dtype: exact, because the scale is a power of two."""
    return q.astype(dtype) * scale.astype(dtype)


def quantize_dequantize(
    partitioner: Partitioner, x: jax.Array, dtype: jnp.dtype, amax: jax.Array | None, initial_scale: float
) -> jax.Array:
    """Return x [B, T, ...] rounded to a float8 dtype and back in its own dtype, with one scale per row shard.

    `amax`: float32 [row shards of B, row shards of T], or None for current scaling; `initial_scale` as in `quantize`.
    """

    def local(x: jax.Array, *amax: jax.Array) -> jax.Array:
        return dequantize(*quantize(x, dtype, amax[0][0, 0] if amax else None, initial_scale), x.dtype)

    return _on_row_shards(partitioner, local)(x, *([] if amax is None else [amax]))


def amax_of_row_shards(partitioner: Partitioner, x: jax.Array) -> jax.Array:
    """Return the amax of every row shard of x [B, T, ...]: float32 [row shards of B, row shards of T]."""
    return _on_row_shards(partitioner, lambda x: amax_of(x)[None, None])(x)


def row_shards(partitioner: Partitioner) -> tuple[int, int]:
    """Return the number of shards of the batch and of the sequence."""
    return partitioner.axis_size("batch"), partitioner.axis_size("seq")


def _on_row_shards(partitioner: Partitioner, fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Run `fn` once per row shard; XLA partitions it over the other mesh axes."""
    sharded = tuple(tuple(a for a in partitioner.rules.mesh_axes(logical) if partitioner.mesh.shape[a] > 1) for logical in ("batch", "seq"))
    if not any(sharded):
        return fn
    spec, manual = PartitionSpec(*sharded), {axis for axes in sharded for axis in axes}
    run: Callable[..., jax.Array] = jax.shard_map(
        fn, mesh=partitioner.current_mesh, in_specs=spec, out_specs=spec, axis_names=manual, check_vma=False
    )
    return run


def check_mesh(mesh: Mesh | AbstractMesh, matmul: str = "fp8") -> None:
    """Raise UserError when the mesh's GPUs have no float8 tensor cores; XLA would silently compute in 16 bits."""
    if isinstance(mesh, AbstractMesh):
        return
    kind = mesh.devices.flat[0].device_kind
    device = find_hardware(kind)
    if device is not None and "float8" not in device.peak_flops:
        raise UserError(f"precision.matmul={matmul}: {device.name} ({kind}) has no 8-bit tensor cores; use precision.matmul=compute")
