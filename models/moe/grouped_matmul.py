"""Matmuls of rows that are grouped by expert, each group with the matrix of its expert: one interface, several kernels.

A kernel also decides where the rows of the experts lie in one buffer: the kernel for GPUs aligns them to its blocks.

Operands are in one dtype, or both in float8 of either kind; then results are in bfloat16.

Legend: R rows of the buffer, E experts, I inputs, O outputs, A assignments of tokens to experts, C rows per expert, X blocks of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ridgeline.models.moe.float8_dot import float8_dot, lower_for_gpus
from ridgeline.planner.experts import BLOCK, TILE, filled_share, padded_rows


def is_float8(x: jax.Array) -> bool:
    """Whether an operand has one of the 8-bit dtypes."""
    return bool(x.dtype.itemsize == 1)


def _wide(x: jax.Array) -> jax.Array:
    """Return float8 values in bfloat16, exactly; others as they are. XLA multiplies them in 8 bits where it has such a kernel."""
    return x.astype(jnp.bfloat16) if is_float8(x) else x


class GroupedMatmul(Protocol):
    """A kernel. Hashable."""

    def rows(self, assignments: int, experts: int) -> int:
        """Return R: enough for the worst case of loads; A: most assignments to these experts."""

    def starts(self, load_E: jax.Array, assignments: int) -> jax.Array:
        """Return the first row of each expert."""

    def matmul(self, x_RI: jax.Array, w_IEO: jax.Array, load_E: jax.Array, *, transposed: bool = False) -> jax.Array:
        """Return the rows times the matrix of their expert (transposed: w is [O, E, I]), summed in float32, [R, O] in x's dtype.

        Rows of no expert are finite.
        """

    def outer(self, x_RI: jax.Array, y_RO: jax.Array, load_E: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return the sum over each expert's rows of x times y, [I, E, O] in `dtype`. Rows of no expert are 0 in one of them."""

    def sums(self, y_RO: jax.Array, load_E: jax.Array) -> jax.Array:
        """Return the sum of each expert's rows, [E, O] in float32. Rows of no expert are 0."""


def _sums_by_expert(y_XO: jax.Array, expert_X: jax.Array, experts: int) -> jax.Array:
    """Return the sum of the rows of each expert, [E, O] in float32, as a matmul: a scatter adds rows one after another."""
    row_XE = (expert_X[:, None] == jnp.arange(experts)).astype(y_XO.dtype)
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("xe,xo->eo", row_XE, y_XO, preferred_element_type=jnp.float32, precision=exact)


@dataclass(frozen=True)
class Ragged:
    """`jax.lax.ragged_dot`: the rows of the experts follow each other without gaps.

    XLA's backends for CPUs and GPUs (jax 0.10) multiply every row with every expert's matrix: it is for CPUs and small models.
    """

    def rows(self, assignments: int, experts: int) -> int:
        """Return one row per assignment."""
        return assignments

    def starts(self, load_E: jax.Array, assignments: int) -> jax.Array:
        """Return the sum of the loads before each expert."""
        return jnp.cumsum(load_E) - load_E

    def matmul(self, x_RI: jax.Array, w_IEO: jax.Array, load_E: jax.Array, *, transposed: bool = False) -> jax.Array:
        """See `GroupedMatmul`."""
        x_RI, w_IEO = _wide(x_RI), _wide(w_IEO)
        w_EIO = w_IEO.transpose((1, 2, 0) if transposed else (1, 0, 2))
        return jax.lax.ragged_dot(x_RI, w_EIO, load_E, preferred_element_type=jnp.float32).astype(x_RI.dtype)

    def outer(self, x_RI: jax.Array, y_RO: jax.Array, load_E: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """See `GroupedMatmul`."""
        x_RI, y_RO = _wide(x_RI), _wide(y_RO)
        numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])
        return jax.lax.ragged_dot_general(x_RI, y_RO, load_E, numbers, preferred_element_type=dtype).swapaxes(0, 1)

    def sums(self, y_RO: jax.Array, load_E: jax.Array) -> jax.Array:
        """See `GroupedMatmul`."""
        expert_R = jnp.searchsorted(jnp.cumsum(load_E), jnp.arange(y_RO.shape[0]), side="right", method="compare_all")
        return _sums_by_expert(y_RO, expert_R, load_E.shape[0])


