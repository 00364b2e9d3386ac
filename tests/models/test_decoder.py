"""The decoder: families, shapes, causality, packing, scanning over layers, dtypes.

B batch, T sequence, D embed width, V vocabulary rows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ridgeline import models
from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import AttentionConfig, ComputeConfig, MeshConfig, PrecisionConfig, RematConfig
from ridgeline.models.family import families
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner, state_shardings
from tests.sampling import drawn

PRESETS = Path(__file__).parents[2] / "configs" / "models"
FLOAT32 = PrecisionConfig(compute="float32")
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "num_layers": 3,
    "embed_dim": 32,
    "num_heads": 4,
    "mlp_dim": 48,
    "max_seq_len": 64,
    "init_std": 0.2,
}
LATENT = {"kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 7}
MOE = {"experts": 6, "experts_per_token": 2, "expert_dim": 20, "shared_experts": 1, "dense_layers": 1, "groups": 3, "groups_per_token": 2}
LLAMA4_MOE = {
    "experts": 5,
    "experts_per_token": 1,
    "every": 2,
    "shared_experts": 1,
    "scale_input": True,
    "score": "sigmoid",
    "normalize": False,
}
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 2},
    "gpt2": {"norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "gated_mlp": False, "tie_embeddings": True}
    | {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    "qwen2": {"num_kv_heads": 2, "attention_bias": True, "tie_embeddings": True},
    "gemma2": {"norm": "rmsnorm_1p", "norm_position": "both", "scale_embeddings": True, "tie_embeddings": True, "sliding_window": 5}
    | {"full_attention_every": 2, "attention_softcap": 2.0, "logit_softcap": 3.0, "query_pre_attn_scalar": 11.0, "init_std": 0.05},
    "gemma3": {"norm": "rmsnorm_1p", "norm_position": "both", "qk_norm": True, "tie_embeddings": True, "sliding_window": 5}
    | {"full_attention_every": 2, "local_rope_theta": 3000.0},
    "glm4": {"norm_position": "both", "rotary_fraction": 0.5, "rope_interleaved": True, "num_kv_heads": 2, "attention_bias": True},
    "olmo2": {"norm_position": "post", "qk_norm": True, "qk_norm_dims": "all_heads"},
    "olmo3": {"norm_position": "post", "qk_norm": True, "qk_norm_dims": "all_heads", "sliding_window": 5, "full_attention_every": 3},
    "gpt_oss": {"moe": {"experts": 4, "logit_bias": True}, "mlp_bias": True, "mlp_clamp": 0.7, "activation": "gelu_sigmoid"}
    | {"attention_sinks": True, "attention_bias": True, "output_bias": True, "sliding_window": 5, "full_attention_every": 2},
    "phi3": {"rotary_fraction": 0.75, "sliding_window": 5},
    "mistral": {"num_kv_heads": 2, "sliding_window": 5},
    "llama4": {"attention_chunk": 5, "full_attention_every": 2, "full_attention_rope": False, "qk_norm": True, "qk_norm_scale": False}
    | {"attention_temperature": {"scale": 0.3, "interval": 4}, "rope_interleaved": True, "moe": LLAMA4_MOE},
    "qwen3": {"num_kv_heads": 2, "qk_norm": True, "head_dim": 16},
    "mixtral": {"num_kv_heads": 2, "moe": {"experts": 5, "experts_per_token": 2}},
    "qwen3_moe": {"num_kv_heads": 2, "qk_norm": True, "moe": {"experts": 6, "experts_per_token": 3, "expert_dim": 20, "dense_layers": 1}},
    "deepseek_v2": {"latent_attention": LATENT, "rope_interleaved": True, "moe": MOE | {"group_score": "best", "normalize": False}},
    "deepseek_v3": {"latent_attention": LATENT | {"q_rank": 12}, "moe": MOE | {"score": "sigmoid", "choice_bias": True}},
}


def small(family: str = "llama", **changes: Any) -> ModelConfig:
    return ModelConfig(**{"family": family, **SMALL, **FAMILY_FIELDS[family], **changes})


def make(model: ModelConfig, compute: ComputeConfig | None = None, precision: PrecisionConfig = FLOAT32, noise: bool = False) -> Any:
    """A model; with `noise` also its biases and norm scales are random, so that one left out would show."""
    decoder = models.build(model, compute or ComputeConfig(), precision, Partitioner.single(), nnx.Rngs(params=0))
    if noise:
        structure, state = nnx.split(decoder)
        key = jax.random.key(1)
        decoder = nnx.merge(structure, jax.tree.map(lambda p: p + 0.1 * jax.random.normal(key, p.shape, p.dtype), state))
    return decoder


def logits(decoder: Any, tokens_BT: Any, positions_BT: Any = None, segment_ids_BT: Any = None) -> np.ndarray:
    structure, state = nnx.split(decoder)

    @jax.jit
    def run(state: Any, *inputs: Any) -> jax.Array:
        decoder = nnx.merge(structure, state)
        return decoder.logits(decoder(*inputs))

    return np.asarray(run(state, tokens_BT, positions_BT, segment_ids_BT))


def random_tokens(rows: int, length: int, vocab: int = 61) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab, (rows, length), dtype=np.int32)


@pytest.mark.parametrize("family", drawn(sorted(families()), 6))
def test_packed_documents_equal_the_documents_alone(family) -> None:
    """A row of three documents and padding against three rows of one document each, in one batch; the padding stays finite."""
    decoder = make(small(family), ComputeConfig(attention=AttentionConfig(chunk=8)), noise=True)
    lengths, padding = (9, 13, 4), 6
    total = sum(lengths) + padding
    tokens, positions, segments = (np.zeros((4, total), np.int32) for _ in range(3))
    start = 0
    for row, length in enumerate(lengths, start=1):
        document, end = random_tokens(row, length)[-1], start + length
        tokens[0, start:end] = tokens[row, :length] = document
        positions[0, start:end] = positions[row, :length] = np.arange(length)
        segments[0, start:end], segments[row, :length] = row, 1
        start = end
    out = logits(decoder, tokens, positions, segments)
    assert np.all(np.isfinite(out))
    start = 0
    for row, length in enumerate(lengths, start=1):
        np.testing.assert_allclose(out[0, start : start + length], out[row, :length], rtol=2e-5, atol=2e-5)
        start += length


@pytest.mark.parametrize("family", drawn(sorted(families()), 6))
def test_a_token_changes_only_itself_and_later_positions(family) -> None:
    decoder = make(small(family), noise=True)
    tokens = random_tokens(2, 12)
    changed = tokens.copy()
    changed[0, 7] = (changed[0, 7] + 1) % 61
    before, after = logits(decoder, np.concatenate([tokens, changed])).reshape(2, 2, 12, 61)
    np.testing.assert_array_equal(before[0, :7], after[0, :7])
    np.testing.assert_array_equal(before[1], after[1])
    assert np.all(np.abs(before[0, 7:] - after[0, 7:]).max(axis=-1) > 1e-4)


def test_positions_and_segments_default_to_one_document_per_row() -> None:
    decoder = make(small())
    tokens = random_tokens(2, 12)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12))
    np.testing.assert_allclose(logits(decoder, tokens), logits(decoder, tokens, positions, np.ones_like(positions)), rtol=1e-5, atol=1e-5)


def test_a_sliding_window_limits_how_far_a_token_reaches() -> None:
    """With L layers and a window of w, position t sees L * (w - 1) tokens back and no further."""
    decoder = make(small(sliding_window=3), ComputeConfig(attention=AttentionConfig(chunk=4)), noise=True)
    tokens = random_tokens(1, 16)
    changed = tokens.copy()
    changed[0, 2] = (changed[0, 2] + 1) % 61
    before, after = logits(decoder, np.concatenate([tokens, changed]))
    reach = 2 + 3 * (3 - 1)
    np.testing.assert_array_equal(before[reach + 1 :], after[reach + 1 :])
    assert np.abs(before[reach] - after[reach]).max() > 0


def loss_and_gradients(compute: ComputeConfig) -> tuple[Any, Any]:
    structure, state = nnx.split(make(small(), compute))

    @jax.jit
    def run(state: Any, tokens_BT: jax.Array) -> Any:
        def loss(state: Any) -> jax.Array:
            decoder = nnx.merge(structure, state)
            return jnp.mean(jax.nn.logsumexp(decoder.logits(decoder(tokens_BT)), axis=-1))

        return jax.value_and_grad(loss)(state)

    return run(state, random_tokens(2, 12))


def test_scan_loop_and_unrolled_scan_agree() -> None:
    want_loss, want = loss_and_gradients(ComputeConfig())
    for compute in (ComputeConfig(scan_layers=False), ComputeConfig(scan_unroll=3)):
        loss, gradients = loss_and_gradients(compute)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
        jax.tree.map(lambda got, expected: np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6), gradients, want)


def test_initial_parameters_do_not_depend_on_how_they_are_computed() -> None:
    def parameters(model: ModelConfig, compute: ComputeConfig) -> Any:
        return nnx.to_pure_dict(nnx.split(make(model, compute))[1])

    want = parameters(small(), ComputeConfig())
    jax.tree.map(np.testing.assert_array_equal, parameters(small(), ComputeConfig(scan_layers=False)), want)
    deeper = parameters(small(num_layers=5), ComputeConfig())
    jax.tree.map(lambda got, expected: np.testing.assert_array_equal(got[:3], expected), deeper["blocks"], want["blocks"])
    query = np.asarray(want["blocks"]["attention"]["query"])
    assert not np.array_equal(query[0], query[1])


@pytest.mark.parametrize(("family", "residual"), [("llama", 0.2), ("qwen2", 0.2), ("qwen3", 0.2), ("gpt2", 0.2 / 6**0.5)])
def test_initialization_follows_the_family(family, residual) -> None:
    """As documented in models/families/<family>.py."""
    params = nnx.to_pure_dict(nnx.split(make(small(family)))[1])
    block = params["blocks"]
    for w, std in (
        (block["attention"]["query"], 0.2),
        (block["mlp"]["up"], 0.2),
        (params["embedding"], 0.2),
        (block["attention"]["out"], residual),
        (block["mlp"]["down"], residual),
    ):
        np.testing.assert_allclose(np.std(w), std, rtol=0.06)
        np.testing.assert_allclose(np.mean(w), 0, atol=0.02)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = str(path[-1].key)
        if name.endswith("bias"):
            assert np.all(leaf == 0), path
        if name == "scale":
            assert np.all(leaf == 1), path


def operations(layers: int, compute: ComputeConfig) -> int:
    model = small(num_layers=layers)
    structure, state = nnx.split(nnx.eval_shape(lambda: make(model, compute)))
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def loss(state: Any, tokens_BT: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(structure, state)(tokens_BT))

    lowered = jax.jit(jax.grad(loss)).lower(state, tokens)
    text = lowered.compile().as_text() if compute.scan_layers else lowered.as_text()
    return len(re.findall(r"^\s+(?:ROOT )?%\S+ = ", text, re.MULTILINE))


def test_program_size_does_not_depend_on_depth() -> None:
    """What makes compile time independent of depth; benchmarks/compile_depth.py has the seconds."""
    assert operations(4, ComputeConfig()) == operations(64, ComputeConfig()) > 100
    assert operations(8, ComputeConfig(scan_layers=False)) > 1.5 * operations(4, ComputeConfig(scan_layers=False))


@pytest.mark.parametrize("how", [{}, {"scan_unroll": 3}, {"scan_layers": False}], ids=["loop", "unrolled loop", "no loop"])
def test_rematerialization_recomputes_however_the_layers_run(how) -> None:
    """Outside a loop XLA would merge the recomputation with the forward pass, and the policy would do nothing."""

    def compiled_flops(policy: str) -> float:
        compute = ComputeConfig(remat=RematConfig(policy=policy), **how)
        structure, state = nnx.split(nnx.eval_shape(lambda: make(small(mlp_dim=256), compute)))
        tokens = jax.ShapeDtypeStruct((16, 64), jnp.int32)
        gradient = jax.jit(jax.grad(lambda state, tokens_BT: jnp.sum(nnx.merge(structure, state)(tokens_BT))))
        return gradient.lower(state, tokens).compile().cost_analysis()["flops"]

    assert compiled_flops("full") > 1.15 * compiled_flops("none")


@pytest.mark.parametrize("family", drawn(sorted(families()), 6))
def test_padded_vocabulary_rows_change_no_logit(family) -> None:
    """The rows exist (so that they divide over `tensor`) and no logit comes from them."""
    tokens = random_tokens(1, 8)
    decoder = make(small(family, pad_vocab_to=64))
    assert decoder.unembedding().shape == (32, 64)
    out = logits(decoder, tokens)
    assert out.shape == (1, 8, 61)
    structure, state = nnx.split(decoder)
    damaged = nnx.to_pure_dict(state)
    damaged["embedding"] = damaged["embedding"].at[61:].set(1e3)
    if "output" in damaged:
        damaged["output"] = damaged["output"].at[:, 61:].set(1e3)
    nnx.replace_by_pure_dict(state, damaged)
    np.testing.assert_array_equal(logits(nnx.merge(structure, state), tokens), out)


def test_tied_embeddings_share_one_table() -> None:
    tied, untied = make(small(tie_embeddings=True)), make(small(tie_embeddings=False))
    np.testing.assert_array_equal(tied.unembedding(), tied.embedding[...].T)
    assert "output" not in nnx.to_pure_dict(nnx.split(tied)[1])
    assert nnx.to_pure_dict(nnx.split(untied)[1])["output"].shape == (32, 61)
    assert not np.array_equal(untied.unembedding(), untied.embedding[...].T)


def test_precision_policy_sets_every_dtype() -> None:
    decoder = make(small(), precision=PrecisionConfig(params="float32", compute="bfloat16"))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.split(decoder)[1]))
    tokens = random_tokens(2, 12)
    hidden = jax.eval_shape(decoder, tokens)
    assert hidden.dtype == jnp.bfloat16
    assert jax.eval_shape(decoder.logits, hidden).dtype == jnp.float32
    text = jax.jit(lambda tokens_BT: decoder(tokens_BT)).lower(tokens).as_text()
    dots = re.findall(r"stablehlo\.dot_general.*: \(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\)", text)
    assert len(dots) >= 9
    assert {dtype for pair in dots for dtype in pair} == {"bf16"}
    half = make(small(), precision=PrecisionConfig(params="bfloat16", compute="bfloat16"))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(nnx.split(half)[1]))
    np.testing.assert_allclose(logits(decoder, tokens), logits(make(small()), tokens), atol=0.35, rtol=0.1)


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_gradients_of_16_bit_compute_are_summed_in_float32(compute) -> None:
    """A token seen 2,048 times gets 2,048 contributions; summed in bfloat16 the row would stop growing at 256."""
    decoder = make(small(), precision=PrecisionConfig(compute=compute))
    structure, state = nnx.split(decoder)

    def total(state: Any, tokens_BT: jax.Array) -> jax.Array:
        positions_BT = jnp.zeros_like(tokens_BT)
        return jnp.sum(nnx.merge(structure, state).embed(tokens_BT, positions_BT), dtype=jnp.float32)

    gradients = nnx.to_pure_dict(jax.jit(jax.grad(total))(state, np.full((8, 256), 7, np.int32)))
    want = np.zeros((61, 32), np.float32)
    want[7] = 2048
    np.testing.assert_array_equal(gradients["embedding"], want)
    whole = jax.eval_shape(jax.grad(lambda state: jnp.sum(nnx.merge(structure, state)(random_tokens(2, 12)), dtype=jnp.float32)), state)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(whole))


def test_initialization_into_shards_equals_that_on_one_device() -> None:
    """And no device holds a whole table on the way."""
    model = small(vocab_size=4096, embed_dim=64)
    partitioner = Partitioner(build_mesh(MeshConfig(fsdp=4, tensor=2)))

    def create() -> Any:
        decoder = models.build(model, ComputeConfig(), FLOAT32, partitioner, nnx.Rngs(params=0))
        return nnx.split(decoder)[1]

    shardings = state_shardings(partitioner, nnx.eval_shape(create))
    compiled = jax.jit(create, out_shardings=shardings).lower().compile()
    table_bytes = 4096 * 64 * 4
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < table_bytes
    assert memory.output_size_in_bytes < table_bytes
    alone = nnx.split(make(model))[1]
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7), compiled(), alone)


def test_parameter_shapes_and_logical_axes() -> None:
    """The contract that sharding, optimizers and checkpoints read."""
    shapes = nnx.split(nnx.eval_shape(lambda: make(small("qwen3", attention_bias=True, mlp_bias=True, output_bias=True))))[1]
    found = {
        ".".join(str(key.key) for key in path if hasattr(key, "key")): (leaf.get_raw_value().shape, leaf.get_metadata()["axes"])
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    }
    heads, kv_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")
    blocks = {
        "attention.query": ((32, 4, 16), ("embed", *heads)),
        "attention.key": ((32, 2, 16), ("embed", *kv_heads)),
        "attention.value": ((32, 2, 16), ("embed", *kv_heads)),
        "attention.out": ((4, 16, 32), (*heads, "embed")),
        "attention.query_bias": ((4, 16), heads),
        "attention.key_bias": ((2, 16), kv_heads),
        "attention.value_bias": ((2, 16), kv_heads),
        "attention.out_bias": ((32,), ("norm",)),
        "attention.query_norm.scale": ((16,), ("head_dim",)),
        "attention.key_norm.scale": ((16,), ("head_dim",)),
        "mlp.gate": ((32, 48), ("embed", "mlp")),
        "mlp.up": ((32, 48), ("embed", "mlp")),
        "mlp.down": ((48, 32), ("mlp", "embed")),
        "mlp.gate_bias": ((48,), ("mlp",)),
        "mlp.up_bias": ((48,), ("mlp",)),
        "mlp.down_bias": ((32,), ("norm",)),
        "attention_norm.scale": ((32,), ("norm",)),
        "mlp_norm.scale": ((32,), ("norm",)),
    }
    want = {f"blocks.{name}": ((3, *shape), ("layers", *axes)) for name, (shape, axes) in blocks.items()}
    want |= {"embedding": ((61, 32), ("vocab", "embed")), "output": ((32, 61), ("embed", "vocab")), "final_norm.scale": ((32,), ("norm",))}
    assert found == want


def test_an_unknown_family_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"model\.family.*'lama'; did you mean 'llama'"):
        make(small().model_copy(update={"family": "lama"}))


def test_an_unsupported_backend_is_refused_at_construction() -> None:
    with pytest.raises(UserError, match="cudnn runs on NVIDIA GPUs only"):
        make(small(), ComputeConfig(attention=AttentionConfig(backend="cudnn")))
