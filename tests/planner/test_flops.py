"""FLOP counts: equal to what XLA counts, where it can, and to published figures."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import models
from configs.schema import ComputeConfig, ModelConfig, PrecisionConfig
from planner.flops import flops_per_token_6n, mean_keys_per_query, train_flops_per_token
from sharding.partition import Partitioner

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


def test_the_forward_pass_of_the_real_model_does_the_counted_matmuls():
    model = ModelConfig(vocab_size=512, num_layers=2, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384, max_seq_len=64)
    compute = ComputeConfig(scan_layers=False, attention={"backend": "reference"})
    precision = PrecisionConfig(compute="float32")

    def forward(tokens_BT, positions_BT, segment_ids_BT):
        decoder = models.build(model, compute, precision, Partitioner.single(), nnx.Rngs(0))
        graphdef, params = nnx.split(decoder)
        frozen = nnx.merge(graphdef, jax.lax.stop_gradient(params))
        return frozen.logits(frozen(tokens_BT, positions_BT, segment_ids_BT))

    seq_len = 64
    argument = jax.ShapeDtypeStruct((1, seq_len), jnp.int32)
    jaxpr = jax.make_jaxpr(forward)(argument, argument, argument)
    dot_flops = sum(_dot_flops(jaxpr.jaxpr))
    counted = train_flops_per_token(model, seq_len)
    assert dot_flops == pytest.approx(counted.total_full_attention / 3 * seq_len, rel=1e-6)


def _dot_flops(jaxpr):
    """FLOPs of every dot_general in a jaxpr and those inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contract, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            size = 2 * equation.outvars[0].aval.size
            for dim in contract:
                size *= shape[dim]
            yield size
        for inner in _inner(equation.params):
            yield from _dot_flops(inner)


def _inner(params):
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
