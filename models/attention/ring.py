"""Ring attention: exact causal attention over rows whose sequence is sharded over the mesh axis `context` (arXiv 2310.01889).

Keys and values travel around the devices of the axis; each device attends with its own queries to the shard it holds, and the results are
joined by their log-sum-exp in float32. The backward pass is a second ring, in which the float32 gradients of keys and values travel along.

A row is cut into 2C chunks for C devices, and device i holds chunks i and 2C - 1 - i ("zig-zag"): under a causal mask every device then
computes as much as the others in every step. Of the pairs of a half of the queries with a half of the keys, (early, late) is never visible.
The mask of every query is a range of keys of the row (`pallas.key_ranges`), so packing and windows need nothing to travel.

Legend: B batch, T row (whole), L tokens of a device, Q queries of a half, S keys of a half, N query heads, K key/value heads, G query heads
per key/value head, H head width, C devices of `context`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ridgeline.hlo.module import trips_scope
from ridgeline.models.attention.chunked import scan_blocks
from ridgeline.models.attention.masks import sink_gradient
from ridgeline.models.attention.pallas import key_ranges, query_ranges
from ridgeline.models.backward_order import with_zeros

LOWEST = -1e30
"""Log-sum-exp of a query without keys so far: finite, so that its weight is 0 and never NaN."""
AXIS = "context"

Partial = tuple[jax.Array, jax.Array]
"""Result [B, Q, N, H] and log-sum-exp [B, Q, N] of some of the keys of each query, float32."""


class Spans(NamedTuple):
    """The mask between a half of the queries and a half of the keys, in indices of the other half; empty where first >= end."""

    keys_BQ2: jax.Array
    queries_BS2: jax.Array
    visited: Callable[[int], float]
    """Size of blocks -> blocks of keys that a block of queries visits in rows of one document, the mean over devices (`Row.visited`)."""


class Row(NamedTuple):
    """The static part of one call."""

    devices: int
    length: int
    window: int | None

    def visited(self, own: int, other: int, steps: Sequence[int], size: int) -> float:
        """Return the blocks of keys that a block of queries visits, and as many the other way: the mean over devices and steps of a ring.

        Args:
          own: the half of the queries.
          other: the half of the keys.
          steps: of the ring.
          size: tokens of a block.
        """
        half = self.length // (2 * self.devices)
        device, step, query = np.meshgrid(np.arange(self.devices), np.asarray(steps), np.arange(0, half, size), indexing="ij")
        holder = (device - step) % self.devices
        queries, keys = (part if side == EARLY else 2 * self.devices - 1 - part for part, side in ((device, own), (holder, other)))
        first_query = (queries - keys) * half + query  # in indices of the half of the keys
        end = first_query + np.minimum(size, half - query)
        first = np.zeros_like(end) if self.window is None else first_query - self.window + 1
        first, end = np.clip(first, 0, half), np.clip(end, 0, half)
        return float(np.where(first < end, -(-end // size) - first // size, 0).mean())


class Kernel(Protocol):
    """Attention of a half of the queries to a half of the keys. Hashable."""

    def forward(self, q_BQNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, spans: Spans) -> Partial:
        """Return the result over these keys."""

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans, dout: jax.Array, lse_BQN: jax.Array, delta_BQN: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the float32 gradients of q, k and v; `lse`: over all keys of the row; delta: sum of dout * out over the head."""


