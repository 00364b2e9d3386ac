"""Decoding with a cache equals the full forward pass, and sampling respects its limits."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ridgeline import models
from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import ComputeConfig, PrecisionConfig
from ridgeline.models.generate import Sampling, generate, sample
from ridgeline.models.kv_cache import extend, prefill, slot_positions
from ridgeline.sharding.partition import Partitioner

FP32 = PrecisionConfig(params="float32", compute="float32")
SMALL = {"vocab_size": 61, "num_layers": 2, "embed_dim": 32, "num_heads": 4, "mlp_dim": 48, "max_seq_len": 96, "init_std": 0.3}
GPT2 = {
    "norm": "layernorm",
    "position": "learned",
    "gated_mlp": False,
    "activation": "gelu_tanh",
    "attention_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "tie_embeddings": True,
}
FAMILIES = {
    "gpt2": GPT2,
    "llama": {"num_kv_heads": 2, "rope_scaling": {"kind": "llama3", "original_max_seq_len": 32}},
    "qwen2": {"num_kv_heads": 2, "attention_bias": True, "sliding_window": 5},
    "qwen3": {"num_kv_heads": 1, "head_dim": 24, "qk_norm": True, "tie_embeddings": True, "pad_vocab_to": 64},
}


def make_decoder(family: str):
    model = ModelConfig.model_validate({"family": family, **SMALL, **FAMILIES[family]})
    compute = ComputeConfig.model_validate({"attention": {"backend": "reference"}})
    return models.build(model, compute, FP32, Partitioner.single(), nnx.Rngs(params=1))


@pytest.fixture(scope="module", params=list(FAMILIES))
def decoder(request):
    return make_decoder(request.param)


@pytest.fixture(scope="module")
def llama():
    return make_decoder("llama")


@partial(jax.jit, static_argnums=0)
def _full_logits(graphdef, state, tokens_BT):
    decoder = nnx.merge(graphdef, state)
    return decoder.logits(decoder(tokens_BT))


def full_logits(decoder, tokens_BT):
    return np.asarray(_full_logits(*nnx.split(decoder), jnp.asarray(tokens_BT)))


def test_incremental_logits_equal_the_full_forward_pass_at_every_position(decoder):
    """Two rows whose prompts have different lengths."""
    tokens = np.random.default_rng(0).integers(0, 61, (2, 20)).astype(np.int32)
    expected = full_logits(decoder, tokens)
    graphdef, state = nnx.split(decoder)
    lengths, slots = np.array([7, 4]), 32
    prompts = np.where(np.arange(7) < lengths[:, None], tokens[:, :7], 0)
    positions = slot_positions(jnp.asarray(lengths), 7, slots)

    @jax.jit
    def begin(state, tokens_BT):
        decoder = nnx.merge(graphdef, state)
        x_BTD, cache = prefill(decoder, tokens_BT, slots)
        return decoder.logits(x_BTD), cache

    @jax.jit
    def proceed(state, cache, tokens_B, step):
        decoder = nnx.merge(graphdef, state)
        x_BD, cache = extend(decoder, cache, tokens_B, lengths + step, 7 + step, positions)
        return decoder.logits(x_BD[:, None])[:, 0], cache

    logits, cache = begin(state, prompts)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], expected[row, :length], atol=2e-4)
    for step in range(13):
        at = lengths + step
        logits, cache = proceed(state, cache, tokens[[0, 1], at], step)
        np.testing.assert_allclose(logits, expected[[0, 1], at], atol=2e-4, err_msg=f"step {step}")


def greedy_by_full_passes(decoder, prompt, count):
    row = list(prompt)
    for _ in range(count):
        # One length for all steps, so that this compiles once: causality hides what comes after.
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(row)] = row
        row.append(int(full_logits(decoder, padded)[0, len(row) - 1].argmax()))
    return row[len(prompt) :]


def test_greedy_generation_of_unequal_prompts_equals_repeated_full_passes(decoder):
    prompts = [[5, 9, 2, 44, 17, 3, 8], [7], [60, 1, 0]]
    generated = generate(decoder, prompts, max_tokens=9, sampling=Sampling(temperature=0))
    for prompt, result in zip(prompts, generated, strict=True):
        assert result.tokens == greedy_by_full_passes(decoder, prompt, 9)
        assert result.stopped_by == "length"


def test_generation_stops_before_the_end_of_sequence_token(llama):
    free = generate(llama, [[3, 4]], max_tokens=12, sampling=Sampling(temperature=0))[0].tokens
    eos = free[5]
    stopped = generate(llama, [[3, 4]], max_tokens=12, sampling=Sampling(temperature=0), eos_ids=[eos])[0]
    assert stopped.tokens == free[: free.index(eos)]
    assert stopped.stopped_by == "eos"


def test_samples_depend_on_the_seed_and_not_on_the_other_prompts(llama):
    together = generate(llama, [[3, 4], [9, 9, 9, 9]], max_tokens=10, seed=1)
    alone = generate(llama, [[3, 4]], max_tokens=10, seed=1)
    assert together[0] == alone[0]
    assert generate(llama, [[3, 4]], max_tokens=10, seed=2)[0] != alone[0]


def draws(logits, sampling, count=4000):
    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(sample(jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits))), keys, sampling))


def test_sampling_follows_the_probabilities():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    shares = np.bincount(draws(np.log(probabilities), Sampling()), minlength=4) / 4000
    np.testing.assert_allclose(shares, probabilities, atol=0.03)


def test_temperature_sharpens_by_its_inverse():
    probabilities = np.array([0.6, 0.4])
    shares = np.bincount(draws(np.log(probabilities), Sampling(temperature=0.5)), minlength=2) / 4000
    np.testing.assert_allclose(shares, probabilities**2 / (probabilities**2).sum(), atol=0.03)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_k=100), {0, 1, 2, 3}),
        (Sampling(top_p=0.6), {0, 1}),
        (Sampling(top_p=0.5), {0}),
        (Sampling(top_p=1e-6), {0}),
        (Sampling(top_p=1.0), {0, 1, 2, 3}),
        (Sampling(top_k=3, top_p=0.8), {0, 1}),  # 0.5 and 0.3 of the 0.95 that top_k leaves: 0.84 with the second
        (Sampling(temperature=0), {0}),
    ],
)
def test_sampling_draws_exactly_the_tokens_its_limits_allow(sampling, allowed):
    assert set(draws(np.log([0.5, 0.3, 0.15, 0.05]), sampling).tolist()) == allowed


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "message"),
    [
        ([[1], []], 4, "prompt 2 is empty"),
        ([[1, 61]], 4, "token id 61, outside the model's vocabulary of 61"),
        ([[1, -1]], 4, "token id -1"),
        ([[1] * 90], 7, "model.max_seq_len is 96"),
        ([[1]], 0, "at least 1"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(llama, prompts, max_tokens, message):
    with pytest.raises(UserError, match=message):
        generate(llama, prompts, max_tokens=max_tokens)


@pytest.mark.parametrize("arguments", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_sampling_settings_out_of_range_are_refused(arguments):
    with pytest.raises(UserError):
        Sampling(**arguments)
