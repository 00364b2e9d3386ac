"""Parameter counts: equal to the models themselves and to published totals."""

import math
from pathlib import Path

import jax
import pytest
from flax import nnx

from ridgeline import models
from ridgeline.configs.load import load
from ridgeline.configs.schema import ComputeConfig, ModelConfig, PrecisionConfig
from ridgeline.planner.parameters import count_parameters
from ridgeline.sharding.partition import Partitioner

PRESETS = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.yaml"))

# Parameters of the published checkpoints: safetensors metadata on Hugging Face, a tied unembedding counted once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


def built_sizes(model):
    """Sizes of the parameters of the model as built, by path, without allocating one."""
    build = lambda: models.build(model, ComputeConfig(), PrecisionConfig(), Partitioner.single(), nnx.Rngs(0))  # noqa: E731
    params = nnx.to_pure_dict(nnx.split(nnx.eval_shape(build), nnx.Param)[1])
    return {jax.tree_util.keystr(path): math.prod(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def test_every_preset_has_a_published_total_here():
    assert {p.stem for p in PRESETS} == PUBLISHED.keys()


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_presets_count_as_published_and_as_built(preset):
    model = load(preset).config.model
    count = count_parameters(model)
    assert count.total == PUBLISHED[preset.stem]
    assert count.total == sum(count.components().values()) == sum(built_sizes(model).values())


BASE = {"vocab_size": 50, "num_layers": 3, "embed_dim": 16, "num_heads": 4, "mlp_dim": 24, "max_seq_len": 32}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "head_dim": 6},
        {"tie_embeddings": True},
        {"pad_vocab_to": 64},
        {"pad_vocab_to": 64, "tie_embeddings": True},
        {"attention_bias": True},
        {"output_bias": True},
        {"mlp_bias": True},
        {"mlp_bias": True, "gated_mlp": False},
        {"gated_mlp": False},
        {"qk_norm": True, "head_dim": 6},
        {"norm": "layernorm"},
        {"position": "learned"},
        {"sliding_window": 8},
        {
            "num_kv_heads": 2,
            "attention_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "norm": "layernorm",
            "position": "learned",
            "qk_norm": True,
            "pad_vocab_to": 52,
        },
    ],
    ids=lambda change: "+".join(change) or "plain",
)
def test_every_architectural_choice_counts_as_built(change):
    model = ModelConfig(**(BASE | change))
    count, built = count_parameters(model), built_sizes(model)
    assert count.total == sum(built.values())
    of = lambda word: sum(size for path, size in built.items() if word in path)  # noqa: E731
    assert count.mlp == of("mlp") - of("mlp_norm")
    tables = 1 if model.tie_embeddings else 2
    assert count.embedding + count.unembedding == tables * model.padded_vocab_size * 16
    assert count.vocab_padding == tables * (model.padded_vocab_size - 50) * 16
    assert count.non_embedding == count.total - count.embedding - count.positions - count.unembedding
