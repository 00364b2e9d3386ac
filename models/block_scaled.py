"""Products of block-scaled operands, mxfp8 and nvfp4: a scale for every few elements along what is summed over.

mxfp8 (OCP Microscaling Formats 1.0, section 5.2): e4m3 with a power of two per 32 elements. The power is rounded up, so that nothing
saturates (NVIDIA, Recipes for pre-training LLMs with MXFP8, arXiv 2506.08027, section 3). nvfp4 (NVIDIA, Pretraining LLMs with NVFP4, arXiv
2509.25149, section 2): e2m1 with an e4m3 scale per 16 elements, and one float32 per tensor over all devices.

Blocks lie along the summed dims, so each of a product's operands is rounded anew for its gradients. A parameter in mxfp8 is not: all its
blocks have one power of two, so it travels in 8 bits (models/fp8.py) and is read along either dim. What that costs is underflow 15 binades
below its largest element, and no precision. For nvfp4 parameters travel in the compute dtype. GPUs of the Blackwell generation have the
kernels (cuDNN's block-scaled product); on older ones XLA would multiply in 16 bits without a word, so they are refused. On CPUs the same
values are multiplied in wider numbers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from ridgeline.configs.errors import UserError
from ridgeline.models.fp8 import power_of_two
from ridgeline.models.product import platform_of
from ridgeline.planner.hardware import check_block_scaled, find_hardware
from ridgeline.sharding.manual import active, on_shards, reduce_gradient

if TYPE_CHECKING:
    from ridgeline.sharding.partition import Partitioner
    from ridgeline.sharding.rules import Axes


class Format(NamedTuple):
    """How numbers are stored."""

    name: str
    block: int
    """Elements that share a scale."""
    values: jnp.dtype
    scales: jnp.dtype

    @property
    def largest(self) -> float:
        """The largest value that can be stored."""
        return float(jnp.finfo(self.values).max)


MXFP8 = Format("mxfp8", 32, jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e8m0fnu))
NVFP4 = Format("nvfp4", 16, jnp.dtype(jnp.float4_e2m1fn), jnp.dtype(jnp.float8_e4m3fn))
FORMATS = {format.name: format for format in (MXFP8, NVFP4)}
GRADIENTS = MXFP8
"""What the products of the backward pass read: 4 bits lose gradients without further means (arXiv 2509.25149, section 4)."""


class Quantised(NamedTuple):
    """Values [..., K], scales [..., K / block], and what everything is multiplied by besides, a float32 scalar."""

    values: jax.Array
    scales: jax.Array
    overall: jax.Array


class Scaled(NamedTuple):
    """A parameter in 8 bits whose blocks all have one scale, a float32 power of two."""

    values: jax.Array
    scale: jax.Array


def quantise(x: jax.Array, format: Format, over: Axes = ()) -> Quantised:
    """Return x [..., K] in blocks along K, a multiple of the block. `over`: mesh axes whose devices hold other parts of x.

    What is not finite makes its block's scale NaN, and with it the product.
    """
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, format.block)
    amax = jnp.max(jnp.abs(blocks), axis=-1)
    if format.scales == jnp.float8_e8m0fnu:
        scales, overall = power_of_two(amax / format.largest), jnp.float32(1)
    else:
        top = jnp.max(amax)
        top = jax.lax.pmax(top, over) if over else top
        overall = jnp.where(top > 0, top / (format.largest * float(jnp.finfo(format.scales).max)), 1.0)
        scales = amax / format.largest / overall
    stored = jnp.where(jnp.isfinite(amax), scales, jnp.nan).astype(format.scales)
    unit = stored.astype(jnp.float32)[..., None] * overall
    values = jnp.clip(blocks / jnp.where(unit > 0, unit, 1.0), -format.largest, format.largest)
    return Quantised(values.reshape(x.shape).astype(format.values), stored, overall)


def dequantise(q: Quantised) -> jax.Array:
    """Return float32 [..., K]."""
    blocks = q.values.astype(jnp.float32).reshape(*q.scales.shape, -1) * (q.scales.astype(jnp.float32) * q.overall)[..., None]
    return blocks.reshape(q.values.shape)


def product(partitioner: Partitioner, format: Format, equation: str, x: jax.Array, w: jax.Array | Scaled) -> jax.Array:
    """Return einsum(equation, x, w) in x's dtype, where x [B, ...] is cut like `batch` and w is whole on every device.

    A w that is rounded already is read as it is; `format` is mxfp8 then.
    """
    batch = partitioner.rules.mesh_axes("batch")
    local = partial(_local, platform_of(partitioner), format, equation, (active(partitioner, batch), ()), x.dtype)
    if partitioner.mesh.size == 1:
        return local(x, w)
    run = on_shards(partitioner, local, in_specs=(PartitionSpec(batch), PartitionSpec()), out_specs=PartitionSpec(batch))
    y: jax.Array = run(x, w)
    return y


def weight_gradient(
    partitioner: Partitioner, format: Format, equation: str, axes: tuple[str, ...], x: jax.Array, dy: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Return einsum(equation, x, dy) over all devices, in `dtype`, where the parameter of these logical axes lies."""
    batch = partitioner.rules.mesh_axes("batch")
    over = active(partitioner, batch)
    local = partial(_local, platform_of(partitioner), format, equation, (over, over), dtype)
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


