"""Flash attention in Pallas (Triton), for masks without a public interface in fused library kernels: packed documents.

Every mask of the interface is a range of keys per query: [first, end). Segments are contiguous in a row, so a packed row needs two integers
per token instead of a mask [T, T], and blocks of keys outside every range are skipped: the cost of a row is that of its documents. Grouped
queries share their keys without repeating them. Forward and backward pass follow FlashAttention-2 (arXiv 2307.08691, algorithms 1 and 2),
the backward pass with one kernel for the gradient of queries and one for those of keys and values.

Legend: B batch, T sequence (padded to whole blocks), N query heads, K key/value heads, G query heads per key/value head, H head width,
Q queries of one block, S keys of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ridgeline.models.attention.interface import NO_SOFTCAP, AttentionRequest
from ridgeline.models.attention.masks import sink_gradient
from ridgeline.planner.flops import mean_keys_per_query

WIDTHS = (32, 64, 128)
"""Head widths of the kernels: powers of two, as Triton's tiles; others are padded. 256 needs too much shared memory per block."""
BLOCK = 64
"""Queries and keys of one block."""
LOWEST = -1e30
"""Initial running maximum: finite, so that a row without keys so far gives weights of exactly 0 and never NaN."""


class Plan(NamedTuple):
    """The static part of one call."""

    block: int
    interpret: bool
    keys: float
    """Mean number of keys per query, for documents as long as the row."""
    scale: float
    """Factor on the scores: from the width of a head without padding."""
    wide: bool = False
    """Results in float32, to be added up by the caller; otherwise in the dtype of the inputs."""

    def dtype(self, x: jax.Array) -> jnp.dtype:
        """Return the dtype of the result of which x is the input."""
        return jnp.dtype(jnp.float32) if self.wide else x.dtype


class Ranges(NamedTuple):
    """The mask as ranges, int32; ends are exclusive."""

    first_BT: jax.Array
    """First key of each query."""
    end_BT: jax.Array
    """End of its keys; not after `first` for a query without keys."""
    key_blocks_BX2: jax.Array
    """First and end of the blocks of keys of any query of a block."""
    query_blocks_BX2: jax.Array
    """First and end of the blocks of queries that attend to any key of a block."""


@dataclass(frozen=True)
class Pallas:
    """Flash attention in Pallas: NVIDIA GPUs, Ampere and later."""

    interpret: bool = False
    """Use Pallas's interpreter on any platform, for tests."""
    name = "pallas"
    per_device = per_device_in_stages = True

    def refusal(self, request: AttentionRequest) -> str | None:
        """Return why the kernels do not support the request, or None."""
        if request.softcap is not None:
            return NO_SOFTCAP
        if not self.interpret and request.platform not in ("gpu", "cuda"):
            return f"runs on NVIDIA GPUs only, and the devices are {request.platform}"
        if self.interpret:
            return None
        if request.dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
            return f"computes in bfloat16 or float16 only, not {request.dtype.name} (precision.compute)"
        if request.head_dim > WIDTHS[-1]:
            return f"needs a head width of at most {WIDTHS[-1]}, not {request.head_dim}"
        return None

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        segment_ids_BT: jax.Array | None,
        *,
        causal: bool,
        sliding_window: int | None,
        softcap: float | None,
        sinks_N: jax.Array | None,
        chunk: int,
    ) -> jax.Array:
        """See `Backend`; `chunk` is ignored."""
        length = q_BTNH.shape[1]
        keys = mean_keys_per_query(length, sliding_window) if causal else float(length)
        plan = Plan(BLOCK, self.interpret, keys, q_BTNH.shape[3] ** -0.5)
        keys_BT2 = jnp.stack(key_ranges(q_BTNH.shape[:2], segment_ids_BT, causal, sliding_window), -1)
        queries_BT2 = jnp.stack(query_ranges(q_BTNH.shape[:2], segment_ids_BT, causal, sliding_window), -1)
        q, k, v = (_whole_blocks(x) for x in (q_BTNH, k_BSKH, v_BSKH))
        out_BTNH = _attend(plan, q, k, v, block_ranges(_whole_blocks(keys_BT2), _whole_blocks(queries_BT2), BLOCK), sinks_N)
        return out_BTNH[:, :length]


