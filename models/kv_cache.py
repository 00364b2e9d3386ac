"""The key/value cache: one pass over the prompts fills it, then each pass adds one token.

Prompts of different lengths share a batch, padded on the right to P slots. Generated token i of every row is in slot P + i, so that a pass
writes one slice of the cache; what a query sees follows from the position of each slot. Rows of the cache are sharded as the batch, heads
as keys and values.

Legend: L layers, B batch, T tokens of the prompts (P slots), S cache slots, N query heads, K key/value heads, G = N / K, H head width,
D embed width.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.models.attention.masks import soft_cap
from ridgeline.models.decoder import Decoder, num_layers_of

UNUSED = jnp.iinfo(jnp.int32).max
"""Position of a slot of padding: after every query."""


class Cache(NamedTuple):
    """Keys and values of all layers, in the compute dtype."""

    key_LBSKH: jax.Array
    value_LBSKH: jax.Array


def slot_positions(lengths_B: jax.Array, prompt_slots: int, slots: int) -> jax.Array:
    """Return the position of every slot, int32 [B, S]: of the prompts, of their padding (UNUSED), and of the tokens to be generated."""
    slot_S = jnp.arange(slots, dtype=jnp.int32)
    prompt_BS = jnp.where(slot_S < lengths_B[:, None], slot_S, UNUSED)
    return jnp.where(slot_S < prompt_slots, prompt_BS, lengths_B[:, None] + slot_S - prompt_slots)


def prefill(decoder: Decoder, tokens_BT: jax.Array, slots: int) -> tuple[jax.Array, Cache]:
    """Run prompts, padded on the right, through the decoder with the attention of training.

    Returns the final-normed hidden states [B, T, D] and a cache of `slots` >= T slots.
    """
    model, execution = decoder.model, decoder.execution
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    tables = [decoder.rotary(positions_BT, windowed=windowed) for windowed in (False, True)]
    empty = [(0, 0), (0, slots - tokens_BT.shape[1]), (0, 0), (0, 0)]

    def block(structure: Any, mixed: bool, x_BTD: jax.Array, layer: tuple[Any, jax.Array]) -> tuple[jax.Array, Cache]:
        parameters, windowed = layer
        kept: list[Cache] = []

        def attend_with(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
            kept.append(_sharded(decoder, Cache(jnp.pad(k_BTKH, empty), jnp.pad(v_BTKH, empty))))

            def attend(arrays: tuple[jax.Array, ...], kind: bool) -> jax.Array:
                q, k, v = arrays
                return execution.attend(q, k, v, None, sinks_N, windowed=kind)

            arrays = (q_BTNH, k_BTKH, v_BTKH)
            if not mixed:
                return attend(arrays, model.windowed(0))
            attended: jax.Array = jax.lax.cond(windowed, partial(attend, kind=True), partial(attend, kind=False), arrays)
            return attended

        return nnx.merge(structure, parameters)(x_BTD, _table(tables, windowed), None, attend_with), kept[0]

    x_BTD, caches, kinds = decoder.embed(tokens_BT, positions_BT), list[Cache](), _kinds(decoder)
    for blocks, windowed_L in zip(decoder.stacks, _by_stack(decoder, jnp.array(kinds)), strict=True):
        structure, stacked = nnx.split(blocks)
        x_BTD, new = jax.lax.scan(partial(block, structure, len(set(kinds)) > 1), x_BTD, (stacked, windowed_L))
        caches.append(new)
    return decoder.normalize(x_BTD), jax.tree.map(lambda *each: each[0] if len(each) == 1 else jnp.concatenate(each), *caches)


def extend(
    decoder: Decoder, cache: Cache, tokens_B: jax.Array, positions_B: jax.Array, slot: jax.Array, positions_BS: jax.Array
) -> tuple[jax.Array, Cache]:
    """Run one token per row through the decoder, attending to the cache and to itself.

    Args:
      cache: of the tokens so far.
      tokens_B, positions_B: the tokens and their positions, int32.
      slot: where their keys and values are stored, int32 []; the same for all rows.
      positions_BS: of all slots (`slot_positions`).

    Returns the final-normed hidden states [B, D] and the cache with the new keys and values.
    """
    model = decoder.model
    tables = [decoder.rotary(positions_B[:, None], windowed=windowed) for windowed in (False, True)]
    distance_BS = positions_B[:, None] - positions_BS

    def block(structure: Any, carry: tuple[jax.Array, Cache], layer: tuple[Any, jax.Array, jax.Array]) -> tuple[tuple[Any, Cache], None]:
        (x_B1D, cache), (parameters, windowed, index) = carry, layer
        visible_BS = distance_BS >= 0
        if model.sliding_window is not None:
            visible_BS &= ~windowed | (distance_BS < model.sliding_window)
        updated: list[Cache] = []

        def attend_with(q_B1NH: jax.Array, k_B1KH: jax.Array, v_B1KH: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
            # The cache is carried, and one slice of it written: as inputs and outputs of the scan all of it would be copied.
            at = (index, 0, slot, 0, 0)
            key_LBSKH = jax.lax.dynamic_update_slice(cache.key_LBSKH, k_B1KH[None], at)
            value_LBSKH = jax.lax.dynamic_update_slice(cache.value_LBSKH, v_B1KH[None], at)
            updated.append(_sharded(decoder, Cache(key_LBSKH, value_LBSKH)))
            of_layer = Cache(*(jax.lax.dynamic_index_in_dim(kept, index, keepdims=False) for kept in updated[0]))
            return _attend(q_B1NH, of_layer, visible_BS, model.attention_softcap, sinks_N)

        x_B1D = nnx.merge(structure, parameters)(x_B1D, _table(tables, windowed), None, attend_with)
        return (x_B1D, updated[0]), None

    x_B1D, layers = decoder.embed(tokens_B[:, None], positions_B[:, None]), (jnp.array(_kinds(decoder)), jnp.arange(model.num_layers))
    for blocks, of_stack in zip(decoder.stacks, _by_stack(decoder, layers), strict=True):
        structure, stacked = nnx.split(blocks)
        (x_B1D, cache), _ = jax.lax.scan(partial(block, structure), (x_B1D, cache), (stacked, *of_stack))
    return decoder.normalize(x_B1D)[:, 0], cache


def _attend(q_B1NH: jax.Array, cache: Cache, visible_BS: jax.Array, softcap: float | None, sinks_N: jax.Array | None) -> jax.Array:
    """Attend to the visible slots; softmax in float32. `cache` is that of one layer, [B, S, K, H]."""
    batch, _, heads, width = q_B1NH.shape
    key_BSKH, value_BSKH = cache
    q_BKGH = q_B1NH.reshape(batch, key_BSKH.shape[2], -1, width)
    scores_BKGS = jnp.einsum("bkgh,bskh->bkgs", q_BKGH, key_BSKH, preferred_element_type=jnp.float32) * width**-0.5
    scores_BKGS = jnp.where(visible_BS[:, None, None], soft_cap(scores_BKGS, softcap), -jnp.inf)
    if sinks_N is not None:
        sinks_BKG1 = jnp.broadcast_to(sinks_N.reshape(*scores_BKGS.shape[1:3], 1), (*scores_BKGS.shape[:3], 1))
        scores_BKGS = jnp.concatenate([scores_BKGS, sinks_BKG1], axis=-1)
    weights_BKGS = jax.nn.softmax(scores_BKGS, axis=-1)[..., : key_BSKH.shape[1]]
    context_BKGH = jnp.einsum("bkgs,bskh->bkgh", weights_BKGS.astype(value_BSKH.dtype), value_BSKH)
    return context_BKGH.reshape(batch, 1, heads, -1)


def _sharded(decoder: Decoder, cache: Cache) -> Cache:
    """Constrain a cache [..., B, S, K, H]."""
    partitioner = decoder.execution.partitioner
    return Cache(*(partitioner.constrain(x, *[None] * (x.ndim - 4), "batch", None, "act_kv_heads", None) for x in cache))


def _kinds(decoder: Decoder) -> list[bool]:
    """Return of each layer whether it has the sliding window."""
    return [decoder.model.windowed(layer) for layer in range(decoder.model.num_layers)]


def _table(tables: list[Any], windowed: jax.Array) -> Any:
    return jax.tree.map(lambda full, local: jnp.where(windowed, local, full), *tables)


def _by_stack(decoder: Decoder, arrays: Any) -> list[Any]:
    """Cut arrays [L, ...] into those of each stack of the decoder."""
    parts, first = [], 0
    for count in map(num_layers_of, decoder.stacks):
        parts.append(jax.tree.map(lambda x, first=first, end=first + count: x[first:end], arrays))
        first += count
    return parts