def check_mesh(partitioner: Partitioner, name: str) -> None:
    """Raise UserError where the devices have no block-scaled products. CPUs multiply the same values in wider numbers."""
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
    platform: str, format: Format, equation: str, over: tuple[Axes, Axes], dtype: jnp.dtype, a: jax.Array, b: jax.Array | Scaled
) -> jax.Array:
    inputs, out = equation.split("->")
    a_dims, b_dims = inputs.split(",")
    summed = [dim for dim in a_dims if dim in b_dims]
    free = [[dim for dim in dims if dim not in summed] for dims in (a_dims, b_dims)]
    assert [*free[0], *free[1]] == list(out), equation
    b_values = b.values if isinstance(b, Scaled) else b
    sizes = dict(zip(a_dims + b_dims, a.shape + b_values.shape, strict=True))

    def rows(x: jax.Array, dims: str, kept: list[str]) -> jax.Array:
        ordered = jnp.transpose(x, [dims.index(dim) for dim in (*kept, *summed)])
        return ordered.reshape(math.prod(sizes[dim] for dim in kept), -1)

    left, b_rows = quantise(rows(a, a_dims, free[0]), format, over[0]), rows(b_values, b_dims, free[1])
    right = _in_blocks(Scaled(b_rows, b.scale), format) if isinstance(b, Scaled) else quantise(b_rows, format, over[1])
    wide = dtype if format is MXFP8 else jnp.dtype(jnp.float32)
    y = multiply(platform, left, right, wide)
    if format is not MXFP8:
        y = y * (left.overall * right.overall)
    return y.astype(dtype).reshape([sizes[dim] for dim in out])


def _in_blocks(x: Scaled, format: Format) -> Quantised:
    """[N, K] of one scale, as a kernel reads it."""
    assert format is MXFP8
    rows, width = x.values.shape
    return Quantised(x.values, jnp.broadcast_to(x.scale.astype(format.scales), (rows, width // format.block)), jnp.float32(1))


def multiply(platform: str, a: Quantised, b: Quantised, dtype: jnp.dtype) -> jax.Array:
    """Return [M, K] x [N, K] -> [M, N] in `dtype`, the overall factors left out, with the kernel of the platform."""
    left, right, left_scales, right_scales = (x[None] for x in (a.values, b.values, a.scales, b.scales))
    if platform == "gpu":
        return jax.nn.scaled_matmul(left, right, left_scales, right_scales, dtype)[0]
    numbers = (((2,), (2,)), ((0,), (0,)))
    return jax.lax.scaled_dot(
        left, right, lhs_scale=left_scales, rhs_scale=right_scales, dimension_numbers=numbers, preferred_element_type=dtype
    )[0]