class RingKernel(NamedTuple):
    """The kernels for a half of the queries and a half of the keys of a ring (ring.py: `Kernel`), of the same length."""

    interpret: bool

    def forward(self, q_BQNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, spans: Any) -> tuple[jax.Array, jax.Array]:
        """See ring.py."""
        plan, length = self._plan(q_BQNH), q_BQNH.shape[1]
        q, k, v = (_widened(plan, _whole_blocks(x)) for x in (q_BQNH, k_BSKH, v_BSKH))
        out, lse_BNQ = _forward(plan, q, k, v, _ranges(spans))
        return out[:, :length, :, : q_BQNH.shape[3]], lse_BNQ.swapaxes(1, 2)[:, :length]

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, spans: Any, dout: jax.Array, lse_BQN: jax.Array, delta_BQN: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See ring.py."""
        plan, length, width = self._plan(q), q.shape[1], q.shape[3]
        q, k, v, dout = (_widened(plan, _whole_blocks(x)) for x in (q, k, v, dout))
        lse_BNQ, delta_BNQ = (_whole_blocks(x).swapaxes(1, 2) for x in (lse_BQN, delta_BQN))
        dq = _query_gradient(plan, q, k, v, _ranges(spans), dout, lse_BNQ, delta_BNQ)
        dk, dv = _key_gradients(plan, q, k, v, _ranges(spans), dout, lse_BNQ, delta_BNQ)
        return dq[:, :length, :, :width], dk[:, :length, :, :width], dv[:, :length, :, :width]

    def _plan(self, q_BQNH: jax.Array) -> Plan:
        # A device's queries see half of the row's keys on average, in three of these calls per device of the ring.
        return Plan(BLOCK, self.interpret, 2 / 3 * q_BQNH.shape[1], q_BQNH.shape[3] ** -0.5, wide=True)


def _ranges(spans: tuple[jax.Array, jax.Array]) -> Ranges:
    return block_ranges(_whole_blocks(spans[0]), _whole_blocks(spans[1]), BLOCK)


def _whole_blocks(x: jax.Array) -> jax.Array:
    """Pad dim 1 with zeros to whole blocks; a padded token has the empty range [0, 0)."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % BLOCK)] + [(0, 0)] * (x.ndim - 2))


