"""Attention masks and soft-capping. The mask of every backend equals `visible`.

Tokens are ordered by their index in the row and segments are contiguous, so packing, causality and window need no positions.

Legend: B batch, T query index, S key index.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def visible(
    query_index: jax.Array,
    key_index: jax.Array,
    *,
    causal: bool,
    sliding_window: int | None,
    query_segments_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
) -> jax.Array | None:
    """Return bool [T, S] (or [B, T, S] with segments): True where the query attends to the key; None when all attend to all.

    With a window of w a query attends to itself and the w - 1 keys before it (without `causal`: also the w - 1 keys after it).
    Segment 0 is padding: it attends to nothing and nothing attends to it.
    """
    distance_TS = query_index[:, None] - key_index[None, :]
    mask = distance_TS >= 0 if causal else None
    if sliding_window is not None:
        near = distance_TS < sliding_window
        if not causal:
            near &= distance_TS > -sliding_window
        mask = near if mask is None else mask & near
    if query_segments_BT is not None:
        assert key_segments_BS is not None
        same = (query_segments_BT[:, :, None] == key_segments_BS[:, None, :]) & (query_segments_BT != 0)[:, :, None]
        mask = same if mask is None else mask & same
    return mask


def soft_cap(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Return softcap * tanh(scores / softcap) (arXiv 2408.00118, equation 1); the scores themselves without a cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def whole_mask(length: int, segment_ids_BT: jax.Array | None, causal: bool, sliding_window: int | None) -> jax.Array | None:
    """Return the materialized mask of a whole row: bool broadcastable to [B, T, T], or None."""
    index = jnp.arange(length)
    mask = visible(
        index, index, causal=causal, sliding_window=sliding_window, query_segments_BT=segment_ids_BT, key_segments_BS=segment_ids_BT
    )
    return mask if mask is None or mask.ndim == 3 else mask[None]


def chunk_segments(segment_ids_BT: jax.Array | None, shape: tuple[int, int], chunk: int) -> jax.Array | None:
    """Return segment ids [B, T] of which each is a chunk of a segment: every backend then computes chunked attention as a packed row.

    Chunks of `chunk` tokens are counted from the first token of their segment; padding stays 0. No chunks where rows are not longer.
    """
    if shape[1] <= chunk:
        return segment_ids_BT
    index_BT = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    if segment_ids_BT is None:
        return index_BT // chunk + 1
    starts = jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], [(0, 0), (1, 0)], constant_values=True)
    first_BT = jax.lax.cummax(jnp.where(starts, index_BT, 0), axis=1)
    # The number of a chunk is the index of its first token, plus 1.
    return jnp.where(segment_ids_BT == 0, 0, first_BT + (index_BT - first_BT) // chunk * chunk + 1)


def sink_gradient(sinks_N: jax.Array | None, lse_BTN: jax.Array, delta_BTN: jax.Array) -> jax.Array | None:
    """Return the gradient of the sinks, float32.

    Args:
      sinks_N: the sinks, in the shape of the last dims of lse and delta.
      lse_BTN: log-sum-exp of the scores of each query and its sink.
      delta_BTN: sum over the head of the result times its gradient. The value of the sink's key is zero, so that its score has the gradient
        weight * (0 - delta).
    """
    if sinks_N is None:
        return None
    return -jnp.sum(jnp.exp(sinks_N - lse_BTN) * delta_BTN, axis=tuple(range(lse_BTN.ndim - sinks_N.ndim)))


def zero_padding(out_BTNH: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
    """Set padding (segment 0) to exactly zero, so that it is finite and has no gradient."""
    if segment_ids_BT is None:
        return out_BTNH
    return jnp.where((segment_ids_BT != 0)[:, :, None, None], out_BTNH, 0)
