"""Every way of laying 8 devices out over the mesh axes trains as one device does."""

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ridgeline.configs.model_schema import AttentionTemperature, LatentAttention, ModelConfig, MoEConfig
from ridgeline.configs.schema import (
    AttentionConfig,
    ComputeConfig,
    Config,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    TrainerConfig,
)
from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.loaders.rows import with_future_targets
from ridgeline.planner.recompute import gradients_first, in_order
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.state import abstract_state, init_state, model_spec
from ridgeline.trainer.step import make_train_step, to_global
from tests.sampling import drawn

FACTORISATIONS = [(d, f, 8 // (d * f)) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if 8 % (d * f) == 0]
BATCH, SEQ, VOCAB, STEPS = 16, 16, 96, 5


LLAMA4 = {
    "num_layers": 4,
    "attention_chunk": 5,
    "full_attention_every": 2,
    "full_attention_rope": False,
    "attention_temperature": AttentionTemperature(scale=0.5, interval=3),
    "qk_norm": True,
    "qk_norm_scale": False,
    "rope_interleaved": True,
    "moe": MoEConfig(
        experts=8, experts_per_token=1, expert_dim=16, every=2, shared_experts=1, score="sigmoid", normalize=False, scale_input=True
    ),
}
LATENT = {"head_dim": None, "latent_attention": LatentAttention(q_rank=12, kv_rank=10, nope_dim=6, rope_dim=4, value_dim=5)}
MOE = {"moe": MoEConfig(experts=6, experts_per_token=2, expert_dim=16, dense_layers=1, shared_experts=1)}


def make_config(
    data: int, fsdp: int, tensor: int, accumulation: int = 1, rules: dict | None = None, optimizer: str = "adamw", zero: int = 0, **model
) -> Config:
    sizes = {"vocab_size": VOCAB, "num_layers": 2, "embed_dim": 32, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8, "mlp_dim": 64}
    return Config(
        model=ModelConfig(**{**sizes, "max_seq_len": SEQ, **model}),
        compute=ComputeConfig(attention=AttentionConfig(backend="chunked", chunk=8), loss_chunk=16),
        precision=PrecisionConfig(compute="float32"),
        mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor, rules=rules or {}, zero_stage=zero),
        data=DataConfig(batch_size=BATCH, seq_len=SEQ),
        optimizer=OptimizerConfig(kind=optimizer),
        trainer=TrainerConfig(accumulation=accumulation),
    )


def make_batch(seed: int) -> dict[str, np.ndarray]:
    """Packed rows of two documents, some padding, some targets that do not count."""
    rng = np.random.default_rng(seed)
    cut = rng.integers(4, SEQ - 2, BATCH)[:, None]
    at = np.arange(SEQ)[None]
    segments = np.where(at < cut, 1, np.where(at < SEQ - 1, 2, 0)).astype(np.int32)
    return {
        "tokens": rng.integers(0, VOCAB, (BATCH, SEQ)).astype(np.int32),
        "targets": rng.integers(0, VOCAB, (BATCH, SEQ)).astype(np.int32),
        "positions": np.where(at < cut, at, at - cut).astype(np.int32),
        "segment_ids": segments,
        "weights": ((segments > 0) & (rng.random((BATCH, SEQ)) < 0.9)).astype(np.float32),
    }


def remember_gradient() -> optax.GradientTransformation:
    """Pass gradients on unchanged and keep the last ones in the state: no second program to compile for them."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params: (updates, updates)
    )


def prepared(config: Config, devices) -> tuple[Partitioner, Any, optax.GradientTransformation, Any]:
    """Partitioner, model, optimizer and abstract state of a config."""
    mesh = build_mesh(config.mesh, devices)
    partitioner = Partitioner.of(mesh, config)
    spec = model_spec(config, partitioner)
    optimizer = optax.chain(remember_gradient(), build_optimizer(config.optimizer, config.precision, spec.trained_axes))
    return partitioner, spec, optimizer, abstract_state(config, spec, optimizer, partitioner)


@cache
def first_state(model: str, optimizer: str, lora: str) -> Any:
    """Made on one device and put on every mesh: that each would make the same is for test_partition.py to show."""
    update = {"model": ModelConfig.model_validate_json(model), "lora": LoraConfig.model_validate_json(lora)}
    config = make_config(1, 1, 1, optimizer=optimizer).model_copy(update=update)
    _, spec, optimizer, abstract = prepared(config, jax.devices()[:1])
    return jax.device_get(init_state(config, spec, optimizer, abstract))


def run(config: Config, devices) -> tuple[list[float], dict]:
    """Losses and gradient norms of STEPS steps, and the gradient of the first one on the host."""
    return trained(config, devices, STEPS)[:2]


def trained(config: Config, devices, steps: int) -> tuple[list[float], dict, Any]:
    """As `run`, of this many steps, and the compiled step."""
    partitioner, spec, optimizer, abstract = prepared(config, devices)
    modules = config.model.mtp_layers
    first = first_state(config.model.model_dump_json(), config.optimizer.kind, config.lora.model_dump_json())
    state = jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), first, abstract)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step = make_train_step(spec, config, optimizer, lambda s: jnp.float32(3e-3), partitioner)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    compiled = step.lower(state, to_global(with_future_targets(make_batch(0), modules), partitioner)).compile()
    losses = []
    for index in range(steps):
        state, metrics = compiled(state, to_global(with_future_targets(make_batch(index), modules), partitioner))
        losses += [float(metrics["loss"]), float(metrics["grad_norm"]), *([float(metrics["mtp_loss"])] if modules else [])]
        if index == 0:
            grads = jax.tree.map(np.asarray, state.opt_state[0])
    return losses, grads, compiled


@cache
def reference(**settings) -> tuple[list[float], dict]:
    return run(make_config(1, 1, 1, **settings), jax.devices()[:1])


def compare(found, expected) -> None:
    losses, grads = found
    expected_losses, expected_grads = expected
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    whole = np.sqrt(sum(np.sum(e**2) for e in jax.tree.leaves(expected_grads)))
    for (path, g), e in zip(jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(expected_grads), strict=True):
        # a key bias shifts every score of a row alike: its gradient is 0 but for rounding
        assert np.linalg.norm(g - e) <= 1e-5 * np.linalg.norm(e) + 1e-9 * whole, jax.tree_util.keystr(path)


def test_there_are_ten_factorizations():
    assert len(set(FACTORISATIONS)) == 10


@pytest.mark.parametrize(("data", "fsdp", "tensor"), drawn(FACTORISATIONS, 2))
def test_losses_and_gradients_equal_one_device(data, fsdp, tensor):
    compare(run(make_config(data, fsdp, tensor), jax.devices()), reference())


@pytest.mark.parametrize(("data", "fsdp", "tensor"), drawn([(2, 2, 2), (1, 8, 1)], 1))
def test_two_microbatches_equal_one_device_and_one_batch(data, fsdp, tensor):
    compare(run(make_config(data, fsdp, tensor, accumulation=2), jax.devices()), reference())


@pytest.mark.parametrize(
    ("mesh", "accumulation", "optimizer"),
    drawn(
        [
            pytest.param((8, 1, 1), 1, "adafactor", id="data"),
            pytest.param((2, 2, 2), 2, "adamw", id="all axes, microbatches"),
        ],
        1,
    ),
)
def test_gradients_and_state_sharded_over_data_equal_one_device(mesh, accumulation, optimizer):
    """ZeRO stage 2: the state and the remembered gradient have 1/data of the bytes per device."""
    config = make_config(*mesh, accumulation, optimizer=optimizer, zero=2)
    compare(run(config, jax.devices()), reference(optimizer=optimizer))
    _, _, _, abstract = prepared(config, jax.devices())
    gradient, param = (tree["blocks"]["mlp"]["up"] for tree in (abstract.opt_state[0], abstract.params))
    whole, part = (math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in (param, gradient))
    assert whole == mesh[0] * part


GPT2 = {"tie_embeddings": True, "attention_bias": True, "mlp_bias": True, "output_bias": True, "norm": "layernorm", "position": "learned"}


@pytest.mark.parametrize(
    "model",
    drawn(
        [
            pytest.param(GPT2, id="gpt2-like"),
            pytest.param({"qk_norm": True, "pad_vocab_to": 104}, id="qwen3-like"),
            pytest.param(MOE, id="experts"),
            pytest.param(LATENT | MOE, id="deepseek-like"),
            pytest.param(LLAMA4, id="llama4-like"),
        ],
        1,
    ),
)
def test_biases_tables_head_norms_latents_and_experts_equal_one_device(model):
    compare(run(make_config(2, 2, 2, **model), jax.devices()), reference(**model))


MTP_MESHES = [
    ({}, 2),
    ({"data": 1, "context": 2}, 1),
    ({"tensor": 1, "fsdp": 1, "expert": 4}, 1),
    ({"data": 4, "tensor": 1}, 2),
    ({"zero_stage": 2}, 2),
]


@pytest.mark.parametrize(("mesh", "accumulation"), drawn(MTP_MESHES, 1), ids=str)
def test_modules_of_multi_token_prediction_equal_one_device(mesh, accumulation):
    moe = MoEConfig(experts=8, experts_per_token=2, expert_dim=16, dense_layers=1, shared_experts=1, choice_bias=True, score="sigmoid")
    model = {"mtp_layers": 2, "moe": None if "zero_stage" in mesh else moe}
    config = make_config(2, 2, 2, accumulation, **model)
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=mesh)})
    compare(run(config, jax.devices()), run(make_config(1, 1, 1, **model), jax.devices()[:1]))


@pytest.mark.parametrize("mesh", drawn([(2, 1, 1, 4), (1, 2, 2, 2)], 1), ids=str)
def test_experts_over_expert_equal_one_device(mesh):
    """data, fsdp, tensor, expert; the loads of the experts differ, and none is dropped."""
    model = {"moe": MoEConfig(experts=8, experts_per_token=2, expert_dim=16, logit_bias=True), "mlp_bias": True, "attention_sinks": True}
    config = make_config(*mesh[:3], **model)
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"expert": mesh[3]})})
    compare(run(config, jax.devices()), reference(**model))


TURNS_OF_EXPERTS = {
    "num_layers": 8,
    "sliding_window": 5,
    "full_attention_every": 2,
    "moe": MoEConfig(experts=8, experts_per_token=2, expert_dim=16, logit_bias=True, shared_experts=1),
}
TURN_MESHES = [
    ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
    ({"fsdp": 4, "expert": 2}, 1),
    ({"tensor": 4, "expert": 2}, 2),
    ({"data": 8}, 1),
    ({"pipeline": 2, "fsdp": 2, "tensor": 2}, 4),
    ({"pipeline": 2, "data": 2, "expert": 2}, 2),
]
"""Mesh and microbatches."""


@pytest.mark.parametrize(("mesh", "accumulation"), drawn(TURN_MESHES, 1), ids=str)
@pytest.mark.parametrize("policy", drawn(["full", "names"], 1))
def test_experts_in_layers_of_several_kinds_that_follow_each_other_equal_one_device(mesh, accumulation, policy):
    """Four turns of two layers, two in a stage: each waits for the turn after it in the backward pass (models/backward_order.py)."""
    config = make_config(1, 1, 1, accumulation, **TURNS_OF_EXPERTS)
    remat = RematConfig(policy=policy, names=["query"] if policy == "names" else [])
    compute = config.compute.model_copy(update={"remat": remat})
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=mesh), "compute": compute})
    assert in_order(config.model, compute, frozen=False)
    compare(run(config, jax.devices()), reference(**TURNS_OF_EXPERTS))


ADAPTERS = {"lora": LoraConfig(rank=4, dora=True, dropout=0.1)}
ON_INT8 = {"lora": LoraConfig(rank=4, dora=True, targets=["query", "down"], base="int8")}


@cache
def adapted_reference(**model) -> tuple[list[float], dict]:
    return run(make_config(1, 1, 1, **model).model_copy(update=ADAPTERS), jax.devices()[:1])


@pytest.mark.parametrize(
    ("mesh", "zero", "model"),
    drawn([pytest.param((2, 2, 2), 0, {}, id="dense"), pytest.param((4, 2, 1), 2, {}, id="ZeRO")], 1),
)
def test_adapters_equal_one_device_and_begin_as_the_model_without_them(mesh, zero, model):
    """With magnitudes and dropout: both depend on no mesh."""
    expected = adapted_reference(**model)
    compare(run(make_config(*mesh, zero=zero, **model).model_copy(update=ADAPTERS), jax.devices()), expected)
    assert all("adapters" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(expected[1])[0])
    assert expected[0][0] == pytest.approx(reference(**model)[0][0], rel=1e-6)


EXPERTS = {"moe": MoEConfig(experts=8, experts_per_token=2, expert_dim=16)}


@pytest.mark.parametrize(
    ("mesh", "model"),
    drawn([((2, 2, 2, 1), {}), ((1, 8, 1, 1), {}), ((1, 2, 2, 2), EXPERTS), ((4, 1, 2, 1), LATENT)], 1),
    ids=str,
)
def test_adapters_of_a_base_in_8_bits_equal_one_device(mesh, model):
    """data, fsdp, tensor, expert. The first loss is near that of the model in full precision, and not equal to it."""
    config = make_config(*mesh[:3], **model).model_copy(update=ON_INT8)
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"expert": mesh[3]})})
    expected = run(make_config(1, 1, 1, **model).model_copy(update=ON_INT8), jax.devices()[:1])
    compare(run(config, jax.devices()), expected)
    assert len(jax.tree.leaves(expected[1])) == (3 if "moe" in model else 6)
    whole = reference(**model)[0][0]
    assert expected[0][0] != whole
    assert expected[0][0] == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("mesh", drawn([(2, 1, 1, 4), (1, 2, 2, 2), (2, 2, 2, 1)], 1), ids=str)
def test_adapters_of_experts_equal_one_device(mesh):
    """data, fsdp, tensor, expert. The gradient of A is 0 in the first step; the gradient norms of later ones have both."""
    adapters = {"lora": LoraConfig(rank=3, targets=["expert_gate", "expert_up", "expert_down"])}
    config = make_config(*mesh[:3], **EXPERTS).model_copy(update=adapters)
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"expert": mesh[3]})})
    found, expected = run(config, jax.devices()), run(make_config(1, 1, 1, **EXPERTS).model_copy(update=adapters), jax.devices()[:1])
    compare(found, expected)
    assert len(jax.tree.leaves(expected[1])) == 6
    assert expected[0][0] == pytest.approx(reference(**EXPERTS)[0][0], rel=1e-6)


KINDS = {"num_layers": 4, "sliding_window": 5, "full_attention_every": 2}


@pytest.mark.parametrize(
    ("mesh", "accumulation", "model"),
    drawn(
        [
            pytest.param(*({"pipeline": 2, "fsdp": 2, "tensor": 2}, 4, {}), id="1F1B"),
            pytest.param(*({"pipeline": 4, "context": 2}, 2, {"num_layers": 3}), id="an empty stage, fewer microbatches than stages"),
            pytest.param(
                *({"pipeline": 2, "pipeline_chunks": 2, "data": 2, "tensor": 2, "zero_stage": 2}, 4, {"num_layers": 3}),
                id="interleaved, an empty layer, ZeRO",
            ),
            pytest.param(*({"pipeline": 2, "fsdp": 2, "expert": 2}, 2, EXPERTS), id="experts"),
            pytest.param(*({"pipeline": 2, "data": 2, "expert": 2}, 2, EXPERTS), id="experts, gradients summed over data once"),
            pytest.param(*({"pipeline": 2, "fsdp": 2, "tensor": 2}, 4, KINDS), id="two kinds of layers"),
            pytest.param(*({"pipeline": 2, "data": 2, "fsdp": 2}, 2, KINDS | {"num_layers": 8}), id="turns of two kinds of layers"),
            pytest.param(*({"pipeline": 2, "data": 2, "fsdp": 2}, 4, {"optimizer": "muon"}), id="muon"),
            pytest.param(
                *({"pipeline": 2, "data": 2, "fsdp": 2, "rules": {"batch": ["fsdp"], "mlp": ["data"], "act_mlp": ["data"]}}, 2, {}),
                id="data shards no rows",
            ),
        ],
        1,
    ),
)
def test_stages_equal_one_device(mesh, accumulation, model):
    """On one device the batch is one microbatch."""
    config = make_config(1, 1, 1, accumulation, **model)
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=mesh)})
    compare(run(config, jax.devices()), reference(**model))


@pytest.mark.parametrize(
    ("rules", "model"),
    drawn(
        [
            pytest.param(*({"vocab": [], "act_vocab": []}, {"vocab_size": 95}), id="vocabulary replicated"),
            pytest.param(*({"kv_heads": [], "act_kv_heads": []}, {"num_kv_heads": 1}), id="one key/value head"),
            pytest.param(*({"embed": []}, {}), id="parameters replicated over fsdp"),
            pytest.param(*({"residual_seq": []}, {}), id="norms not sequence-parallel"),
            pytest.param(*({"embed": []}, KINDS | {"tensor": 1}), id="layers of several kinds, parameters replicated over fsdp"),
            pytest.param(*({"mlp": ["data"], "act_mlp": []}, KINDS | {"tensor": 1}), id="layers of several kinds, MLPs cut"),
        ],
        1,
    ),
)
def test_other_rules_equal_one_device(rules, model):
    model = dict(model)
    tensor = model.pop("tensor", 2)
    compare(run(make_config(2, 4 // tensor, tensor, rules=rules, **model), jax.devices()), reference(**model))


def over_context(
    method: str, context: int, data: int = 1, fsdp: int = 1, tensor: int = 1, packed: bool = True, remat: str = "none", **settings
) -> Config:
    config = make_config(data, fsdp, tensor, **settings)
    attention = AttentionConfig(backend="chunked", chunk=4, context=method)
    changes = {
        "compute": config.compute.model_copy(update={"attention": attention, "remat": RematConfig(policy=remat)}),
        "mesh": config.mesh.model_copy(update={"context": context}),
        "data": config.data.model_copy(update={"document_masking": packed}),
    }
    return config.model_copy(update=changes)


@cache
def packed_reference(packed: bool, **model) -> tuple[list[float], dict]:
    return run(over_context("auto", 1, packed=packed, **model), jax.devices()[:1])


GROUPED = {"num_kv_heads": 2}
WINDOW = {"sliding_window": 5, "attention_sinks": True}


@pytest.mark.parametrize(
    ("method", "mesh", "settings"),
    drawn(
        [
            ("ring", {"context": 8}, {}),
            ("ring", {"context": 4, "fsdp": 2}, GROUPED),
            ("ring", {"context": 2, "data": 2, "fsdp": 2}, GROUPED | WINDOW),
            ("ring", {"context": 2, "fsdp": 2, "tensor": 2}, GROUPED | {"packed": False}),
            ("ring", {"context": 4, "tensor": 2}, WINDOW | {"packed": False}),
            ("all_to_all", {"context": 8}, {}),
            ("all_to_all", {"context": 2, "data": 2, "fsdp": 2}, GROUPED | WINDOW),
            ("all_to_all", {"context": 2, "fsdp": 2, "tensor": 2}, {"packed": False}),
            ("all_to_all", {"context": 4, "data": 2}, {"accumulation": 2}),
            ("ring", {"context": 2, "fsdp": 2, "tensor": 2}, LATENT),
            ("ring", {"context": 2, "fsdp": 2, "tensor": 2}, LLAMA4),
            ("all_to_all", {"context": 2, "data": 4}, LLAMA4 | {"packed": False}),
        ],
        2,
    ),
)
def test_a_sharded_sequence_equals_one_device(method, mesh, settings):
    model = {name: value for name, value in settings.items() if name not in ("packed", "accumulation")}
    compare(run(over_context(method, **mesh, **settings), jax.devices()), packed_reference(settings.get("packed", True), **model))


@pytest.mark.parametrize(
    ("method", "mesh", "settings"),
    [
        ("ring", {"context": 4, "fsdp": 2}, GROUPED),
        ("ring", {"context": 2, "data": 2, "fsdp": 2}, {"accumulation": 2}),
        ("all_to_all", {"context": 2, "data": 2, "fsdp": 2}, {"packed": False}),
    ],
)
def test_so_it_does_where_weight_gradients_come_first(method, mesh, settings):
    """Blocks that are computed again over context (planner/recompute.py, gradients_first)."""
    model = {name: value for name, value in settings.items() if name not in ("packed", "accumulation")}
    config = over_context(method, remat="full", **mesh, **settings)
    assert gradients_first(config.model, config.compute, mesh, frozen=False)
    compare(run(config, jax.devices()), packed_reference(settings.get("packed", True), **model))
