"""Adapters in the plan: parameters, state on a device and FLOPs, held to the model as built."""

from __future__ import annotations

import itertools
import math

import jax
import pytest

from ridgeline.configs.model_schema import LatentAttention, MoEConfig
from ridgeline.configs.schema import Config
from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.planner.adapters import adapter_parameters
from ridgeline.planner.collectives import compiled_collectives
from ridgeline.planner.flops import config_flops_per_token, train_flops_per_token
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.memory import memory_per_device
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.state import abstract_state, model_spec

SHAPE = {"vocab_size": 96, "num_layers": 3, "embed_dim": 32, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "mlp_dim": 64}
LATENT = {
    "head_dim": None,
    "num_kv_heads": None,
    "latent_attention": LatentAttention(q_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5),
}
MODELS = {
    "dense": {},
    "latents and shared experts": LATENT | {"moe": MoEConfig(experts=6, expert_dim=16, dense_layers=1, shared_experts=2)},
}
EXPERTS = ["query", "expert_gate", "expert_up", "expert_down"]
LORA = {
    "all": LoraConfig(rank=4, dora=True),
    "some": LoraConfig(rank=4, targets=["query", "out", "down"]),
    "int8": LoraConfig(rank=4, base="int8"),
}
OF_EXPERTS = {"experts": LoraConfig(rank=4, targets=EXPERTS), "experts, int8": LoraConfig(rank=4, targets=EXPERTS, base="int8")}


def make_config(model: str, lora: str, **mesh: int) -> Config:
    lora = {**LORA, **OF_EXPERTS}[lora]
    precision = {"params": "float32", "compute": "bfloat16"}
    return Config.model_validate({"model": SHAPE | MODELS[model], "lora": lora, "precision": precision, "mesh": mesh or {"fsdp": 1}})


@pytest.mark.parametrize(
    ("model", "lora", "mesh"),
    [
        *itertools.product(MODELS, LORA, [{"fsdp": 1}, {"data": 2, "fsdp": 2, "tensor": 2}]),
        *(
            ("latents and shared experts", lora, mesh)
            for lora in OF_EXPERTS
            for mesh in ({"fsdp": 1}, {"fsdp": 2, "tensor": 2, "expert": 2})
        ),
    ],
    ids=str,
)
def test_parameters_and_state_are_those_of_the_model_as_built(model, lora, mesh):
    config = make_config(model, lora, **mesh)
    partitioner = Partitioner.of(build_mesh(config.mesh, jax.devices()[: math.prod(mesh.values())]), config)
    sizes = dict(partitioner.mesh.shape)
    spec = model_spec(config, partitioner)
    state = abstract_state(config, spec, build_optimizer(config.optimizer, config.precision, spec.trained_axes), partitioner)

    def local_bytes(tree):
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    trained, frozen = spec.split(state.params)
    assert adapter_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(trained))
    of_int8 = {"int8", "float32"} if config.lora.base == "int8" else set()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen)} == {"bfloat16"} | of_int8
    local, estimate = LocalSizes.of(config, sizes), memory_per_device(config, sizes).components
    assert local.trained * 4 == local_bytes(trained)
    assert estimate["moments"].bytes == local_bytes(state.opt_state) - 4  # the count of AdamW's steps
    assert estimate["parameters"].bytes == pytest.approx(local_bytes(state.params), rel=0.01)  # vectors count as replicated


def test_frozen_weights_have_no_gradient_in_flops_and_memory():
    adapted, full = make_config("dense", "all"), make_config("dense", "all").model_copy(update={"lora": LoraConfig()})
    count, whole = config_flops_per_token(adapted), train_flops_per_token(full.model, full.data.seq_len)
    assert count.mlp == pytest.approx(2 / 3 * whole.mlp)
    assert count.attention_scores == whole.attention_scores
    matrices = adapter_parameters(adapted) - 3 * (64 + 2 * 32 + 32 + 2 * 64 + 32)  # without magnitudes
    assert count.adapters == 6 * matrices
    assert sum(count.components().values()) == pytest.approx(count.total)
    assert count.forward == pytest.approx(whole.forward + count.adapters / 3)
    sizes = dict.fromkeys(adapted.mesh.sizes, 1)
    small = memory_per_device(adapted.model_copy(update={"lora": LORA["some"]}), sizes).components
    large = memory_per_device(full, sizes).components
    assert small["loss"].bytes == 0 < large["loss"].bytes
    narrow = 3 * (4 * 2 * full.data.batch_size * full.data.seq_len) * full.model.num_layers
    assert small["activations"].bytes - large["activations"].bytes == narrow
    assert small["gradients"].bytes == 4 * adapter_parameters(adapted.model_copy(update={"lora": LORA["some"]}))


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2}])
def test_policy_updates_with_a_divergence_keep_the_parameters_before_training(mesh: dict[str, int]) -> None:
    """Beside the step: what the compiler reports does not have them, what must fit into the device does."""
    config = make_config("dense", "all", **mesh)
    sizes = dict(config.mesh.sizes)
    without, kept = (
        memory_per_device(Config.model_validate({**config.model_dump(), "policy": {"loss": "grpo", "kl": kl}}), sizes) for kl in (0.0, 0.1)
    )
    assert kept.total_bytes - without.total_bytes == without.components["parameters"].bytes
    assert kept.compiled_bytes == without.compiled_bytes
    assert kept.temp_bytes == without.temp_bytes


@pytest.mark.parametrize(
    "mesh", [{"fsdp": 8}, {"fsdp": 4, "context": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "expert": 2, "context": 2}]
)
@pytest.mark.parametrize("lora", ["all", "int8"])
def test_adapters_of_dense_layers_and_of_shared_experts_are_planned_apart(lora: str, mesh: dict[str, int]) -> None:
    """Both have matrices of the same names; on GPUs the reductions of one gradient over several axes are one all-reduce."""
    config = make_config("latents and shared experts", lora, **mesh)
    planned = compiled_collectives(config, dict(config.mesh.sizes), gpu=True)
    gates = [item for item in planned if "gate adapter, other side" in item.what and item.kind == "all-reduce"]
    assert {item.what for item in gates} == {"gate adapter, other side", "shared experts' gate adapter, other side"}
    widths = {"gate adapter, other side": config.model.mlp_dim, "shared experts' gate adapter, other side": 32}
    assert all(item.bytes == widths[item.what] // mesh.get("tensor", 1) * 4 * 4 for item in gates)
