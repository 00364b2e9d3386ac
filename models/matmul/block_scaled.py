"""Matmuls of block-scaled operands, mxfp8 and nvfp4: one scale per small block along the contracted dims.

mxfp8 (OCP Microscaling Formats 1.0, section 5.2): e4m3 with a power-of-two scale per 32 elements. The scale is rounded up, so that nothing
saturates (NVIDIA, Recipes for pre-training LLMs with MXFP8, arXiv 2506.08027, section 3). nvfp4 (NVIDIA, Pretraining LLMs with NVFP4, arXiv
2509.25149, section 2): e2m1 with an e4m3 scale per 16 elements, and one float32 scale per tensor over all devices.

Blocks lie along the contracted dims, so each operand is quantized again for the matmuls of the backward pass. A parameter in mxfp8 is the
exception: it is quantized once with one power-of-two scale per tensor (fp8.py), all-gathered in 8 bits, and read in blocks along either
dim. That loses values below 2^-15 of its amax to underflow, and no precision. With nvfp4, parameters are all-gathered in the compute dtype.

NVIDIA GPUs of the Blackwell generation have the kernels (cuDNN's block-scaled matmul). Older GPUs are refused, because XLA would silently
multiply in 16 bits. On CPUs the same values are multiplied in wider dtypes.

Legend: K contracted elements, M rows of the left operand, N rows of the right operand.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, PartitionSpec

from ridgeline.configs.errors import UserError
from ridgeline.models.matmul.dense import platform_of
from ridgeline.models.matmul.fp8 import power_of_two
from ridgeline.planner.hardware import check_block_scaled, find_hardware
from ridgeline.sharding.manual import active, on_shards, reduce_gradient, row_major

if TYPE_CHECKING:
    from ridgeline.sharding.partition import Partitioner
    from ridgeline.sharding.rules import Axes


class Format(NamedTuple):
    """A block-scaled number format."""

    name: str
    block: int
    """Elements per scale."""
    values: jnp.dtype
    scales: jnp.dtype

    @property
    def largest(self) -> float:
        """The largest representable value."""
        return float(jnp.finfo(self.values).max)


MXFP8 = Format("mxfp8", 32, jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e8m0fnu))
NVFP4 = Format("nvfp4", 16, jnp.dtype(jnp.float4_e2m1fn), jnp.dtype(jnp.float8_e4m3fn))
FORMATS = {format.name: format for format in (MXFP8, NVFP4)}
GRADIENTS = MXFP8
"""Format of the matmuls of the backward pass: 4 bits lose gradients without further means (arXiv 2509.25149, section 4)."""


class BlockScaled(NamedTuple):
    """A quantized tensor: values [..., K], scales [..., K / block], and a float32 scalar that multiplies everything."""

    values: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array


class TensorScaled(NamedTuple):
    """A parameter in float8 with one scale for the whole tensor, a float32 power of two."""

    values: jax.Array
    scale: jax.Array


def quantize(x: jax.Array, format: Format, over: Axes = (), axis: int = -1) -> BlockScaled:
    """Return x in blocks along an axis, whose length is a multiple of the block. `over`: mesh axes whose devices hold other shards of x.

    The scales have the dims of x, with the axis as long as it has blocks. A value that is not finite makes its block's scale NaN, and with
    it the result of the matmul.
    """
    axis %= x.ndim
    blocks = x.astype(jnp.float32).reshape(*x.shape[:axis], -1, format.block, *x.shape[axis + 1 :])
    amax = jnp.max(jnp.abs(blocks), axis=axis + 1)
    if format.scales == jnp.float8_e8m0fnu:
        scales, tensor_scale = power_of_two(amax / format.largest), jnp.float32(1)
    else:
        top = jnp.max(amax)
        top = jax.lax.pmax(top, over) if over else top
        tensor_scale = jnp.where(top > 0, top / (format.largest * float(jnp.finfo(format.scales).max)), 1.0)
        scales = amax / format.largest / tensor_scale
    stored = jnp.where(jnp.isfinite(amax), scales, jnp.nan).astype(format.scales)
    unit = jnp.expand_dims(stored.astype(jnp.float32), axis + 1) * tensor_scale
    values = jnp.clip(blocks / jnp.where(unit > 0, unit, 1.0), -format.largest, format.largest)
    return BlockScaled(values.reshape(x.shape).astype(format.values), stored, tensor_scale)


def dequantize(q: BlockScaled) -> jax.Array:
    """Return float32 [..., K]."""
    blocks = q.values.astype(jnp.float32).reshape(*q.scales.shape, -1) * (q.scales.astype(jnp.float32) * q.tensor_scale)[..., None]
    return blocks.reshape(q.values.shape)


def matmul(partitioner: Partitioner, format: Format, equation: str, x: jax.Array, w: jax.Array | TensorScaled) -> jax.Array:
    """Return einsum(equation, x, w) in x's dtype, where x [B, ...] is sharded like `batch` and w is replicated.

    A quantized w is used as it is; `format` must be mxfp8 then.
    """
    batch = partitioner.rules.mesh_axes("batch")
    multiplied = partial(_local, platform_of(partitioner), format, equation, (active(partitioner, batch), ()), x.dtype)

    def local(x: jax.Array, w: jax.Array | TensorScaled) -> jax.Array:
        if partitioner.axis_size("embed") > 1:
            return multiplied(x, w)
        # Not gathered: XLA would transpose the parameters of all layers before the loop over microbatches or ticks.
        return multiplied(x, w._replace(values=row_major(w.values)) if isinstance(w, TensorScaled) else row_major(w))

    if partitioner.mesh.size == 1:
        return local(x, w)
    run = on_shards(partitioner, local, in_specs=(PartitionSpec(batch), PartitionSpec()), out_specs=PartitionSpec(batch))
    y: jax.Array = run(x, w)
    return y


def weight_gradient(
    partitioner: Partitioner, format: Format, equation: str, axes: tuple[str, ...], x: jax.Array, dy: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Return einsum(equation, x, dy) over all devices, in `dtype`, sharded like the parameter with these logical axes."""
    batch = partitioner.rules.mesh_axes("batch")
    local = partial(local_weight_gradient, partitioner, format, equation, dtype=dtype)
    if partitioner.mesh.size == 1:
        return local(x, dy)
    inputs, out = equation.split("->")
    sizes = {dim: size for dims, a in zip(inputs.split(","), (x, dy), strict=True) for dim, size in zip(dims, a.shape, strict=True)}
    run = on_shards(
        partitioner,
        lambda x, dy: reduce_gradient(partitioner, local(x, dy), axes, batch),
        in_specs=(PartitionSpec(batch), PartitionSpec(batch)),
        out_specs=partitioner.spec(axes, [sizes[dim] for dim in out], "gradient"),
    )
    dw: jax.Array = run(x, dy)
    return dw


