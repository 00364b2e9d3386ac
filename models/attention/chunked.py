"""Memory-efficient attention in plain XLA: online softmax over blocks of keys; no array of size T x T exists.

The forward pass saves only the output and the log-sum-exp of each row; the backward pass recomputes the scores block by block
(FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2). Blocks that the causal mask or the window masks entirely are not computed.
Grouped queries share their key block without repeating it.

Legend: B batch, T sequence (padded to whole blocks), K key/value heads, G query heads per key/value head, H head width,
Q queries of one block, S keys of one block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ridgeline.models.attention.interface import AttentionRequest
from ridgeline.models.attention.masks import sink_gradient, soft_cap, visible, zero_padding
from ridgeline.models.backward_order import with_zeros

LOWEST = -1e30
"""Initial running maximum: finite, so that a row without keys so far gives exp(-inf - LOWEST) = 0 and never NaN."""


class Plan(NamedTuple):
    """The static part of one call. The bounds take and return a traced block index."""

    block: int
    blocks: int
    causal: bool
    sliding_window: int | None
    softcap: float | None

    def first_key_block(self, query_block: jax.Array) -> jax.Array | int:
        """Return the first block of keys to which any query of the block attends."""
        if self.sliding_window is None:
            return 0
        return jnp.maximum(0, query_block * self.block - self.sliding_window + 1) // self.block

    def end_key_block(self, query_block: jax.Array) -> jax.Array | int:
        """Return one past the last block of keys to which any query of the block attends."""
        if self.causal:
            return query_block + 1
        if self.sliding_window is None:
            return self.blocks
        return jnp.minimum(self.blocks, ((query_block + 1) * self.block + self.sliding_window - 2) // self.block + 1)

    def first_query_block(self, key_block: jax.Array) -> jax.Array | int:
        """Return the first block of queries that attend to any key of the block."""
        return key_block if self.causal else self.first_key_block(key_block)

    def end_query_block(self, key_block: jax.Array) -> jax.Array | int:
        """Return one past the last block of queries that attend to any key of the block."""
        return self._replace(causal=False).end_key_block(key_block)


class Chunked:
    """Blockwise attention in plain XLA, on any platform; supports everything."""

    name = "chunked"
    per_device = False
    per_device_in_stages = False

    def refusal(self, request: AttentionRequest) -> str | None:
        """Return None: everything is supported."""
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
        """See `Backend`; `chunk` is the number of queries and of keys per block."""
        batch, length, heads, width = q_BTNH.shape
        block = min(chunk, length)
        blocks = -(-length // block)
        padding = blocks * block - length
        if padding and segment_ids_BT is None and not causal:
            segment_ids_BT = jnp.ones((batch, length), jnp.int32)  # the padding of the last block must stay masked
        pad = [(0, 0), (0, padding), (0, 0), (0, 0)]
        q_BKGTH = jnp.pad(q_BTNH, pad).reshape(batch, -1, k_BSKH.shape[2], heads // k_BSKH.shape[2], width).transpose(0, 2, 3, 1, 4)
        k_BKTH, v_BKTH = (jnp.pad(x, pad).transpose(0, 2, 1, 3) for x in (k_BSKH, v_BSKH))
        segments_BT = None if segment_ids_BT is None else jnp.pad(segment_ids_BT, pad[:2])
        sinks_KG = None if sinks_N is None else sinks_N.reshape(k_BSKH.shape[2], -1)
        out_BKGTH = _attend(Plan(block, blocks, causal, sliding_window, softcap), q_BKGTH, k_BKTH, v_BKTH, segments_BT, sinks_KG)
        out_BTNH = out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, blocks * block, heads, -1)[:, :length]
        return zero_padding(out_BTNH, segment_ids_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: Plan, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, segments_BT: jax.Array | None, sinks_KG: jax.Array | None
) -> jax.Array:
    return _forward(plan, q_BKGTH, k_BKTH, v_BKTH, segments_BT, sinks_KG)[0]


def _take(x: jax.Array, plan: Plan, index: jax.Array, dim: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * plan.block, plan.block, dim)


def _scores(plan: Plan, q_BKGQH: jax.Array, k_BKSH: jax.Array, segments_BT: jax.Array | None, i: jax.Array, j: jax.Array) -> jax.Array:
    """Return the scaled and capped scores of query block i against key block j, float32 [B, K, G, Q, S], -inf where masked."""
    scores = jnp.einsum("bkgqh,bksh->bkgqs", q_BKGQH, k_BKSH, preferred_element_type=jnp.float32) * q_BKGQH.shape[-1] ** -0.5
    scores = soft_cap(scores, plan.softcap)
    within = jnp.arange(plan.block)
    mask = visible(
        i * plan.block + within,
        j * plan.block + within,
        causal=plan.causal,
        sliding_window=plan.sliding_window,
        query_segments_BT=None if segments_BT is None else _take(segments_BT, plan, i, 1),
        key_segments_BS=None if segments_BT is None else _take(segments_BT, plan, j, 1),
    )
    if mask is None:
        return scores
    return jnp.where(mask[:, None, None] if mask.ndim == 3 else mask, scores, -jnp.inf)


def _forward(
    plan: Plan, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, segments_BT: jax.Array | None, sinks_KG: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the output [B, K, G, T, H] in q's dtype and the log-sum-exp of each row (and its sink), float32 [B, K, G, T]."""
    lead, shape = q_BKGTH.shape[:3], (plan.blocks, *q_BKGTH.shape[:3], plan.block)
    stacks = jax.ShapeDtypeStruct((*shape, v_BKTH.shape[-1]), q_BKGTH.dtype), jax.ShapeDtypeStruct(shape, jnp.float32)
    (q_BKGTH, k_BKTH, v_BKTH), zeros = with_zeros((q_BKGTH, k_BKTH, v_BKTH), stacks)
    first: tuple[jax.Array | float, float] = (
        (LOWEST, 0.0) if sinks_KG is None else (sinks_KG[..., None], 1.0)
    )  # maximum and sum before the first key

    def one_query_block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_BKGQH = _take(q_BKGTH, plan, i, 3)

        def one_key_block(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            top, total, out = carry
            scores = _scores(plan, q_BKGQH, _take(k_BKTH, plan, j, 2), segments_BT, i, j)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - new_top[..., None])
            keep = jnp.exp(top - new_top)
            v_BKSH = _take(v_BKTH, plan, j, 2)
            update = jnp.einsum("bkgqs,bksh->bkgqh", weights.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32)
            return new_top, total * keep + jnp.sum(weights, axis=-1), out * keep[..., None] + update

        start = (
            jnp.full((*lead, plan.block), first[0], jnp.float32),
            jnp.full((*lead, plan.block), first[1], jnp.float32),
            jnp.zeros((*lead, plan.block, v_BKTH.shape[-1]), jnp.float32),
        )
        top, total, out = jax.lax.fori_loop(plan.first_key_block(i), plan.end_key_block(i), one_key_block, start)
        total = jnp.where(total == 0, 1.0, total)  # a row without keys: output 0
        return (out / total[..., None]).astype(q_BKGTH.dtype), top + jnp.log(total)

    out, lse = scan_blocks(plan.blocks, lambda carry, i: (carry, one_query_block(i)), None, zeros)[1]
    return _join(out), _join(lse)


