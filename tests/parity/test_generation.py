"""Greedy decoding equals transformers' `generate` on the same weights."""

from __future__ import annotations

import pytest
import torch
from flax import nnx

from ridgeline.models.generate import Sampling, generate
from tests.parity.hugging_face import VARIANTS, load_ours, random_tokens, save_random_model

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2-window", "qwen3"])
def test_greedy_generation_agrees(name, tmp_path):
    theirs = save_random_model(VARIANTS[name], tmp_path)
    _, graphdef, params = load_ours(tmp_path)
    prompts = random_tokens((2, 6), seed=3)
    expected = theirs.generate(torch.from_numpy(prompts).long(), do_sample=False, max_new_tokens=20, pad_token_id=0)[:, 6:].tolist()
    ours = generate(nnx.merge(graphdef, params), prompts.tolist(), max_tokens=20, sampling=Sampling(temperature=0))
    assert [result.tokens for result in ours] == expected
