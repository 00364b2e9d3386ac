"""The key/value cache: one pass over the prompts fills it, then each pass adds one token.

Prompts of different lengths share a batch, padded on the right to P slots. Generated token i of every row is in slot P + i, so that a pass
writes one slice of the cache; what a query sees follows from the position of each slot. Rows of the cache are sharded as the batch, heads
as keys and values.

Legend: L layers, B batch, T tokens of the prompts (P slots), S cache slots, N query heads, K key/value heads, G = N / K, H head width,
D embed width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.models.attention.masks import soft_cap
from ridgeline.models.decoder import Decoder, LayerPlaces, scan_layers
from ridgeline.models.rope import tempered

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
    tables = {windowed: decoder.rotary(positions_BT, windowed=windowed) for windowed in (False, True)}
    empty = [(0, 0), (0, slots - tokens_BT.shape[1]), (0, 0), (0, 0)]

    def block(structure: Any, windowed: bool, x_BTD: jax.Array, parameters: Any) -> tuple[jax.Array, Cache]:
        kept: list[Cache] = []

        def attend_with(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
            kept.append(_sharded(decoder, Cache(jnp.pad(k_BTKH, empty), jnp.pad(v_BTKH, empty))))
            q_BTNH = q_BTNH if windowed else tempered(q_BTNH, positions_BT, model.attention_temperature)
            segments_BT = decoder.visible_segments(None, tokens_BT.shape, windowed=windowed)
            return execution.attend(q_BTNH, k_BTKH, v_BTKH, segments_BT, sinks_N, windowed=windowed)

        return nnx.merge(structure, parameters)(x_BTD, tables[windowed], None, attend_with), kept[0]

    x_BTD, caches, first = decoder.embed(tokens_BT, positions_BT), list[Cache](), 0
    for stacks in decoder.runs:
        places = LayerPlaces.of(model, first, stacks)
        structures, layers = zip(*map(nnx.split, stacks), strict=True)
        x_BTD, new = scan_layers(places, layers, _chosen(lambda stack, *kind: partial(block, structures[stack], *kind)), x_BTD)  # noqa: B023
        caches.append(new)
        first += places.count
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
    model, positions_B1 = decoder.model, positions_B[:, None]
    tables = {windowed: decoder.rotary(positions_B1, windowed=windowed) for windowed in (False, True)}
    seen_BS = positions_BS <= positions_B1
    near_BS = seen_BS
    if model.sliding_window is not None:
        near_BS &= positions_B1 - positions_BS < model.sliding_window
    elif model.attention_chunk is not None:
        near_BS &= positions_BS // model.attention_chunk == positions_B1 // model.attention_chunk

    def block(structure: Any, windowed: bool, carry: tuple[jax.Array, Cache], layer: tuple[Any, jax.Array]) -> tuple[Any, None]:
        (x_B1D, cache), (parameters, index) = carry, layer
        updated: list[Cache] = []

        def attend_with(q_B1NH: jax.Array, k_B1KH: jax.Array, v_B1KH: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
            # The cache is carried, and one slice of it written: as inputs and outputs of the scan all of it would be copied.
            at = (index, 0, slot, 0, 0)
            key_LBSKH = jax.lax.dynamic_update_slice(cache.key_LBSKH, k_B1KH[None], at)
            value_LBSKH = jax.lax.dynamic_update_slice(cache.value_LBSKH, v_B1KH[None], at)
            updated.append(_sharded(decoder, Cache(key_LBSKH, value_LBSKH)))
            of_layer = Cache(*(jax.lax.dynamic_index_in_dim(kept, index, keepdims=False) for kept in updated[0]))
            q_B1NH = q_B1NH if windowed else tempered(q_B1NH, positions_B1, model.attention_temperature)
            return _attend(q_B1NH, of_layer, near_BS if windowed else seen_BS, model.attention_softcap, sinks_N)

        x_B1D = nnx.merge(structure, parameters)(x_B1D, tables[windowed], None, attend_with)
        return (x_B1D, updated[0]), None

    carry, first = (decoder.embed(tokens_B[:, None], positions_B1), cache), 0
    for stacks in decoder.runs:
        places = LayerPlaces.of(model, first, stacks)
        structures, parameters = zip(*map(nnx.split, stacks), strict=True)
        layers = [(each, jnp.asarray(first + places.layers_of(stack))) for stack, each in enumerate(parameters)]
        carry, _ = scan_layers(places, layers, _chosen(lambda stack, *kind: partial(block, structures[stack], *kind)), carry)  # noqa: B023
        first += places.count
    return decoder.normalize(carry[0])[:, 0], carry[1]


def _chosen(layer: Callable[[int, bool], Callable[[Any, Any], Any]]) -> Callable[[bool, int, int | None], Callable[[Any, Any], Any]]:
    """Return the functions of layers for `scan_layers`, from (stack, windowed) -> function of (carry, layer)."""

    def run(windowed: bool, stack: int, at: int | None) -> Callable[[Any, Any], Any]:
        of_layer = layer(stack, windowed)
        return of_layer if at is None else lambda carry, layers: of_layer(carry, jax.tree.map(lambda x: x[at], layers))

    return run


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
