"""Parameter counts: equal to the models themselves and to published totals."""

import math
from pathlib import Path

import jax
import pytest
from flax import nnx

from ridgeline import models
from ridgeline.configs.load import load
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import ComputeConfig, PrecisionConfig
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.parameters import count_parameters
from ridgeline.sharding.partition import Partitioner

PRESETS = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.yaml"))

# Parameters of the published checkpoints: safetensors metadata on Hugging Face, a tied unembedding counted once.
LLAMA4_VISION = 871_932_416
"""Vision encoder and projector of both Llama 4 models, which the published totals include."""
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
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    # The published totals less the vision tower (416_866_032) and the projector (1152 * D + 1152).
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * 2561,
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * 3841,
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * 5377,
    "phi3-mini": 3_821_079_552,
    "phi3-medium": 13_960_238_080,
    "phi4-14b": 14_659_507_200,
    "glm4-9b": 9_400_279_040,
    "glm4-32b": 32_566_081_536,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama-4-scout-17b-16e": 108_641_793_536 - LLAMA4_VISION,
    "llama-4-maverick-17b-128e": 401_583_781_376 - LLAMA4_VISION,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2-236b": 235_741_434_880,
    "deepseek-v3-671b": 671_026_419_200,
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


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        *(("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.35), ("qwen3-235b-a22b", 22.2), ("qwen3-8b", 8.19)),
        *(("deepseek-v2-lite", 2.66), ("deepseek-v2-236b", 21.4), ("deepseek-v3-671b", 37.55)),
        *(("gpt-oss-20b", 3.61 + 0.579), ("gpt-oss-120b", 5.13 + 0.579)),
        *(("llama-4-scout-17b-16e", 17.17), ("llama-4-maverick-17b-128e", 17.17)),
    ],
)
def test_active_parameters_are_as_published(preset, billions):
    """Mixtral's paper (arXiv 2401.04088), Qwen3's model cards and DeepSeek's papers, which round: 12.9B, 3.3B, 22B; 2.4B (without
    embedding), 21B, 37B; gpt-oss's model card (arXiv 2508.10925), which does not count the embedding table."""
    assert count_parameters(load(f"models/{preset}").config.model).active == pytest.approx(billions * 1e9, rel=0.01)


def test_the_module_of_deepseek_v3_has_the_published_parameters():
    """README_WEIGHTS.md of deepseek-ai/DeepSeek-V3: the module has 11.5B parameters without embedding and unembedding, of which it has
    copies in the checkpoint; 685B together with 671B of the model (README.md: 671B and 14B)."""
    model = load("models/deepseek-v3-671b", ["model.mtp_layers=1"]).config.model
    count = count_parameters(model)
    assert count.mtp == pytest.approx(11.5e9, rel=0.01)
    assert count.total + count.embedding + count.unembedding == pytest.approx(685e9, rel=1e-3)
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
        {"norm": "rmsnorm_1p", "norm_position": "both", "qk_norm": True},
        {"norm_position": "post", "num_kv_heads": 2, "qk_norm": True, "qk_norm_dims": "all_heads"},
        {"position": "learned"},
        {"moe": {"experts": 6, "expert_dim": 20}},
        {"moe": {"experts": 6, "dense_layers": 1, "shared_experts": 2, "choice_bias": True}, "gated_mlp": False},
        {"moe": {"experts": 6, "logit_bias": True, "shared_experts": 1, "dense_layers": 1}, "mlp_bias": True, "attention_sinks": True},
        {"sliding_window": 8},
        {"mtp_layers": 2, "moe": {"experts": 6, "expert_dim": 20, "dense_layers": 1, "shared_experts": 1, "choice_bias": True}},
        {"mtp_layers": 1, "norm": "layernorm", "tie_embeddings": True},
        {"latent_attention": {"kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 7}},
        {"latent_attention": {"q_rank": 14, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 7}, "num_layers": 2},
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
    assert count.mlp == of("['mlp']") - sum(size for path, size in built.items() if "mtp" in path and "['mlp']" in path)
    assert count.mtp == of("['mtp']")
    tables = 1 if model.tie_embeddings else 2
    assert count.embedding + count.unembedding == tables * model.padded_vocab_size * 16
    assert count.vocab_padding == tables * (model.padded_vocab_size - 50) * 16
    assert count.non_embedding == count.total - count.embedding - count.positions - count.unembedding


@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2, "expert": 8}, {"data": 2, "fsdp": 16}], ids=str)
def test_sizes_of_layers_of_two_kinds_add_up_to_those_of_the_model(mesh):
    """Maverick: as many layers with experts as without, in turns."""
    overrides = ["data.batch_size=64", *(f"mesh.{axis}={size}" for axis, size in mesh.items())]
    local = LocalSizes.of(load("models/llama-4-maverick-17b-128e", overrides).config, mesh)
    total = sum(layers * kind.layer_matrices / kind.model.num_layers for layers, kind in local.kinds)
    assert [layers for layers, _ in local.kinds] == [24, 24]
    assert total == local.layer_matrices
    assert local.period_weights * local.model.num_layers == local.model.layer_period * sum(
        layers * kind.gathered_layer_weights for layers, kind in local.kinds
    )
