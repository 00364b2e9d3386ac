"""Generation: prefill, then one token at a time with a key/value cache.

A token's slot in the cache is its position, so prompts of different lengths share a batch padded on the right. A query attends only to
slots up to its own position: slots after a row's end are masked, and overwritten as the row grows.

Legend: L layers, B batch, T tokens per pass, S cache slots, N query heads, K key/value heads, G = N / K, H head width, V vocabulary,
M generated tokens, E end-of-sequence ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.models.attention.masks import soft_cap
from ridgeline.models.decoder import Decoder, num_layers_of

_SLOTS_MULTIPLE = 64
"""Prompts and caches are padded to a multiple of this, so that similar lengths share a compiled program."""

ANY_BATCH = math.lcm(*range(1, 33))
"""A batch size that every mesh of up to 32 row shards divides."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. top_k and top_p apply in that order, after the temperature."""

    temperature: float = 1.0
    """0: greedy, the most likely token."""
    top_k: int | None = None
    """Only the k most likely tokens; null: all."""
    top_p: float | None = None
    """Only the most likely tokens that together reach this probability (arXiv 1904.09751); null: all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p must be above 0 and at most 1, got {self.top_p}")


@dataclass(frozen=True)
class Generation:
    """The result of one prompt."""

    tokens: list[int]
    """Without the prompt and without the end-of-sequence token."""
    stopped_by: Literal["eos", "length"]


def generation_config(config: Config) -> Config:
    """Return the config that decodes a token at a time: no dim is sharded along the sequence, and any batch fits (`generate` pads it)."""
    rules = {**config.mesh.rules, "residual_seq": []}
    changes = {
        "mesh": config.mesh.model_copy(update={"rules": rules}),
        "compute": config.compute.model_copy(update={"tensor_overlap": "gather"}),
        "data": config.data.model_copy(update={"batch_size": ANY_BATCH}),
        "trainer": config.trainer.model_copy(update={"accumulation": 1}),
        "evaluation": config.evaluation.model_copy(update={"batch_size": None}),
    }
    return config.model_copy(update=changes)


class Cache(NamedTuple):
    """Keys and values of all layers, in the compute dtype."""

    key_LBSKH: jax.Array
    value_LBSKH: jax.Array


def init_cache(decoder: Decoder, batch: int, slots: int) -> Cache:
    """Return an empty cache for `slots` positions."""
    model = decoder.model
    shape, dtype = (model.num_layers, batch, slots, model.kv_heads), decoder.execution.matmul.compute_dtype
    return Cache(jnp.zeros((*shape, model.head_width), dtype), jnp.zeros((*shape, model.value_width), dtype))


def advance(decoder: Decoder, cache: Cache, tokens_BT: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, Cache]:
    """Run new tokens through the decoder, attending to the cache and to themselves.

    Returns the final-normed hidden states [B, T, D] and the cache with the new keys and values.
    """
    model, tables = decoder.model, [decoder.rotary(positions_BT, windowed=windowed) for windowed in (False, True)]

    def block(structure: Any, x_BTD: jax.Array, layer: tuple[Any, Cache, jax.Array]) -> tuple[jax.Array, Cache]:
        parameters, old, windowed = layer
        rotary = jax.tree.map(lambda full, local: jnp.where(windowed, local, full), *tables)
        window = None if model.sliding_window is None else jnp.where(windowed, model.sliding_window, old.key_LBSKH.shape[1])
        updated: list[Cache] = []

        def attend_with(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
            rows = jnp.arange(q_BTNH.shape[0])[:, None]
            updated.append(Cache(*(kept.at[rows, positions_BT].set(new) for kept, new in zip(old, (k_BTKH, v_BTKH), strict=True))))
            return _attend_to_cache(q_BTNH, updated[0], positions_BT, window, model.attention_softcap, sinks_N)

        x_BTD = nnx.merge(structure, parameters)(x_BTD, rotary, None, attend_with)
        return x_BTD, updated[0]

    x_BTD, layer = decoder.embed(tokens_BT, positions_BT), 0
    windowed_L = jnp.array([model.windowed(layer) for layer in range(model.num_layers)])
    caches: list[Cache] = []
    for blocks in decoder.stacks:
        structure, stacked = nnx.split(blocks)
        end = layer + num_layers_of(blocks)
        of_stack = jax.tree.map(lambda kept, start=layer, end=end: kept[start:end], (cache, windowed_L))
        x_BTD, new = jax.lax.scan(partial(block, structure), x_BTD, (stacked, *of_stack))
        caches, layer = [*caches, new], end
    return decoder.normalize(x_BTD), jax.tree.map(lambda *each: each[0] if len(each) == 1 else jnp.concatenate(each), *caches)


def _attend_to_cache(
    q_BTNH: jax.Array,
    cache: Cache,
    positions_BT: jax.Array,
    window: jax.Array | None,
    softcap: float | None,
    sinks_N: jax.Array | None,
) -> jax.Array:
    """Attend to the slots up to each query's position; softmax in float32. `cache` is that of one layer, [B, S, K, H]."""
    batch, length, _, width = q_BTNH.shape
    key_BSKH, value_BSKH = cache
    q_BTKGH = q_BTNH.reshape(batch, length, key_BSKH.shape[2], -1, width)
    scores_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, key_BSKH, preferred_element_type=jnp.float32) * width**-0.5
    scores_BKGTS = soft_cap(scores_BKGTS, softcap)
    distance_BTS = positions_BT[:, :, None] - jnp.arange(key_BSKH.shape[1])
    visible_BTS = distance_BTS >= 0
    if window is not None:
        visible_BTS &= distance_BTS < window
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    if sinks_N is not None:
        sinks_BKGT1 = jnp.broadcast_to(sinks_N.reshape(*scores_BKGTS.shape[1:3], 1, 1), (*scores_BKGTS.shape[:4], 1))
        scores_BKGTS = jnp.concatenate([scores_BKGTS, sinks_BKGT1], axis=-1)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)[..., : key_BSKH.shape[1]]
    context_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS.astype(value_BSKH.dtype), value_BSKH)
    return context_BTKGH.reshape(*q_BTNH.shape[:3], -1)


