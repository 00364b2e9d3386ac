"""Gradients of layers with experts: summed in the next layer of the backward pass, or once for all layers."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ridgeline.configs.model_schema import LatentAttention, ModelConfig
from ridgeline.configs.schema import MESH_AXES, AttentionConfig, ComputeConfig, ExpertsConfig, MeshConfig, PrecisionConfig
from ridgeline.models.decoder import Decoder
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import Rules
from tests.models.test_backward_order import REMAT, equations
from tests.models.tiny import BASE, build, tokens
from tests.sampling import drawn, seed

LAYERS, EXPERTS, HIDDEN = 3, 8, 16
MESHES: list[dict[str, int]] = [
    {"fsdp": 8},
    {"data": 2, "fsdp": 4},
    {"data": 8},
    {"fsdp": 2, "expert": 4},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"fsdp": 2, "tensor": 2, "expert": 2},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"data": 2, "context": 4},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"expert": 4, "tensor": 2},
]
MOE = {"experts": EXPERTS, "experts_per_token": 2, "expert_dim": HIDDEN}
TURNS: dict[str, Any] = {"sliding_window": 5, "full_attention_every": 2, "num_layers": 5}
KINDS: dict[str, dict[str, Any]] = {
    "norms of each head": {"qk_norm": True},
    "norms of all heads, after attention and MLP": {"qk_norm": True, "qk_norm_dims": "all_heads", "norm_position": "post"},
    "latent attention, a dense layer first, shared experts": {
        "head_dim": None,
        "latent_attention": LatentAttention(q_rank=24, kv_rank=16, nope_dim=6, rope_dim=4, value_dim=5),
        "num_layers": LAYERS + 1,
        "moe": MOE | {"dense_layers": 1, "shared_experts": 1},
    },
    "experts in every third layer": {"num_layers": 7, "moe": MOE | {"every": 3}},
    "experts in every second layer, a window in the others": {
        "num_layers": 4,
        "sliding_window": 5,
        "full_attention_every": 2,
        "moe": MOE | {"every": 2, "shared_experts": 1},
    },
    "two turns of layers with and without a window, and a layer that is left, biases": TURNS | {"mlp_bias": True, "attention_bias": True},
}


def model_on(mesh: dict[str, int], policy: str, experts: dict[str, Any], **of_model: Any) -> Decoder:
    shape = BASE | {"vocab_size": 64, "num_layers": LAYERS, "num_heads": 8, "num_kv_heads": 8, "embed_dim": 64, "head_dim": 8, "moe": MOE}
    sizes = MeshConfig(**{"fsdp": 1} | mesh)
    rules = Rules.from_config(sizes, stored_by_stage=False)
    partitioner = Partitioner(build_mesh(sizes, jax.devices()[: math.prod(mesh.values())]), rules)
    attention = AttentionConfig(backend="chunked", chunk=8)
    compute = ComputeConfig(remat=REMAT[policy], attention=attention, experts=ExpertsConfig(**experts))
    return build(ModelConfig(**shape | of_model), compute, PrecisionConfig(compute="float32"), partitioner=partitioner)


def without_deferral(decoder: Decoder) -> Decoder:
    """The same model whose gradients are reduced within their layer."""
    graphdef, state = nnx.split(decoder)
    other: Decoder = nnx.merge(graphdef, state)
    other.execution = replace(decoder.execution, defers=False)
    return other


def sharded_gradients(decoder: Decoder) -> Any:
    """The function of loss and gradients, and its arguments."""
    partitioner = decoder.execution.partitioner
    graphdef, state = nnx.split(decoder)
    rows = 2 * partitioner.axis_size("batch")
    ids = jax.device_put(tokens(rows, 32), partitioner.sharding(("batch", "seq")))

    def objective(state: Any, ids: jax.Array) -> jax.Array:
        out = nnx.merge(graphdef, state)(ids)
        return jnp.mean(jnp.square(out.astype(jnp.float32) - jax.random.normal(jax.random.key(1), out.shape)))

    return jax.jit(jax.value_and_grad(objective)), (state, ids)


def values(tree: Any) -> dict[Any, np.ndarray]:
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(tree)}


def check_gradients(decoder: Decoder, other: Decoder, case: str) -> None:
    """Check that loss and gradients are those of the same model computed in another order."""
    (run, inputs), (run_other, inputs_other) = sharded_gradients(decoder), sharded_gradients(other)
    (loss, gradients), (wanted_loss, wanted) = run(*inputs), run_other(*inputs_other)
    assert loss == wanted_loss
    wanted_of, found_of = values(wanted), values(gradients)
    assert found_of.keys() == wanted_of.keys()
    for path, found in found_of.items():
        scale = np.abs(wanted_of[path]).max()
        assert scale > 0 or path == ("output",), path  # the unembedding belongs to the loss
        np.testing.assert_allclose(found, wanted_of[path], rtol=0, atol=2e-6 * scale, err_msg=f"{path} {case}")


@pytest.mark.parametrize("kind", list(KINDS))
def test_gradients_are_those_that_are_reduced_within_their_layer(kind: str) -> None:
    draw = random.Random(f"{seed()} {kind}")
    needed = {"norms of each head": "tensor", "norms of all heads, after attention and MLP": "expert"}.get(kind)
    mesh = draw.choice([mesh for mesh in MESHES if needed is None or needed in mesh])
    policy = draw.choice(list(REMAT))
    experts = draw.choice([{}, {"capacity_factor": 1.5}, {"exchange": "all_to_all"}])
    decoder = model_on(mesh, policy, experts, **KINDS[kind])
    assert decoder.execution.defers, mesh
    check_gradients(decoder, without_deferral(decoder), f"{mesh} {policy} {experts}")


def test_no_slots_of_all_layers_are_saved() -> None:
    """They are zeros, as large as the unreduced gradients of all layers."""
    for policy, of_model in itertools.product(REMAT, [{}, TURNS, KINDS["experts in every third layer"]]):
        decoder = model_on({"fsdp": 4, "expert": 2}, policy, {}, **of_model)
        run, inputs = sharded_gradients(decoder)
        slot = (4, 64, EXPERTS, HIDDEN)
        found = {
            variable.aval.shape
            for _, equation in equations(jax.make_jaxpr(run)(*inputs).jaxpr)
            if equation.primitive.name == "scan"
            for variable in (*equation.invars, *equation.outvars)
        }
        assert slot in found or "moe" in of_model, "the loop carries slots"  # a turn that ends with experts has used them
        stacked = {shape for shape in found if shape[-len(slot) :] == slot} - {slot}
        assert not stacked, (policy, of_model)


@pytest.mark.parametrize("of_model", [{}, TURNS], ids=["alike", "turns"])
def test_the_gradient_of_attention_waits_for_the_sums_of_the_next_layer(of_model: dict[str, Any]) -> None:
    decoder = model_on({"fsdp": 4, "tensor": 2}, "full", {}, **of_model)
    run, inputs = sharded_gradients(decoder)
    rows, matrix = inputs[1].shape[0], (64, EXPERTS, HIDDEN)
    barriers = [
        [variable.aval.shape for variable in equation.invars]
        for depth, equation in equations(jax.make_jaxpr(run)(*inputs).jaxpr)
        if depth == 1 and equation.primitive.name == "optimization_barrier"
    ]
    wanted = sorted([(rows, 32, 64), *[matrix] * 3])
    assert sum(sorted(shapes) == wanted for shapes in barriers) == of_model.get("full_attention_every", 1), barriers


def test_other_weight_gradients_of_layers_in_turns_keep_the_order_of_their_slots() -> None:
    """Of dense layers between those with experts all, also those whose names the experts' matrices have."""
    decoder = model_on({"fsdp": 4, "expert": 2}, "full", {}, **KINDS["experts in every third layer"])
    assert decoder.dense_blocks is not None
    run, inputs = sharded_gradients(decoder)
    barriers = [
        [variable.aval.shape for variable in equation.invars]
        for _, equation in equations(jax.make_jaxpr(run)(*inputs).jaxpr)
        if equation.primitive.name == "optimization_barrier"
    ]
    of_layer = sorted(param.shape[1:] for _, param in nnx.to_flat_state(nnx.state(decoder.dense_blocks)))
    stream = (inputs[1].shape[0], 32, 64)
    assert sorted([stream, *of_layer]) in [sorted(shapes) for shapes in barriers]
    assert not any(shapes.count((64, EXPERTS, HIDDEN)) and stream in shapes and (64,) in shapes for shapes in barriers), (
        "experts' are not sent"
    )


@pytest.mark.parametrize("mesh", drawn(MESHES, 3), ids=str)
def test_gradients_are_deferred_where_devices_share_a_sum(mesh: dict[str, int]) -> None:
    decoder = model_on(mesh, "full", {})
    assert set(mesh) <= set(MESH_AXES) and decoder.execution.defers
    assert not model_on({"tensor": 2}, "full", {}).execution.defers, "all devices have the same tokens"
    turns = model_on(mesh, "full", {}, **TURNS).execution
    assert turns.defers and turns.in_order
    dense = model_on(mesh, "full", {}, moe=None) if "expert" not in mesh else None
    assert dense is None or not dense.execution.defers