@dataclass(frozen=True)
class Capacity:
    """Plain batched matmuls: each expert has as many rows."""

    def rows(self, assignments: int, experts: int) -> int:
        """Return one row per assignment."""
        return assignments

    def starts(self, load_E: jax.Array, assignments: int) -> jax.Array:
        """Return the multiples of the rows of an expert."""
        return jnp.arange(load_E.shape[0]) * (assignments // load_E.shape[0])

    def matmul(self, x_RI: jax.Array, w_IEO: jax.Array, load_E: jax.Array, *, transposed: bool = False) -> jax.Array:
        """See `GroupedMatmul`."""
        x_RI, w_IEO = _wide(x_RI), _wide(w_IEO)
        equation = "eci,oei->eco" if transposed else "eci,ieo->eco"
        y_ECO = jnp.einsum(equation, _split(x_RI, w_IEO.shape[1]), w_IEO, preferred_element_type=jnp.float32)
        return y_ECO.astype(x_RI.dtype).reshape(x_RI.shape[0], -1)

    def outer(self, x_RI: jax.Array, y_RO: jax.Array, load_E: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """See `GroupedMatmul`."""
        x_RI, y_RO = _wide(x_RI), _wide(y_RO)
        experts = load_E.shape[0]
        return jnp.einsum("eci,eco->ieo", _split(x_RI, experts), _split(y_RO, experts), preferred_element_type=dtype)

    def sums(self, y_RO: jax.Array, load_E: jax.Array) -> jax.Array:
        """See `GroupedMatmul`."""
        return jnp.sum(_split(y_RO, load_E.shape[0]), 1, dtype=jnp.float32)


def _split(x_RI: jax.Array, experts: int) -> jax.Array:
    return x_RI.reshape(experts, -1, x_RI.shape[-1])


class Tiling(NamedTuple):
    """How a kernel cuts its work. A size that does not divide that of the operands is halved until it does: all are powers of 2."""

    width: int
    """Outputs of a tile of the result."""
    depth: int
    """Inputs, of weight gradients rows, that one step of the sum multiplies."""
    warps: int
    stages: int
    """Steps whose operands are in shared memory or on their way there."""
    height: int = BLOCK
    """Inputs of a tile of a weight gradient. Other results have tiles of whole blocks."""


MATMUL, OUTER = Tiling(256, 64, warps=8, stages=3), Tiling(256, 64, warps=8, stages=4)
"""The fastest of 15 and 11 on an H200 with jax 0.11.2 (benchmarks/gpu_experts.py): 545 to 623 and 621 TFLOP/s, where tiles of 128 outputs
reach 524 to 590, and of 64 x 128 a weight gradient 501. A fourth stage changes matmuls by less than 2 %."""
MATMUL_FLOAT8, OUTER_FLOAT8 = Tiling(128, 128, warps=8, stages=3), Tiling(128, 128, warps=8, stages=3, height=64)
"""Not timed."""


@dataclass(frozen=True)
class Blocks:
    """Pallas kernels (Triton) for NVIDIA GPUs: the rows of each expert are padded to whole blocks, so that a block has one expert.

    Inputs and outputs are padded to whole tiles: of gpt-oss over tensor=8, whose experts have 360 outputs on a device, to 384.
    """

    block: int = BLOCK
    filled: float = 1.0
    """Assignments of a device with equal loads, as a share of the most that it has room for. Blocks without rows are skipped: the FLOPs
    that the kernels state, which readers of the compiled step use, are those of the others."""
    interpret: bool = False
    """Use Pallas's interpreter on any platform, for tests."""
    tiling: Tiling | None = None
    """Instead of those above, for benchmarks."""

    def rows(self, assignments: int, experts: int) -> int:
        """Return A + E * (block - 1), in whole blocks: more are never needed."""
        return padded_rows(assignments, experts, self.block)

    def starts(self, load_E: jax.Array, assignments: int) -> jax.Array:
        """Return the first row of each expert's first block."""
        blocks_E = self._blocks(load_E)
        return (jnp.cumsum(blocks_E) - blocks_E) * self.block

    def matmul(self, x_RI: jax.Array, w_IEO: jax.Array, load_E: jax.Array, *, transposed: bool = False) -> jax.Array:
        """See `GroupedMatmul`."""
        narrow, wanted = self._narrow(x_RI), w_IEO.shape[0 if transposed else 2]
        x_RI, w_IEO = _whole_tiles(x_RI, 1), _whole_tiles(w_IEO, 0, 2)
        if narrow and not transposed:
            w_IEO, transposed = w_IEO.transpose((2, 1, 0)), True
        (rows, inputs), experts = x_RI.shape, w_IEO.shape[1]
        outputs = w_IEO.shape[0 if transposed else 2]
        tiling = self.tiling or (MATMUL_FLOAT8 if narrow else MATMUL)
        block, width, depth = self.block, math.gcd(tiling.width, outputs), math.gcd(tiling.depth, inputs)
        columns = outputs // width
        ends_E = jnp.cumsum(self._blocks(load_E))
        expert_X = jnp.searchsorted(ends_E, jnp.arange(rows // block), side="right", method="compare_all").astype(jnp.int32)

        def kernel(expert_ref: Any, x_ref: Any, w_ref: Any, y_ref: Any) -> None:
            expert = expert_ref[0]
            tile = pl.ds(pl.program_id(0) % columns * width, width)

            def add(step: jax.Array, total: jax.Array) -> jax.Array:
                part = pl.ds(step * depth, depth)
                w = w_ref[tile, expert, part] if transposed else w_ref[part, expert, tile]
                if narrow:
                    return float8_dot(x_ref[:, part], w.T, total)
                return total + triton.dot(x_ref[:, part], w, trans_b=transposed)

            # Blocks beyond the last expert's have no inputs, and results of 0.
            steps = jnp.where(expert < experts, jnp.int32(inputs // depth), jnp.int32(0))
            total = jax.lax.fori_loop(jnp.int32(0), steps, add, jnp.zeros((block, width), jnp.float32))
            y_ref[...] = total.astype(y_ref.dtype)

        # All tiles of a block follow each other: its rows are still in the L2 cache. Of two dims of a grid the first is the fastest.
        y_RO = pl.pallas_call(
            kernel,
            grid=(rows // block * columns,),
            in_specs=[
                pl.BlockSpec((1,), lambda p: (p // columns,)),
                pl.BlockSpec((block, inputs), lambda p: (p // columns, 0)),
                pl.BlockSpec(w_IEO.shape, lambda p: (0, 0, 0)),
            ],
            out_specs=pl.BlockSpec((block, width), lambda p: (p // columns, p % columns)),
            out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.bfloat16 if narrow else x_RI.dtype),
            compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
            interpret=self.interpret,
            name="expert_matmul",
            metadata={"flops": str(2 * self._multiplied(rows, experts) * inputs * outputs)},
        )(expert_X, x_RI, w_IEO)
        return y_RO[:, :wanted]

    def outer(self, x_RI: jax.Array, y_RO: jax.Array, load_E: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """See `GroupedMatmul`."""
        wanted = x_RI.shape[1], y_RO.shape[1]
        x_RI, y_RO = _whole_tiles(x_RI, 1), _whole_tiles(y_RO, 1)
        (rows, inputs), outputs, experts = x_RI.shape, y_RO.shape[1], load_E.shape[0]
        narrow = self._narrow(x_RI)
        tiling = self.tiling or (OUTER_FLOAT8 if narrow else OUTER)
        height, width, depth = math.gcd(tiling.height, inputs), math.gcd(tiling.width, outputs), math.gcd(tiling.depth, self.block)
        left, right = (x_RI.T, y_RO.T) if narrow else (x_RI, y_RO)
        steps_E = self._blocks(load_E) * (self.block // depth)
        ends_E = jnp.cumsum(steps_E)
        range_E2 = jnp.stack([ends_E - steps_E, ends_E], -1).astype(jnp.int32)

        def kernel(range_ref: Any, x_ref: Any, y_ref: Any, w_ref: Any) -> None:
            def add(index: jax.Array, total: jax.Array) -> jax.Array:
                part = pl.ds(index * depth, depth)
                if narrow:
                    return float8_dot(x_ref[:, part], y_ref[:, part].T, total)
                return total + triton.dot(x_ref[part, :], y_ref[part, :], trans_a=True)

            total = jax.lax.fori_loop(range_ref[0], range_ref[1], add, jnp.zeros((height, width), jnp.float32))
            w_ref[...] = total.astype(w_ref.dtype)

        w_IEO = pl.pallas_call(
            kernel,
            grid=(inputs // height, outputs // width, experts),
            in_specs=[
                pl.BlockSpec((None, 2), lambda i, j, e: (e, 0)),
                pl.BlockSpec((height, rows), lambda i, j, e: (i, 0)) if narrow else pl.BlockSpec((rows, height), lambda i, j, e: (0, i)),
                pl.BlockSpec((width, rows), lambda i, j, e: (j, 0)) if narrow else pl.BlockSpec((rows, width), lambda i, j, e: (0, j)),
            ],
            out_specs=pl.BlockSpec((height, None, width), lambda i, j, e: (i, e, j)),
            out_shape=jax.ShapeDtypeStruct((inputs, experts, outputs), dtype),
            compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
            interpret=self.interpret,
            name="expert_weight_gradient",
            metadata={"flops": str(2 * self._multiplied(rows, experts) * inputs * outputs)},
        )(range_E2, left, right)
        return w_IEO[: wanted[0], :, : wanted[1]]

    def _narrow(self, x: jax.Array) -> bool:
        """Whether the kernel multiplies float8."""
        if is_float8(x) and not self.interpret:
            lower_for_gpus()
        return is_float8(x)

    def _multiplied(self, rows: int, experts: int) -> int:
        """Return the rows of a buffer of `rows` that are multiplied with equal loads: each expert's last block is half full."""
        padding = experts * (self.block - 1)
        most = rows + (self.block - 1) / 2 - padding  # `rows` has whole blocks
        return min(rows, round(self.filled * most + padding / 2))

    def sums(self, y_RO: jax.Array, load_E: jax.Array) -> jax.Array:
        """See `GroupedMatmul`. Of each block first: XLA would copy all rows, to pad their number for a matmul that sums over them."""
        y_XO = jnp.sum(y_RO.reshape(-1, self.block, y_RO.shape[1]), 1, dtype=jnp.float32)
        expert_X = jnp.searchsorted(jnp.cumsum(self._blocks(load_E)), jnp.arange(y_XO.shape[0]), side="right", method="compare_all")
        return _sums_by_expert(y_XO, expert_X, load_E.shape[0])

    def _blocks(self, load_E: jax.Array) -> jax.Array:
        """Return the number of blocks of each expert."""
        return -(-load_E // self.block)


def _whole_tiles(x: jax.Array, *axes: int) -> jax.Array:
    """Return x with zeros after its values along these axes, up to a multiple of TILE."""
    return jnp.pad(x, [(0, -size % TILE if axis in axes else 0) for axis, size in enumerate(x.shape)])


def choose_kernel(
    platform: str, dtype: jnp.dtype, experts: int, per_token: int, groups: int, capacity_factor: float | None
) -> GroupedMatmul:
    """Return the kernel for experts.

    Args:
      platform: of the devices.
      dtype: of the computation.
      experts: of a layer.
      per_token: experts per token.
      groups: devices over which the experts are sharded (mesh.expert).
      capacity_factor: compute.experts.capacity_factor.
    """
    if capacity_factor is not None:
        return Capacity()
    if platform in ("gpu", "cuda") and dtype == jnp.bfloat16:
        return Blocks(filled=filled_share(experts, per_token, groups))
    return Ragged()