def scan_blocks(count: int, run: Callable[[Any, jax.Array], tuple[Any, Any]], carry: Any, zeros: Any) -> tuple[Any, Any]:
    """Run (carry, block) -> (carry, result) for each of `count` blocks; return the last carry and the results, stacked on a leading dim.

    zeros: of the shapes of these stacks.

    As `jax.lax.scan`, but XLA does not know the count. Its pass loop-double-buffer-transformer unrolls the loop over layers, then two
    copies of a layer call the same loop bodies, and it separates them only if the loop it looked at last was unrolled too. It skips loops
    without a known count, so none of attention's is the last one; otherwise XLA ends with "Call graph must have been flattened". Readers of
    the compiled program derive the count (hlo/trip_counts.py).
    """

    def body(block: jax.Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, result = run(state[0], block)
        return carry, jax.tree.map(lambda stack, each: jax.lax.dynamic_update_index_in_dim(stack, each, block, 0), state[1], result)

    # A loop with one turn is removed.
    hidden = 1 if count == 1 else jax.lax.optimization_barrier(jnp.int32(count))
    found: tuple[Any, Any] = jax.lax.fori_loop(0, hidden, body, (carry, zeros))
    return found


def _join(blocks: jax.Array) -> jax.Array:
    """Join blocks stacked on the leading dim along the sequence: [blocks, B, K, G, Q, ...] -> [B, K, G, T, ...]."""
    moved = jnp.moveaxis(blocks, 0, 3)
    return moved.reshape(*moved.shape[:3], moved.shape[3] * moved.shape[4], *moved.shape[5:])


def _attend_forward(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array | None, sinks_KG: jax.Array | None
) -> tuple[jax.Array, Any]:
    out, lse = _forward(plan, q, k, v, segments_BT, sinks_KG)
    out, lse = checkpoint_name(out, "attention_context"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, segments_BT, sinks_KG, out, lse)


def _attend_backward(plan: Plan, residuals: Any, dout_BKGTH: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None, jax.Array | None]:
    q_BKGTH, k_BKTH, v_BKTH, segments_BT, sinks_KG, out_BKGTH, lse_BKGT = residuals
    dtype = q_BKGTH.dtype
    blocks = [jax.ShapeDtypeStruct((plan.blocks, *x.shape[:2], plan.block, x.shape[-1]), dtype) for x in (k_BKTH, v_BKTH)]
    (q_BKGTH, k_BKTH, v_BKTH, out_BKGTH, dout_BKGTH), (dq_zeros, zeros) = with_zeros(
        (q_BKGTH, k_BKTH, v_BKTH, out_BKGTH, dout_BKGTH), (jax.ShapeDtypeStruct(q_BKGTH.shape, jnp.float32), tuple(blocks))
    )
    delta_BKGT = jnp.sum(dout_BKGTH.astype(jnp.float32) * out_BKGTH.astype(jnp.float32), axis=-1)
    # A row without keys has lse = LOWEST; infinity makes its weights exactly 0.
    lse_BKGT = jnp.where(lse_BKGT <= LOWEST / 2, jnp.inf, lse_BKGT)
    scale = q_BKGTH.shape[-1] ** -0.5

    def one_key_block(dq_BKGTH: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k_BKSH, v_BKSH = _take(k_BKTH, plan, j, 2), _take(v_BKTH, plan, j, 2)

        def one_query_block(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            dq_BKGTH, dk_BKHS, dv_BKHS = carry
            q_BKGQH, dout_BKGQH = _take(q_BKGTH, plan, i, 3), _take(dout_BKGTH, plan, i, 3)
            scores = _scores(plan, q_BKGQH, k_BKSH, segments_BT, i, j)
            weights = jnp.exp(scores - _take(lse_BKGT, plan, i, 3)[..., None])
            dweights = jnp.einsum("bkgqh,bksh->bkgqs", dout_BKGQH, v_BKSH, preferred_element_type=jnp.float32)
            dscores = weights * (dweights - _take(delta_BKGT, plan, i, 3)[..., None]) * scale
            if plan.softcap is not None:  # the derivative of tanh is 1 - tanh^2; masked scores are -inf, with weight 0
                dscores *= 1 - jnp.square(jnp.maximum(scores / plan.softcap, -1))
            dscores = dscores.astype(dtype)
            # As [H, S]: a CPU transposes the left operand of a sum over queries, and the block of queries is the smaller operand.
            dv_BKHS += jnp.einsum("bkgqh,bkgqs->bkhs", dout_BKGQH, weights.astype(dtype), preferred_element_type=jnp.float32)
            dk_BKHS += jnp.einsum("bkgqh,bkgqs->bkhs", q_BKGQH, dscores, preferred_element_type=jnp.float32)
            dq_BKGQH = jnp.einsum("bkgqs,bksh->bkgqh", dscores, k_BKSH, preferred_element_type=jnp.float32)
            dq_BKGQH += _take(dq_BKGTH, plan, i, 3)
            return jax.lax.dynamic_update_slice_in_dim(dq_BKGTH, dq_BKGQH, i * plan.block, 3), dk_BKHS, dv_BKHS

        start = (dq_BKGTH, *(jnp.zeros(x.swapaxes(2, 3).shape, jnp.float32) for x in (k_BKSH, v_BKSH)))
        dq, dk, dv = jax.lax.fori_loop(plan.first_query_block(j), plan.end_query_block(j), one_query_block, start)
        return dq, tuple(x_BKHS.swapaxes(2, 3).astype(dtype) for x_BKHS in (dk, dv))

    dq, (dk, dv) = scan_blocks(plan.blocks, one_key_block, dq_zeros, zeros)
    dk, dv = (jnp.moveaxis(blocks, 0, 2).reshape(like.shape) for blocks, like in ((dk, k_BKTH), (dv, v_BKTH)))
    dsinks_KG = sink_gradient(sinks_KG, jnp.moveaxis(lse_BKGT, 3, 1), jnp.moveaxis(delta_BKGT, 3, 1))
    return dq.astype(dtype), dk, dv, None, dsinks_KG


_attend.defvjp(_attend_forward, _attend_backward)