def ring_attention(
    kernel: Kernel,
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    sliding_window: int | None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Return causal attention of this device's tokens to the row, [B, L, N, H] (inside `on_shards`).

    q, k, v: this device's chunks (module docstring); segment_ids: of the whole row, in order, or None for one document per row;
    sinks: as in `Backend`. The result over no keys has the sink as its log-sum-exp, so that no kernel needs it.
    """
    shape = (q_BLNH.shape[0], q_BLNH.shape[1] * jax.lax.axis_size(AXIS))
    keys_BT2 = jnp.stack(key_ranges(shape, segment_ids_BT, True, sliding_window), -1)
    queries_BT2 = jnp.stack(query_ranges(shape, segment_ids_BT, True, sliding_window), -1)
    row = Row(jax.lax.axis_size(AXIS), shape[1], sliding_window)
    return _attend(kernel, row, q_BLNH, k_BLKH, v_BLKH, keys_BT2, queries_BT2, sinks_N)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    kernel: Kernel,
    row: Row,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys_BT2: jax.Array,
    queries_BT2: jax.Array,
    sinks_N: jax.Array | None,
) -> jax.Array:
    return _attend_forward(kernel, row, q, k, v, keys_BT2, queries_BT2, sinks_N)[0]


def _attend_forward(
    kernel: Kernel,
    row: Row,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys_BT2: jax.Array,
    queries_BT2: jax.Array,
    sinks_N: jax.Array | None,
) -> tuple[jax.Array, Any]:
    spans = partial(_spans, row, keys_BT2, queries_BT2)
    halves = _halves(q)
    queries, zeros = with_zeros(halves, [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in halves])

    def attend(step: jax.Array | int, kv: tuple[jax.Array, jax.Array], found: tuple[Partial, Partial]) -> tuple[Partial, Partial]:
        results = list(found)
        keys, values = (_halves(x) for x in kv)
        for own, other in PAIRS:
            part = kernel.forward(queries[own], keys[other], values[other], spans(own, other, step))
            results[own] = _joined(results[own], part)
        return results[0], results[1]

    def one_step(step: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        kv, found = carry
        return _shifted(kv), attend(step, kv, found)  # the transfer does not depend on the matmuls, and runs at the same time

    lowest: jax.Array | float = LOWEST if sinks_N is None else sinks_N
    nothing = tuple((zero, jnp.full(x.shape[:3], lowest, jnp.float32)) for zero, x in zip(zeros, queries, strict=True))
    last = jax.lax.axis_size(AXIS) - 1
    kv, found = jax.lax.fori_loop(0, last, one_step, ((k, v), nothing))
    found = attend(last, kv, found)
    out = checkpoint_name(jnp.concatenate([out for out, _ in found], 1).astype(q.dtype), "attention_context")
    lse = checkpoint_name(jnp.concatenate([lse for _, lse in found], 1), "attention_lse")
    return out, (q, k, v, keys_BT2, queries_BT2, sinks_N, out, lse)


def _attend_backward(
    kernel: Kernel, row: Row, residuals: Any, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None, jax.Array | None]:
    q, k, v, keys_BT2, queries_BT2, sinks_N, out, lse = residuals
    k, v = jax.lax.optimization_barrier((k, v))  # else XLA keeps a hop of the forward pass for this one, with its memory
    spans = partial(_spans, row, keys_BT2, queries_BT2)
    dout, zeros = with_zeros(dout, [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (q, k, v)])
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # A query without keys has lse = LOWEST; infinity makes its weights exactly 0.
    lse = jnp.where(lse <= LOWEST / 2, jnp.inf, lse)
    own_halves = [_halves(x) for x in (q, dout, lse, delta)]

    def add(step: jax.Array | int, dq: jax.Array, traveling: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        keys, values = (_halves(x) for x in traveling[:2])
        dqs, dks, dvs = (list(_halves(x)) for x in (dq, *traveling[2:]))
        for own, other in PAIRS:
            mine_q, mine_dout, mine_lse, mine_delta = (half[own] for half in own_halves)
            grads = kernel.backward(mine_q, keys[other], values[other], spans(own, other, step), mine_dout, mine_lse, mine_delta)
            for total, index, grad in zip((dqs, dks, dvs), (own, other, other), grads, strict=True):
                total[index] = total[index] + grad
        return jnp.concatenate(dqs, 1), (jnp.concatenate(dks, 1), jnp.concatenate(dvs, 1))

    def one_step(step: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        dq, kv, gradients = carry
        ahead = _shifted(kv)
        dq, gradients = add(step, dq, (*kv, *gradients))
        return dq, ahead, _shifted(gradients)

    last = jax.lax.axis_size(AXIS) - 1
    dq, kv, gradients = jax.lax.fori_loop(0, last, one_step, (zeros[0], (k, v), (zeros[1], zeros[2])))
    dq, gradients = add(last, dq, (*kv, *gradients))
    dk, dv = _shifted(tuple(x.astype(k.dtype) for x in gradients))  # home, complete
    return dq.astype(q.dtype), dk, dv, None, None, sink_gradient(sinks_N, lse, delta)


_attend.defvjp(_attend_forward, _attend_backward)

EARLY, LATE = 0, 1
PAIRS = ((EARLY, EARLY), (LATE, EARLY), (LATE, LATE))
"""Halves of queries and keys with visible pairs: early chunks come before late ones, on every device."""


def _halves(x_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    half = x_BL.shape[1] // 2
    return x_BL[:, :half], x_BL[:, half:]


def _shifted(arrays: Any) -> Any:
    """Pass arrays to the next device of the ring, and return those of the one before."""
    size = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(arrays, AXIS, [(i, (i + 1) % size) for i in range(size)])


def _start(half: int, device: jax.Array, size: int) -> jax.Array:
    """Return the index in the row of the first token of a half of a device."""
    return (device if half == EARLY else 2 * jax.lax.axis_size(AXIS) - 1 - device) * size


def _spans(row: Row, keys_BT2: jax.Array, queries_BT2: jax.Array, own: int, other: int, step: jax.Array | int) -> Spans:
    """Return the mask of a half of this device's queries with a half of the keys that it holds in a step of the ring.

    A traced step is any but the last.
    """
    device, size = jax.lax.axis_index(AXIS), row.length // (2 * row.devices)
    steps = (step,) if isinstance(step, int) else range(row.devices - 1)
    query_start = _start(own, device, size)
    key_start = _start(other, (device - step) % jax.lax.axis_size(AXIS), size)
    mine_BQ2 = jax.lax.dynamic_slice_in_dim(keys_BT2, query_start, size, 1)
    held_BS2 = jax.lax.dynamic_slice_in_dim(queries_BT2, key_start, size, 1)
    visited = partial(row.visited, own, other, steps)
    return Spans(jnp.clip(mine_BQ2 - key_start, 0, size), jnp.clip(held_BS2 - query_start, 0, size), visited)


def _joined(one: Partial, other: Partial) -> Partial:
    """Return the result over the keys of both."""
    lse = jnp.logaddexp(one[1], other[1])
    out = one[0] * jnp.exp(one[1] - lse)[..., None] + other[0] * jnp.exp(other[1] - lse)[..., None]
    return out, lse


class Blockwise(NamedTuple):
    """The kernel in plain XLA, for any platform, dtype and width; blocks of queries and keys outside the mask are skipped.

    How many are skipped depends on the documents of a row and on the device. The loops state the mean over devices for rows of one
    document, of which readers of the compiled program count FLOPs and bytes; rows of several documents have less.
    """

    block: int

    def forward(self, q_BQNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, spans: Spans) -> Partial:
        """See `Kernel`."""
        size, grouped = self._size(q_BQNH.shape[1]), _grouped(q_BQNH, k_BSKH)
        keys_BQ2, trips = _padded(spans.keys_BQ2, size), trips_scope(spans.visited(size))
        q, k, v = (_padded(x, size) for x in (grouped, k_BSKH, v_BSKH))
        ranges, shape = _block_ranges(keys_BQ2, size), (q.shape[1] // size, q.shape[0], size, *q.shape[2:])
        blocks = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
        (q, k, v), zeros = with_zeros((q, k, v), blocks)

        def one_query_block(i: jax.Array) -> Partial:
            q_BQKGH, span_BQ2 = _take(q, i, size), _take(keys_BQ2, i, size)

            def one_key_block(j: jax.Array, found: Partial) -> Partial:
                scores = _scores(q_BQKGH, _take(k, j, size), span_BQ2, j * size)
                top = jnp.max(scores, axis=-1)
                weights = jnp.exp(scores - jnp.maximum(top, LOWEST)[..., None])
                total = jnp.sum(weights, axis=-1)
                lse = jnp.where(total == 0, LOWEST, jnp.maximum(top, LOWEST) + jnp.log(jnp.where(total == 0, 1.0, total)))
                out = jnp.einsum("bqkgs,bskh->bqkgh", weights.astype(v.dtype), _take(v, j, size), preferred_element_type=jnp.float32)
                return _joined(found, (out / jnp.where(total == 0, 1.0, total)[..., None], lse))

            nothing = (jnp.zeros(q_BQKGH.shape, jnp.float32), jnp.full(q_BQKGH.shape[:4], LOWEST, jnp.float32))
            with jax.named_scope(trips):
                return jax.lax.fori_loop(ranges[i, 0], ranges[i, 1], one_key_block, nothing)

        found = scan_blocks(shape[0], lambda carry, i: (carry, one_query_block(i)), None, zeros)[1]
        out, lse = (_rows(x)[:, : q_BQNH.shape[1]] for x in found)
        return out.reshape(q_BQNH.shape), lse.reshape(q_BQNH.shape[:3])

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans, dout: jax.Array, lse_BQN: jax.Array, delta_BQN: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Kernel`."""
        size, shapes, dtype = self._size(q.shape[1]), (q.shape, k.shape, v.shape), q.dtype
        keys_BQ2, queries_BS2 = (_padded(x, size) for x in (spans.keys_BQ2, spans.queries_BS2))
        trips = trips_scope(spans.visited(size))
        mine = [_padded(_grouped(x, k), size) for x in (q, dout, lse_BQN, delta_BQN)]
        keys, values = (_padded(x, size) for x in (k, v))
        ranges, scale = _block_ranges(queries_BS2, size), q.shape[-1] ** -0.5
        count = keys.shape[1] // size
        blocks = tuple(jax.ShapeDtypeStruct((count, x.shape[0], size, *x.shape[2:]), jnp.float32) for x in (keys, values))
        (*mine, keys, values), (dq_zeros, zeros) = with_zeros(
            (*mine, keys, values), (jax.ShapeDtypeStruct(mine[0].shape, jnp.float32), blocks)
        )

        def one_key_block(dq_BQKGH: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            k_BSKH, v_BSKH = _take(keys, j, size), _take(values, j, size)

            def one_query_block(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
                dq, dk_BSKH, dv_BSKH = carry
                q_block, dout_block, lse, delta = (_take(x, i, size) for x in mine)
                scores = _scores(q_block, k_BSKH, _take(keys_BQ2, i, size), j * size)
                weights = jnp.exp(scores - lse[..., None])
                dweights = jnp.einsum("bqkgh,bskh->bqkgs", dout_block, v_BSKH, preferred_element_type=jnp.float32)
                dscores = (weights * (dweights - delta[..., None]) * scale).astype(dtype)
                dv_BSKH += jnp.einsum("bqkgs,bqkgh->bskh", weights.astype(dtype), dout_block, preferred_element_type=jnp.float32)
                dk_BSKH += jnp.einsum("bqkgs,bqkgh->bskh", dscores, q_block, preferred_element_type=jnp.float32)
                dq_block = jnp.einsum("bqkgs,bskh->bqkgh", dscores, k_BSKH, preferred_element_type=jnp.float32) + _take(dq, i, size)
                return jax.lax.dynamic_update_slice_in_dim(dq, dq_block, i * size, 1), dk_BSKH, dv_BSKH

            start = (dq_BQKGH, jnp.zeros(k_BSKH.shape, jnp.float32), jnp.zeros(v_BSKH.shape, jnp.float32))
            with jax.named_scope(trips):
                dq, dk, dv = jax.lax.fori_loop(ranges[j, 0], ranges[j, 1], one_query_block, start)
            return dq, (dk, dv)

        dq, gradients = scan_blocks(count, one_key_block, dq_zeros, zeros)
        dk, dv = (_rows(x)[:, : k.shape[1]] for x in gradients)
        return dq[:, : q.shape[1]].reshape(shapes[0]), dk, dv

    def _size(self, length: int) -> int:
        return min(self.block, length)


def _grouped(x_BQN: jax.Array, k_BSKH: jax.Array) -> jax.Array:
    """Split query heads [B, Q, N, ...] into [B, Q, K, G, ...]."""
    heads = k_BSKH.shape[2]
    return x_BQN.reshape(*x_BQN.shape[:2], heads, x_BQN.shape[2] // heads, *x_BQN.shape[3:])


def _padded(x: jax.Array, size: int) -> jax.Array:
    """Pad dim 1 with zeros to whole blocks; a padded query has the empty range [0, 0)."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))


def _take(x: jax.Array, index: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, 1)


def _rows(blocks: jax.Array) -> jax.Array:
    """Join blocks stacked on the leading dim along dim 1: [blocks, B, Q, ...] -> [B, blocks * Q, ...]."""
    moved = jnp.moveaxis(blocks, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])


def _block_ranges(span_BQ2: jax.Array, size: int) -> jax.Array:
    """Return first and end of the blocks that hold the ranges of each block, in any row of the batch, int32 [blocks, 2]."""
    batch, length, _ = span_BQ2.shape
    first, end = (span_BQ2[..., n].reshape(batch, length // size, size) for n in range(2))
    low = jnp.min(jnp.where(end > first, first, jnp.iinfo(jnp.int32).max), axis=(0, 2)) // size
    high = -(-jnp.max(jnp.where(end > first, end, 0), axis=(0, 2)) // size)
    return jnp.stack([jnp.minimum(low, high), high], axis=-1)


def _scores(q_BQKGH: jax.Array, k_BSKH: jax.Array, span_BQ2: jax.Array, start: jax.Array) -> jax.Array:
    """Return scaled scores, float32 [B, Q, K, G, S], -inf where masked; `start`: index of the first key in its half."""
    scores = jnp.einsum("bqkgh,bskh->bqkgs", q_BQKGH, k_BSKH, preferred_element_type=jnp.float32) * q_BQKGH.shape[-1] ** -0.5
    key_S = start + jnp.arange(k_BSKH.shape[1])
    seen_BQS = (key_S >= span_BQ2[..., :1]) & (key_S < span_BQ2[..., 1:])
    return jnp.where(seen_BQS[:, :, None, None], scores, -jnp.inf)
