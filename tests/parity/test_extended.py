"""Weights of a model with short rows, read with RoPE settings for longer ones: the logits and the config.json of transformers."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import RopeScaling
from ridgeline.models.huggingface.convert import hf_config, open_hf
from ridgeline.sharding.partition import Partitioner
from tests.parity.hugging_face import LLAMA, Variant, build_ours, random_tokens, save_random_model

pytestmark = pytest.mark.parity
BEFORE, LONG, THETA = 32, 96, 7e4
CHANGES = {
    "theta": (None, {"rope_type": "default"}),
    "linear": ({"kind": "linear", "factor": 3.0}, {"rope_type": "linear", "factor": 3.0}),
    "llama3": (
        {"kind": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": BEFORE},
        {"rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "yarn": ({"kind": "yarn", "factor": 3.0, "original_max_seq_len": BEFORE}, {"rope_type": "yarn", "factor": 3.0}),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("short") / "hf"
    save_random_model(Variant("llama", LLAMA | {"num_key_value_heads": 2, "max_position_embeddings": BEFORE}), path)
    return path


@pytest.mark.parametrize("kind", CHANGES)
def test_longer_rows_with_other_rope_settings_equal_transformers(directory, kind, tmp_path):
    scaling, rope = CHANGES[kind]
    rope = rope | {"rope_theta": THETA} | ({"original_max_position_embeddings": BEFORE} if kind in ("llama3", "yarn") else {})
    described = transformers.AutoConfig.from_pretrained(directory)
    described.rope_parameters, described.max_position_embeddings = rope, LONG
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, config=described, attn_implementation="eager", dtype=torch.float32
    )
    changed = {"rope_theta": THETA, "max_seq_len": LONG, "rope_scaling": None if scaling is None else RopeScaling.model_validate(scaling)}
    checkpoint = open_hf(directory, open_hf(directory).model.model_copy(update=changed))
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build_ours(checkpoint.model)), nnx.Param)
    sharding = Partitioner.single().replicated()
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), nnx.to_pure_dict(state))
    decoder = nnx.merge(graphdef, checkpoint.load(abstract))
    tokens = random_tokens((2, LONG))
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(jax.jit(lambda x: decoder.logits(decoder(x)))(tokens), expected, rtol=2e-4, atol=1e-4)

    (tmp_path / "config.json").write_text(json.dumps(hf_config(checkpoint.model, "float32", {})))
    written = transformers.AutoConfig.from_pretrained(tmp_path)
    assert {key: written.rope_parameters[key] for key in rope} == rope
    assert written.max_position_embeddings == LONG


def test_other_differences_are_refused_by_name(directory):
    model = open_hf(directory).model
    for key, value in (("mlp_dim", 64), ("rotary_fraction", 0.5), ("norm_eps", 1e-3), ("rope_interleaved", True)):
        with pytest.raises(UserError, match=f"the config differs from the model in .*: model.{key} = "):
            open_hf(directory, model.model_copy(update={key: value, "rope_theta": THETA}))
