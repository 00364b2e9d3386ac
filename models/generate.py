"""Generation: prefill, then one token at a time with a key/value cache.

One compiled program: a pass over all prompts (models/kv_cache.py), and a loop on the devices that ends when every row has ended.

Legend: B batch, T tokens of the prompts, S cache slots, D embed width, V vocabulary, M generated tokens, E end-of-sequence ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import Config
from ridgeline.models.decoder import Decoder
from ridgeline.models.kv_cache import Cache, extend, prefill, slot_positions

_SLOTS_MULTIPLE = 64
"""Prompts and caches are padded to a multiple of this, so that similar lengths share a compiled program."""

BATCH_SIZE = 32
"""Prompts at a time by default."""
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
    """Return the config that decodes a token at a time: no dim is sharded along the sequence, and any batch fits (`generate` pads it).

    Devices of `pipeline` and `context` become devices of `fsdp`. No row depends on the others: experts drop no tokens, and matmuls have
    the compute dtype, without scales per tensor.
    """
    mesh, rules = config.mesh, {**config.mesh.rules, "residual_seq": []}
    fsdp = mesh.fsdp if -1 in (mesh.fsdp, mesh.pipeline, mesh.context) else mesh.fsdp * mesh.pipeline * mesh.context
    fsdp = -1 if -1 in (mesh.pipeline, mesh.context) else fsdp
    experts = config.compute.experts.model_copy(update={"capacity_factor": None})
    attention = config.compute.attention.model_copy(update={"backend": "auto"})  # of these devices, not of those of the run
    changes = {
        "mesh": mesh.model_copy(update={"rules": rules, "fsdp": fsdp, "pipeline": 1, "context": 1, "pipeline_chunks": 1}),
        "compute": config.compute.model_copy(update={"tensor_overlap": "gather", "experts": experts, "attention": attention}),
        "precision": config.precision.model_copy(update={"matmul": "compute"}),
        "data": config.data.model_copy(update={"batch_size": ANY_BATCH}),
        "trainer": config.trainer.model_copy(update={"accumulation": 1}),
        "evaluation": config.evaluation.model_copy(update={"batch_size": None}),
    }
    return config.model_copy(update=changes)


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
    batch_size: int = BATCH_SIZE,
    on_batch: Callable[[], object] = lambda: None,
    cast_once: bool = True,
) -> list[Generation]:
    """Generate up to `max_tokens` tokens per prompt, or up to the first of `eos_ids`; `batch_size` prompts at a time, in their order.

    on_batch: called after each batch. cast_once: keep a copy of the matrices in the compute dtype, which is faster. The samples of a prompt
    depend on the seed and its index, not on the other prompts. Called in every process of the mesh.
    Raises UserError for an empty prompt, an id outside the vocabulary, and a length above model.max_seq_len.
    """
    check_prompts(decoder.model, prompts, max_tokens)
    if batch_size < 1:
        raise UserError(f"the batch size must be at least 1, got {batch_size}")
    if not prompts:
        return []
    shards, prompt_slots = decoder.execution.partitioner.axis_size("batch"), _slots(max(map(len, prompts)))
    rows = -(-min(batch_size, len(prompts)) // shards) * shards
    graphdef, state = nnx.split(decoder)
    slots = prompt_slots + _slots(max_tokens)
    run = partial(generate_rows, graphdef, slots, max_tokens, sampling or Sampling(), cast_once, state)
    eos_E, made = np.array(sorted(eos_ids), np.int32), list[Generation]()
    for first in range(0, len(prompts), rows):
        index_B = np.minimum(np.arange(first, first + rows, dtype=np.int32), len(prompts) - 1)  # further rows repeat the last prompt
        lengths_B = np.array([len(prompts[index]) for index in index_B], np.int32)
        tokens_BT = np.zeros((rows, prompt_slots), np.int32)
        for row, index in enumerate(index_B):
            tokens_BT[row, : lengths_B[row]] = prompts[index]
        found = zip(*jax.device_get(run(tokens_BT, lengths_B, index_B, eos_E, np.uint32(seed))), strict=True)
        on_batch()
        made += [Generation([int(token) for token in row[:count]], "eos" if ended else "length") for row, count, ended in found]
    return made[: len(prompts)]


def _slots(tokens: int) -> int:
    return -(-tokens // _SLOTS_MULTIPLE) * _SLOTS_MULTIPLE


def _cast(state: nnx.State, dtype: jnp.dtype) -> nnx.State:
    """Cast the matrices that every step casts, once before the loop: a step then reads fewer bytes. The results are the same."""

    def one(leaf: Any) -> Any:
        axes = leaf.get_metadata().get("axes") or ()
        matrix = {"embed", "expert_embed"} & set(axes) and "router" not in axes
        return leaf.replace(leaf.get_raw_value().astype(dtype)) if matrix else leaf

    return jax.tree.map(one, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


class _Progress(NamedTuple):
    """The carry of the decoding loop."""

    step: jax.Array
    cache: Cache
    last_B: jax.Array
    """The next input token of each row."""
    tokens_BM: jax.Array
    counts_B: jax.Array
    ended_B: jax.Array


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def generate_rows(
    graphdef: Any,
    slots: int,
    max_tokens: int,
    sampling: Sampling,
    cast_once: bool,
    state: Any,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    index_B: jax.Array,
    eos_E: jax.Array,
    seed: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (tokens [B, M], number of valid tokens [B], whether the row ended with an end-of-sequence token [B]), replicated.

    Args:
      graphdef, state: of the decoder.
      slots: of the cache: those of the prompts (T) and of the new tokens.
      cast_once: as in `generate`.
      tokens_BT, lengths_B: the prompts, int32, padded on the right.
      index_B: number of each prompt, of which its samples depend, int32.
    """
    decoder = nnx.merge(graphdef, state)
    if cast_once:
        decoder = nnx.merge(graphdef, _cast(state, decoder.execution.matmul.compute_dtype))
    partitioner, key = decoder.execution.partitioner, jax.random.key(seed)
    batch, length = tokens_BT.shape
    tokens_BT = partitioner.constrain(tokens_BT, "batch", None)
    row_keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(index_B)

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
        done = progress.step - 1  # generated tokens that are in the cache
        x_BD, cache = extend(decoder, progress.cache, progress.last_B, lengths_B + done, length + done, positions_BS)
        return take(progress._replace(cache=cache), choose(x_BD, progress.step))

    positions_BS = slot_positions(lengths_B, length, slots)
    x_BTD, cache = prefill(decoder, tokens_BT, slots)
    last_BD = jnp.take_along_axis(x_BTD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
    zeros_B, none_B = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    start = _Progress(jnp.int32(0), cache, zeros_B, jnp.zeros((batch, max_tokens), jnp.int32), zeros_B, none_B)
    progress = jax.lax.while_loop(unfinished, decode, take(start, choose(last_BD, start.step)))
    return (
        partitioner.constrain(progress.tokens_BM, None, None),
        partitioner.constrain(progress.counts_B, None),
        partitioner.constrain(progress.ended_B, None),
    )


def check_prompts(model: ModelConfig, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Raise UserError for prompts that cannot be continued by `max_tokens` tokens."""
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