def key_ranges(
    shape: tuple[int, ...], segment_ids_BT: jax.Array | None, causal: bool, sliding_window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Return [first, end) of the keys of each query, int32 [B, T] each: the mask of masks.py as ranges."""
    index_BT, first, end = _segment_ranges(shape, segment_ids_BT)
    if causal:
        end = jnp.minimum(end, index_BT + 1)
    if sliding_window is not None:
        first = jnp.maximum(first, index_BT - sliding_window + 1)
        end = jnp.minimum(end, index_BT + sliding_window)
    return first, end if segment_ids_BT is None else jnp.where(segment_ids_BT == 0, first, end)


def query_ranges(
    shape: tuple[int, ...], segment_ids_BT: jax.Array | None, causal: bool, sliding_window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Return [first, end) of the queries that attend to each key, int32 [B, T] each: `key_ranges` seen from the keys."""
    index_BT, first, end = _segment_ranges(shape, segment_ids_BT)
    if causal:
        first = jnp.maximum(first, index_BT)
    if sliding_window is not None:
        first = jnp.maximum(first, index_BT - sliding_window + 1)
        end = jnp.minimum(end, index_BT + sliding_window)
    return first, end if segment_ids_BT is None else jnp.where(segment_ids_BT == 0, first, end)


def _segment_ranges(shape: tuple[int, ...], segment_ids_BT: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the index of each token, and the first and end of its segment, int32 [B, T] each."""
    index_BT = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    if segment_ids_BT is None:
        return index_BT, jnp.zeros_like(index_BT), jnp.full_like(index_BT, shape[1])
    starts = jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], [(0, 0), (1, 0)], constant_values=True)
    first = jax.lax.cummax(jnp.where(starts, index_BT, 0), axis=1)
    ends = jnp.pad(starts[:, 1:], [(0, 0), (0, 1)], constant_values=True)
    return index_BT, first, jax.lax.cummin(jnp.where(ends, index_BT + 1, shape[1]), axis=1, reverse=True)


def block_ranges(keys_BT2: jax.Array, queries_BS2: jax.Array, block: int) -> Ranges:
    """Return the ranges of keys of each query, and the blocks that hold the ranges of a block of queries and of a block of keys."""

    def blocks_of(range_BT2: jax.Array) -> jax.Array:
        first, end = (range_BT2[..., i].reshape(range_BT2.shape[0], -1, block) for i in range(2))
        low = jnp.min(jnp.where(end > first, first, jnp.iinfo(jnp.int32).max), axis=2) // block
        high = -(-jnp.max(jnp.where(end > first, end, 0), axis=2) // block)
        return jnp.stack([jnp.minimum(low, high), high], axis=-1).astype(jnp.int32)

    return Ranges(keys_BT2[..., 0], keys_BT2[..., 1], blocks_of(keys_BT2), blocks_of(queries_BS2))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, ranges: Ranges, sinks_N: jax.Array | None) -> jax.Array:
    return _attend_forward(plan, q_BTNH, k_BTKH, v_BTKH, ranges, sinks_N)[0]


def _widened(plan: Plan, x_BTNH: jax.Array) -> jax.Array:
    """Pad heads with zeros, which change no product, to a width of the kernels."""
    width = x_BTNH.shape[3]
    wanted = width if plan.interpret else next(each for each in WIDTHS if each >= width)
    return jnp.pad(x_BTNH, [(0, 0), (0, 0), (0, 0), (0, wanted - width)])


def _attend_forward(
    plan: Plan, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, ranges: Ranges, sinks_N: jax.Array | None
) -> tuple[jax.Array, Any]:
    out, lse = _forward(plan, _widened(plan, q_BTNH), _widened(plan, k_BTKH), _widened(plan, v_BTKH), ranges, sinks_N)
    out = out[..., : q_BTNH.shape[3]]
    out, lse = checkpoint_name(out, "attention_context"), checkpoint_name(lse, "attention_lse")
    return out, (q_BTNH, k_BTKH, v_BTKH, ranges, sinks_N, out, lse)


def _attend_backward(plan: Plan, residuals: Any, dout_BTNH: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None, jax.Array | None]:
    q, k, v, ranges, sinks_N, out, lse_BNT = residuals
    delta_BNT = jnp.einsum("btnh,btnh->bnt", dout_BTNH.astype(jnp.float32), out.astype(jnp.float32))
    wide_q, wide_k, wide_v, wide_dout = (_widened(plan, x) for x in (q, k, v, dout_BTNH))
    dq = _query_gradient(plan, wide_q, wide_k, wide_v, ranges, wide_dout, lse_BNT, delta_BNT)
    dk, dv = _key_gradients(plan, wide_q, wide_k, wide_v, ranges, wide_dout, lse_BNT, delta_BNT)
    width = q.shape[3]
    dsinks_N = sink_gradient(sinks_N, lse_BNT.swapaxes(1, 2), delta_BNT.swapaxes(1, 2))
    return dq[..., :width], dk[..., :width], dv[..., :width], None, dsinks_N


_attend.defvjp(_attend_forward, _attend_backward)


def _block(plan: Plan, width: int, index: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, plan.block, None, width), index)


def _row(length: int, width: int, index: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, length, None, width), index)


def _parameters(width: int) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=4 if width <= 64 else 8, num_stages=2)


def _flops(plan: Plan, q_BTNH: jax.Array, matmuls: int) -> dict[str, str]:
    """Annotate a kernel with its largest number of FLOPs for readers of the compiled module (hlo/roofline.py)."""
    return {"flops": str(round(2.0 * matmuls * plan.keys * q_BTNH.size))}


def _hidden(first_Q: jax.Array, end_Q: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Return bool [Q, S]: True where the query does not attend to the key of the block that starts at `start`."""
    key_S = start + jnp.arange(size)
    return (key_S[None, :] < first_Q[:, None]) | (key_S[None, :] >= end_Q[:, None])


def _forward(
    plan: Plan, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, ranges: Ranges, sinks_N: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the output in q's dtype and the log-sum-exp of each row (and its sink), float32 [B, N, T]."""
    batch, length, heads, width = q_BTNH.shape
    group, block = heads // k_BTKH.shape[2], plan.block
    scale = plan.scale

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, first_ref: Any, end_ref: Any, range_ref: Any, *refs: Any) -> None:
        *sink_ref, out_ref, lse_ref = refs
        first_top, first_total = (sink_ref[0][0], 1.0) if sink_ref else (LOWEST, 0.0)  # before the first key
        q_QH, first_Q, end_Q = q_ref[...], first_ref[...], end_ref[...]

        def one_block(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            top, total, out = carry
            keys = pl.ds(j * block, block)
            scores = triton.dot(q_QH, k_ref[keys, :], trans_b=True) * scale
            scores = jnp.where(_hidden(first_Q, end_Q, j * block, block), -jnp.inf, scores)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            weights, keep = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
            v_SH = v_ref[keys, :]
            return new_top, total * keep + jnp.sum(weights, axis=1), out * keep[:, None] + triton.dot(weights.astype(v_SH.dtype), v_SH)

        start = (
            jnp.full((block,), first_top, jnp.float32),
            jnp.full((block,), first_total, jnp.float32),
            jnp.zeros((block, width), jnp.float32),
        )
        top, total, out = jax.lax.fori_loop(range_ref[0], range_ref[1], one_block, start)
        total = jnp.where(total == 0, 1.0, total)  # a row without keys: output 0
        out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
        lse_ref[...] = top + jnp.log(total)

    shared = _row(length, width, lambda i, b, n: (b, 0, n // group, 0))
    own = pl.BlockSpec((None, block), lambda i, b, n: (b, i))
    out, lse = pl.pallas_call(
        kernel,
        grid=(length // block, batch, heads),
        in_specs=[
            _block(plan, width, lambda i, b, n: (b, i, n, 0)),
            shared,
            shared,
            own,
            own,
            pl.BlockSpec((None, None, 2), lambda i, b, n: (b, i, 0)),
            *([] if sinks_N is None else [pl.BlockSpec((1,), lambda i, b, n: (n,))]),
        ],
        out_specs=[_block(plan, width, lambda i, b, n: (b, i, n, 0)), pl.BlockSpec((None, None, block), lambda i, b, n: (b, n, i))],
        out_shape=[jax.ShapeDtypeStruct(q_BTNH.shape, plan.dtype(q_BTNH)), jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)],
        compiler_params=_parameters(width),
        interpret=plan.interpret,
        name="attention_forward",
        metadata=_flops(plan, q_BTNH, 2),
    )(q_BTNH, k_BTKH, v_BTKH, ranges.first_BT, ranges.end_BT, ranges.key_blocks_BX2, *([] if sinks_N is None else [sinks_N]))
    return out, lse


def _weights(scores: jax.Array, hidden: jax.Array, lse_Q: jax.Array) -> jax.Array:
    """Return the softmax weights; exactly 0 where masked, also in a row without keys."""
    return jnp.where(hidden, 0.0, jnp.exp(scores - lse_Q[:, None]))


def _query_gradient(
    plan: Plan,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    ranges: Ranges,
    dout_BTNH: jax.Array,
    lse_BNT: jax.Array,
    delta_BNT: jax.Array,
) -> jax.Array:
    batch, length, heads, width = q_BTNH.shape
    group, block = heads // k_BTKH.shape[2], plan.block
    scale = plan.scale

    def kernel(
        q_ref: Any, k_ref: Any, v_ref: Any, dout_ref: Any, lse_ref: Any, delta_ref: Any, first_ref: Any, end_ref: Any, range_ref: Any,
        dq_ref: Any,
    ) -> None:  # fmt: skip
        q_QH, dout_QH, lse_Q, delta_Q, first_Q, end_Q = (ref[...] for ref in (q_ref, dout_ref, lse_ref, delta_ref, first_ref, end_ref))

        def one_block(j: jax.Array, dq_QH: jax.Array) -> jax.Array:
            k_SH, v_SH = k_ref[pl.ds(j * block, block), :], v_ref[pl.ds(j * block, block), :]
            weights = _weights(triton.dot(q_QH, k_SH, trans_b=True) * scale, _hidden(first_Q, end_Q, j * block, block), lse_Q)
            dscores = weights * (triton.dot(dout_QH, v_SH, trans_b=True) - delta_Q[:, None])
            return dq_QH + triton.dot(dscores.astype(k_SH.dtype), k_SH)

        dq = jax.lax.fori_loop(range_ref[0], range_ref[1], one_block, jnp.zeros((block, width), jnp.float32))
        dq_ref[...] = (dq * scale).astype(dq_ref.dtype)

    mine = _block(plan, width, lambda i, b, n: (b, i, n, 0))
    shared = _row(length, width, lambda i, b, n: (b, 0, n // group, 0))
    statistic = pl.BlockSpec((None, None, block), lambda i, b, n: (b, n, i))
    own = pl.BlockSpec((None, block), lambda i, b, n: (b, i))
    return pl.pallas_call(
        kernel,
        grid=(length // block, batch, heads),
        in_specs=[mine, shared, shared, mine, statistic, statistic, own, own, pl.BlockSpec((None, None, 2), lambda i, b, n: (b, i, 0))],
        out_specs=mine,
        out_shape=jax.ShapeDtypeStruct(q_BTNH.shape, plan.dtype(q_BTNH)),
        compiler_params=_parameters(width),
        interpret=plan.interpret,
        name="attention_query_gradient",
        metadata=_flops(plan, q_BTNH, 3),
    )(q_BTNH, k_BTKH, v_BTKH, dout_BTNH, lse_BNT, delta_BNT, ranges.first_BT, ranges.end_BT, ranges.key_blocks_BX2)


def _key_gradients(
    plan: Plan,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    ranges: Ranges,
    dout_BTNH: jax.Array,
    lse_BNT: jax.Array,
    delta_BNT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    batch, length, heads, width = q_BTNH.shape
    kv_heads = k_BTKH.shape[2]
    group, block = heads // kv_heads, plan.block
    scale = plan.scale

    def kernel(
        q_ref: Any, k_ref: Any, v_ref: Any, dout_ref: Any, lse_ref: Any, delta_ref: Any, first_ref: Any, end_ref: Any, range_ref: Any,
        dk_ref: Any, dv_ref: Any,
    ) -> None:  # fmt: skip
        k_SH, v_SH = k_ref[...], v_ref[...]
        start = pl.program_id(0) * block

        def one_head(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            dk_SH, dv_SH = carry
            g, queries = step % group, pl.ds(step // group * block, block)
            q_QH, dout_QH = q_ref[queries, g, :], dout_ref[queries, g, :]
            hidden = _hidden(first_ref[queries], end_ref[queries], start, block)
            weights = _weights(triton.dot(q_QH, k_SH, trans_b=True) * scale, hidden, lse_ref[g, queries])
            dv_SH += triton.dot(weights.astype(dout_QH.dtype), dout_QH, trans_a=True)
            dscores = weights * (triton.dot(dout_QH, v_SH, trans_b=True) - delta_ref[g, queries][:, None])
            return dk_SH + triton.dot(dscores.astype(q_QH.dtype), q_QH, trans_a=True), dv_SH

        zeros = jnp.zeros((block, width), jnp.float32)
        dk_SH, dv_SH = jax.lax.fori_loop(range_ref[0] * group, range_ref[1] * group, one_head, (zeros, zeros))
        dk_ref[...] = (dk_SH * scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_SH.astype(dv_ref.dtype)

    mine = _block(plan, width, lambda j, b, k: (b, j, k, 0))
    members = pl.BlockSpec((None, length, group, width), lambda j, b, k: (b, 0, k, 0))
    statistic = pl.BlockSpec((None, group, length), lambda j, b, k: (b, k, 0))
    whole = pl.BlockSpec((None, length), lambda j, b, k: (b, 0))
    dk, dv = pl.pallas_call(
        kernel,
        grid=(length // block, batch, kv_heads),
        in_specs=[members, mine, mine, members, statistic, statistic, whole, whole,
                  pl.BlockSpec((None, None, 2), lambda j, b, k: (b, j, 0))],
        out_specs=[mine, mine],
        out_shape=[jax.ShapeDtypeStruct(x.shape, plan.dtype(x)) for x in (k_BTKH, v_BTKH)],
        compiler_params=_parameters(width),
        interpret=plan.interpret,
        name="attention_key_gradients",
        metadata=_flops(plan, q_BTNH, 4),
    )(q_BTNH, k_BTKH, v_BTKH, dout_BTNH, lse_BNT, delta_BNT, ranges.first_BT, ranges.end_BT, ranges.query_blocks_BX2)  # fmt: skip
    return dk, dv