def sample(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """Sample one token per row, int32 [B], from float32 logits; row b uses keys_B[b]."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[-1]:
        kth_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
    if sampling.top_p is not None and sampling.top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV  # of all more likely tokens
        kept_BV = before_BV < sampling.top_p  # the most likely token always stays
        threshold_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < threshold_B1, -jnp.inf, logits_BV)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    eos_ids: Sequence[int] = (),
    seed: int = 0,
) -> list[Generation]:
    """Generate up to `max_tokens` tokens per prompt, or up to the first of `eos_ids`.

    The samples of a prompt depend on the seed and its index, not on the other prompts.
    Raises UserError for an empty prompt, an id outside the vocabulary, and a length above model.max_seq_len.
    """
    _check(decoder, prompts, max_tokens)
    if not prompts:
        return []
    longest = max(map(len, prompts))
    prompt_slots = -(-longest // _SLOTS_MULTIPLE) * _SLOTS_MULTIPLE
    slots = max(prompt_slots, -(-(longest + max_tokens) // _SLOTS_MULTIPLE) * _SLOTS_MULTIPLE)
    shards = decoder.execution.partitioner.axis_size("batch")
    rows = -(-len(prompts) // shards) * shards  # further rows repeat the last prompt
    padded = [prompts[min(row, len(prompts) - 1)] for row in range(rows)]
    tokens_BT = np.zeros((rows, prompt_slots), np.int32)
    for row, prompt in enumerate(padded):
        tokens_BT[row, : len(prompt)] = prompt
    lengths_B = np.array([len(prompt) for prompt in padded], np.int32)
    graphdef, state = nnx.split(decoder)
    run = partial(_generate, graphdef, slots, max_tokens, sampling or Sampling())
    eos_E = jnp.asarray(sorted(eos_ids), jnp.int32)
    tokens_BM, counts_B, ended_B = jax.device_get(run(state, jnp.asarray(tokens_BT), jnp.asarray(lengths_B), eos_E, jax.random.key(seed)))
    found = zip(tokens_BM, counts_B, ended_B, strict=True)
    made = [Generation([int(token) for token in row[:count]], "eos" if ended else "length") for row, count, ended in found]
    return made[: len(prompts)]


class _Progress(NamedTuple):
    """The carry of the decoding loop."""

    step: jax.Array
    cache: Cache
    last_B: jax.Array
    """The next input token of each row."""
    tokens_BM: jax.Array
    counts_B: jax.Array
    ended_B: jax.Array


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(
    graphdef: Any,
    slots: int,
    max_tokens: int,
    sampling: Sampling,
    state: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    eos_E: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (tokens [B, M], number of valid tokens [B], whether the row ended with an end-of-sequence token [B])."""
    decoder = nnx.merge(graphdef, state)
    batch, length = tokens_BT.shape
    row_keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))

    def choose(x_BD: jax.Array, step: jax.Array) -> jax.Array:
        keys_B = jax.vmap(lambda row_key: jax.random.fold_in(row_key, step))(row_keys_B)
        return sample(decoder.logits(x_BD[:, None])[:, 0], keys_B, sampling)

    def take(progress: _Progress, chosen_B: jax.Array) -> _Progress:
        """Store the sampled tokens; a row that has ended, or ends with this token, stores nothing."""
        ended_B = progress.ended_B | jnp.isin(chosen_B, eos_E)
        return progress._replace(
            step=progress.step + 1,
            last_B=chosen_B,
            tokens_BM=progress.tokens_BM.at[:, progress.step].set(jnp.where(ended_B, 0, chosen_B)),
            counts_B=progress.counts_B + ~ended_B,
            ended_B=ended_B,
        )

    def unfinished(progress: _Progress) -> jax.Array:
        return (progress.step < max_tokens) & ~jnp.all(progress.ended_B)

    def decode(progress: _Progress) -> _Progress:
        positions_B1 = (lengths_B + progress.step - 1)[:, None]
        x_BTD, cache = advance(decoder, progress.cache, progress.last_B[:, None], positions_B1)
        return take(progress._replace(cache=cache), choose(x_BTD[:, 0], progress.step))

    positions_BT = jnp.broadcast_to(jnp.arange(length), tokens_BT.shape)
    x_BTD, cache = advance(decoder, init_cache(decoder, batch, slots), tokens_BT, positions_BT)
    last_BD = jnp.take_along_axis(x_BTD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
    zeros_B, none_B = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    start = _Progress(jnp.int32(0), cache, zeros_B, jnp.zeros((batch, max_tokens), jnp.int32), zeros_B, none_B)
    progress = jax.lax.while_loop(unfinished, decode, take(start, choose(last_BD, start.step)))
    return progress.tokens_BM, progress.counts_B, progress.ended_B


def _check(decoder: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    model = decoder.model
    if max_tokens < 1:
        raise UserError(f"the number of tokens to generate must be at least 1, got {max_tokens}")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise UserError(f"prompt {number} is empty: it needs at least one token")
        outside = [token for token in prompt if not 0 <= token < model.vocab_size]
        if outside:
            raise UserError(f"prompt {number} has token id {outside[0]}, outside the model's vocabulary of {model.vocab_size}")
        if len(prompt) + max_tokens > model.max_seq_len:
            limit = f"model.max_seq_len is {model.max_seq_len}"
            raise UserError(f"prompt {number} ({len(prompt)} tokens) plus {max_tokens} new tokens is too long: {limit}")
