"""FLOP counts: equal to what XLA counts, where it can, and to published figures."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from ridgeline import models
from ridgeline.configs.compose import FAMILIES
from ridgeline.configs.load import load
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import ComputeConfig, PrecisionConfig
from ridgeline.hlo import parse as hlo
from ridgeline.models.loss import cross_entropy
from ridgeline.planner.flops import flops_per_token_6n, mean_keys_per_query, train_flops_per_token
from ridgeline.planner.parameters import count_parameters
from ridgeline.sharding.partition import Partitioner

LLAMA_3_2_1B = ModelConfig(
    vocab_size=128256, num_layers=16, embed_dim=2048, num_heads=32, num_kv_heads=8, head_dim=64, mlp_dim=8192, tie_embeddings=True
)


def test_components_sum_to_the_total_and_forward_is_a_third():
    flops = train_flops_per_token(LLAMA_3_2_1B, 1024)
    assert flops.total == sum(flops.components().values())
    assert flops.forward == flops.total / 3


def test_each_component_is_its_formula():
    model = ModelConfig(vocab_size=50, num_layers=3, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=24)
    flops = train_flops_per_token(model, 32)
    assert flops.attention_projections == 6 * 3 * (2 * 16 * 4 * 6 + 2 * 16 * 2 * 6)
    assert flops.mlp == 18 * 3 * 16 * 24
    assert flops.unembedding == 6 * 16 * 50
    assert flops.attention_scores_full == 12 * 3 * 32 * 4 * 6
    assert flops.attention_scores == flops.attention_scores_full / 2
    ungated = train_flops_per_token(model.model_copy(update={"gated_mlp": False}), 32)
    assert ungated.mlp == 12 * 3 * 16 * 24


def test_llama_3_2_1b_has_the_published_flops():
    # 7.82e9 per token at T=1024: Torres, Supercomputing for Artificial Intelligence, chapter 15 (every key counted)
    assert train_flops_per_token(LLAMA_3_2_1B, 1024).total_full_attention == pytest.approx(7.82e9, rel=1e-3)
    assert flops_per_token_6n(LLAMA_3_2_1B) == 6 * 1_235_814_400


def test_attention_equals_the_projections_at_twice_the_width():
    # JAX scaling book, transformers: full attention equals the QKVO projections at T = 2D (multi-head)
    model = ModelConfig(num_layers=2, embed_dim=64, num_heads=4, mlp_dim=128)
    flops = train_flops_per_token(model, 128)
    assert flops.attention_scores_full == flops.attention_projections


def test_biases_norms_and_padding_do_no_useful_work():
    plain = ModelConfig(vocab_size=50)
    dressed = ModelConfig(vocab_size=50, pad_vocab_to=64, attention_bias=True, mlp_bias=True, norm="layernorm", qk_norm=True)
    assert train_flops_per_token(plain, 64) == train_flops_per_token(dressed, 64)


@given(st.integers(1, 200), st.integers(1, 300))
def test_the_window_counts_the_keys_the_mask_leaves(seq_len, window):
    counted = sum(min(query + 1, window) for query in range(seq_len)) / seq_len
    # areas count half of the diagonal: at most half a key per query less
    assert counted - 0.5 <= mean_keys_per_query(seq_len, window) + 1e-9 <= counted + 1e-6
    assert mean_keys_per_query(seq_len, None) == mean_keys_per_query(seq_len, seq_len) == seq_len / 2


@given(st.integers(1, 200), st.integers(1, 300))
def test_chunks_count_the_keys_the_mask_leaves(seq_len, chunk):
    counted = sum(query % chunk + 1 for query in range(seq_len)) / seq_len
    assert mean_keys_per_query(seq_len, None, chunk) == pytest.approx(counted - 0.5)  # areas count half of the diagonal


T, D, F, V, H = 40, 96, 112, 208, 16  # all different from each other and from head counts: sizes tell products apart
SMALL = {
    "num_layers": 2,
    "embed_dim": D,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": H,
    "mlp_dim": F,
    "vocab_size": V,
    "max_seq_len": 64,
}


def family(name, **changes):
    """A small model with every architectural setting of a family."""
    defaults = YAML(typ="safe").load(FAMILIES / f"{name}.yaml")["model"]
    return ModelConfig(**(defaults | SMALL | changes), family=name)


MODELS = {
    "gpt2": family("gpt2", num_kv_heads=4),
    "llama": family("llama"),
    "llama tied": family("llama", tie_embeddings=True),
    "llama windowed": family("llama", sliding_window=7),
    "llama one key head": family("llama", num_kv_heads=1),
    "llama padded vocabulary": family("llama", vocab_size=V - 8, pad_vocab_to=V),
    "gemma2": family("gemma2", sliding_window=7, num_layers=3),
    "olmo3": family("olmo3", sliding_window=7, num_layers=4, num_kv_heads=4),
    "phi3": family("phi3", rotary_fraction=0.75),
    "qwen2": family("qwen2"),
    "qwen3": family("qwen3"),
}


LATENT = {"num_kv_heads": None, "head_dim": None, "latent_attention": {"q_rank": 24, "kv_rank": 20, "nope_dim": 10, "rope_dim": 6}}


@pytest.mark.parametrize(("preset", "gflops"), [("deepseek-v2-236b", 155), ("deepseek-v3-671b", 250)])
def test_deepseek_has_the_published_flops(preset, gflops):
    # per token at T=4096: Insights into DeepSeek-V3 (arXiv 2505.09343), table 2, causal attention
    assert train_flops_per_token(load(f"models/{preset}").config.model, 4096).total / 1e9 == pytest.approx(gflops, rel=0.003)


@pytest.mark.parametrize("q_rank", [24, None])
def test_latent_attention_counts_the_dots_of_xlas_forward_pass(q_rank):
    latent = LATENT["latent_attention"] | {"q_rank": q_rank, "value_dim": 12}
    model = family("llama", **LATENT | {"latent_attention": latent})
    seen = sum(flops for *_, flops in lowered_dots(model, "reference", gradient=False))
    flops = train_flops_per_token(model, T)
    assert seen == pytest.approx(flops.total_full_attention / 3 * T, rel=1e-12)
    assert flops.components()["query_key_products"] == pytest.approx(flops.attention_scores * 16 / 28)
    assert flops.total == pytest.approx(sum(flops.components().values()))


def lowered_dots(model, backend, *, gradient):
    """Every dot of the unoptimized HLO of the real model and loss, as ((contracted dims), (result dims), FLOPs)."""
    compute = ComputeConfig(scan_layers=False, attention={"backend": backend}, loss_chunk=T)
    decoder = nnx.eval_shape(lambda: models.build(model, compute, PrecisionConfig(compute="float32"), Partitioner.single(), nnx.Rngs(0)))
    structure = nnx.graphdef(decoder)
    tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def loss(params, tokens_BT):
        merged = nnx.merge(structure, params)
        sums = cross_entropy(
            merged(tokens_BT), merged.unembedding(), tokens_BT, jnp.ones((1, T)),
            vocab_size=model.vocab_size, chunk=T, z_loss=0.0, partitioner=Partitioner.single(),
        )  # fmt: skip
        return sums.nats

    def forward(params, tokens_BT):
        merged = nnx.merge(structure, params)
        return merged.logits(merged(tokens_BT))

    function = jax.grad(loss) if gradient else forward
    lowered = jax.jit(function).lower(nnx.state(decoder), tokens)
    module = hlo.parse(lowered.compiler_ir("hlo").get_hlo_module().to_string())
    for name, times in module.runs.items():
        computation = module.computations[name]
        for dot in (found for found in computation.instructions if found.opcode == "dot"):
            left = computation.by_name[dot.operands[0]].shapes[0].dims
            contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes).group(1)
            contracted = tuple(left[int(dim)] for dim in contracting.split(","))
            result = dot.shapes[0].dims
            yield contracted, result, times * 2 * math.prod(contracted) * math.prod(result)


def component(contracted, result):
    """Tell from its sizes which product of the forward pass a dot is."""
    size = math.prod(contracted)
    if size == T:
        return "attention_value_products"
    if size == H:
        return "query_key_products"
    if size == F or F in result:
        return "mlp"
    if V in result:
        return "unembedding"
    return "output_projection" if size == 4 * H else "qkv_projections"


@pytest.mark.parametrize("name", MODELS)
def test_every_component_is_the_dots_of_xlas_forward_pass(name):
    model = MODELS[name]
    seen = {}
    for contracted, result, flops in lowered_dots(model, "reference", gradient=False):
        kind = component(contracted, result)
        seen[kind] = seen.get(kind, 0) + flops
    counted = train_flops_per_token(model, T)
    # XLA multiplies padded logits and every pair of tokens: the convention counts neither the padding nor what the mask hides
    useful = {key: value / 3 * T for key, value in counted.components().items()}
    useful["unembedding"] *= model.padded_vocab_size / model.vocab_size
    for half in ("query_key_products", "attention_value_products"):
        useful[half] = counted.attention_scores_full / 2 / 3 * T
    assert seen == pytest.approx(useful, rel=1e-12)


@pytest.mark.parametrize(("name", "backend"), [("llama", "reference"), ("llama", "xla"), ("gpt2", "xla"), ("qwen3", "reference")])
def test_training_is_three_times_the_forward_dots(name, backend):
    seen = sum(flops for *_, flops in lowered_dots(MODELS[name], backend, gradient=True))
    assert seen == pytest.approx(train_flops_per_token(MODELS[name], T).total_full_attention * T, rel=1e-12)


@pytest.mark.parametrize("modules", [1, 2])
def test_modules_of_multi_token_prediction_count_the_dots_of_a_model_of_their_blocks(modules):
    """Each has the dots of a model of its block alone, which XLA's dots are above; and the projection of two streams to one."""
    model = family("llama", sliding_window=7, mtp_layers=modules)
    plain, counted = (train_flops_per_token(each, T) for each in (model.model_copy(update={"mtp_layers": 0}), model))
    alone = train_flops_per_token(model.model_copy(update={"mtp_layers": 0, "num_layers": 1}), T)
    projection = 6 * 2 * D * D
    assert counted.components() == plain.components() | {"mtp": pytest.approx(modules * (alone.total + projection))}
    assert counted.total == pytest.approx(sum(counted.components().values()))
    full = modules * (alone.total_full_attention + projection)
    assert counted.total_full_attention - plain.total_full_attention == pytest.approx(full)