def local_weight_gradient(
    partitioner: Partitioner, format: Format, equation: str, x: jax.Array, dy: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Return einsum(equation, x, dy) of the tokens of a device (inside `on_shards`), in `dtype`."""
    over = active(partitioner, partitioner.rules.mesh_axes("batch"))
    return _local(platform_of(partitioner), format, equation, (over, over), dtype, x, dy)


def check_mesh(partitioner: Partitioner, name: str) -> None:
    """Raise UserError where the devices have no block-scaled matmuls. CPUs multiply the same values in wider dtypes."""
    platform = platform_of(partitioner)
    if isinstance(partitioner.mesh, AbstractMesh) or platform == "cpu":
        return
    kind = partitioner.mesh.devices.flat[0].device_kind
    device = find_hardware(kind)
    if platform != "gpu":
        raise UserError(f"precision.matmul={name} runs on NVIDIA GPUs only, and the devices are {platform}; use precision.matmul=compute")
    if device is not None:
        check_block_scaled(device, name, kind)


def _local(
    platform: str, format: Format, equation: str, over: tuple[Axes, Axes], dtype: jnp.dtype, a: jax.Array, b: jax.Array | TensorScaled
) -> jax.Array:
    """The einsum of the shards of one device: both operands as matrices [rows, K], quantized along K."""
    inputs, out = equation.split("->")
    a_dims, b_dims = inputs.split(",")
    contracted = [dim for dim in a_dims if dim in b_dims]
    free = [[dim for dim in dims if dim not in contracted] for dims in (a_dims, b_dims)]
    assert [*free[0], *free[1]] == list(out), equation
    b_values = b.values if isinstance(b, TensorScaled) else b
    sizes = dict(zip(a_dims + b_dims, a.shape + b_values.shape, strict=True))

    def rows(x: jax.Array, dims: str, kept: list[str]) -> jax.Array:
        ordered = jnp.transpose(x, [dims.index(dim) for dim in (*kept, *contracted)])
        return ordered.reshape(math.prod(sizes[dim] for dim in kept), -1)

    def blocks(x: jax.Array | TensorScaled, dims: str, kept: list[str], over: Axes) -> BlockScaled:
        if isinstance(x, TensorScaled):
            return _in_blocks(TensorScaled(rows(x.values, dims, kept), x.scale), format)
        if format is not MXFP8 or [*contracted, *kept] != list(dims):
            return quantize(rows(x, dims, kept), format, over)
        # Quantized before it is transposed: XLA otherwise keeps a transposed copy in float32 until the matmul.
        q = quantize(x.reshape(-1, math.prod(sizes[dim] for dim in kept)), format, over, axis=0)
        values, scales = (with_layout_constraint(each, Layout(major_to_minor=(0, 1))) for each in (q.values, q.scales))
        return BlockScaled(values.T, scales.T, q.tensor_scale)

    left, right = blocks(a, a_dims, free[0], over[0]), blocks(b, b_dims, free[1], over[1])
    wide = dtype if format is MXFP8 else jnp.dtype(jnp.float32)
    y = multiply(platform, left, right, wide)
    if format is not MXFP8:
        y = y * (left.tensor_scale * right.tensor_scale)
    return y.astype(dtype).reshape([sizes[dim] for dim in out])


def _in_blocks(x: TensorScaled, format: Format) -> BlockScaled:
    """Return [N, K] with its one scale repeated per block, as the kernel needs it."""
    assert format is MXFP8
    rows, width = x.values.shape
    return BlockScaled(x.values, jnp.broadcast_to(x.scale.astype(format.scales), (rows, width // format.block)), jnp.float32(1))


def multiply(platform: str, a: BlockScaled, b: BlockScaled, dtype: jnp.dtype) -> jax.Array:
    """Return [M, K] x [N, K] -> [M, N] in `dtype` with the platform's kernel, without the tensor scales."""
    left, right, left_scales, right_scales = (x[None] for x in (a.values, b.values, a.scales, b.scales))
    if platform == "gpu":
        return jax.nn.scaled_matmul(left, right, left_scales, right_scales, dtype)[0]
    numbers = (((2,), (2,)), ((0,), (0,)))
    return jax.lax.scaled_dot(
        left, right, lhs_scale=left_scales, rhs_scale=right_scales, dimension_numbers=numbers, preferred_element_type=dtype
    )[0]