def test_the_convention_differs_from_counting_every_pair_by_what_the_mask_hides():
    flops = train_flops_per_token(MODELS["llama windowed"], T)
    visible = sum(min(query + 1, 7) for query in range(T)) / T**2
    assert flops.total_full_attention - flops.total == pytest.approx(flops.attention_scores_full - flops.attention_scores)
    assert flops.attention_scores / flops.attention_scores_full == pytest.approx(visible, abs=0.5 / T)


def test_a_layer_counts_projections_and_mlp_of_both_directions():
    # in print: a layer's forward pass as 4*B*D^2. With the MLP of width 4D it is 24*B*D^2 (2 per multiply-add, 12*D^2 weights)
    model = ModelConfig(num_layers=1, embed_dim=64, num_heads=4, mlp_dim=256, gated_mlp=False, vocab_size=1)
    flops = train_flops_per_token(model, 1)
    assert (flops.attention_projections + flops.mlp) / 3 == 24 * 64**2


def test_the_70b_model_of_the_scaling_book_has_70_4_billion_parameters():
    model = ModelConfig(
        num_layers=80, embed_dim=8192, mlp_dim=28672, num_heads=64, num_kv_heads=8, head_dim=128, vocab_size=128256, tie_embeddings=False
    )
    assert count_parameters(model).total == pytest.approx(70.4e9, rel=3e-3)
