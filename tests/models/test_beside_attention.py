"""Weights of experts are gathered, and their gradients reduced, while latent attention runs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jax
import pytest
from flax import nnx

from ridgeline.configs.model_schema import LatentAttention
from ridgeline.configs.remat import POLICIES
from ridgeline.configs.schema import ComputeConfig, RematConfig
from ridgeline.models.decoder import Decoder
from ridgeline.planner.recompute import beside_attention
from tests.models.test_backward_order import equations
from tests.models.test_deferred_gradients import EXPERTS, HIDDEN, LAYERS, MOE, check_gradients, model_on, sharded_gradients
from tests.sampling import seed

WIDTH, HEADS, LATENT = 64, 8, LatentAttention(q_rank=24, kv_rank=16, nope_dim=126, rope_dim=4, value_dim=5)
LATENT_MODEL: dict[str, Any] = {"head_dim": None, "latent_attention": LATENT}
MESHES: list[dict[str, int]] = [
    {"fsdp": 4, "tensor": 2},
    {"fsdp": 2, "expert": 4},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"fsdp": 2, "tensor": 2, "expert": 2},
    {"data": 2, "expert": 2, "tensor": 2},
]
MODELS: list[dict[str, Any]] = [
    {},
    {"moe": MOE | {"shared_experts": 1}},
    {"num_layers": LAYERS + 1, "moe": MOE | {"dense_layers": 1, "shared_experts": 1}},
    {"gated_mlp": False, "activation": "gelu"},
]


def without_order(decoder: Decoder) -> Decoder:
    """The same model whose experts are gathered where they are used."""
    graphdef, state = nnx.split(decoder)
    other: Decoder = nnx.merge(graphdef, state)
    for _, module in nnx.iter_modules(other):
        if hasattr(module, "execution"):
            module.execution = replace(module.execution, beside_attention=False)
    return other


@pytest.mark.parametrize("case", range(3))
def test_gradients_are_those_of_experts_that_are_gathered_where_they_are_used(case: int) -> None:
    draw = random.Random(f"{seed()} beside {case}")
    mesh, of_model = draw.choice(MESHES if case else MESHES[1:3]), draw.choice(MODELS)
    experts = draw.choice([{}, {"capacity_factor": 1.5}, {"exchange": "all_to_all"}])
    decoder = model_on(mesh, "full", experts, **LATENT_MODEL | of_model)
    assert decoder.execution.beside_attention and decoder.execution.defers
    check_gradients(decoder, without_order(decoder), f"{mesh} {experts} {of_model}")


def barriers(program: Any) -> list[list[tuple[int, ...]]]:
    """Shapes of the operands of each optimization barrier in the loop over layers."""
    return [
        [variable.aval.shape for variable in equation.invars]
        for depth, equation in equations(program)
        if depth == 1 and equation.primitive.name == "optimization_barrier"
    ]


@pytest.mark.parametrize("mesh", MESHES[:3], ids=str)
def test_collectives_begin_after_queries_and_end_before_the_result_of_attention_is_used(mesh: dict[str, int]) -> None:
    """Forward pass and recomputation: gathers; backward pass: sums of the next layer's gradients."""
    decoder = model_on(mesh, "full", {}, **LATENT_MODEL)
    run, inputs = sharded_gradients(decoder)
    found = barriers(jax.make_jaxpr(run)(*inputs).jaxpr)
    rows, matrices = inputs[1].shape[0], [(WIDTH, EXPERTS, HIDDEN)] * 3
    query, context = (rows, 32, HEADS, LATENT.nope_dim + LATENT.rope_dim), (rows, 32, HEADS, LATENT.value_dim)
    slots = [(mesh.get("data", 1) * mesh.get("fsdp", 1), *matrix) for matrix in matrices]
    assert found.count([query, *matrices]) == 2, "the gather begins"
    assert found.count([context, *matrices]) == 2, "and ends"
    assert found.count([context, *slots]) == 1, "the sums begin"
    assert found.count([query, query, context, *matrices]) == 1, "and end"
    of_out = [shapes for shapes in found if (HEADS, LATENT.value_dim, WIDTH) in shapes]
    assert len(of_out) == ("tensor" not in mesh), "the weight gradient after attention comes before"
    assert all(shapes == [(2, *context[1:]), (HEADS, LATENT.value_dim, WIDTH)] for shapes in of_out)
    usual = barriers(jax.make_jaxpr(sharded_gradients(without_order(decoder))[0])(*inputs).jaxpr)
    assert not any(query in shapes or context in shapes for shapes in usual if matrices[0] in shapes or slots[0] in shapes)


def test_nothing_gathered_is_kept_for_the_backward_pass() -> None:
    decoder = model_on({"fsdp": 4, "tensor": 2}, "full", {}, **LATENT_MODEL)

    def stacks(decoder: Decoder) -> int:
        """Arrays of the size of a matrix of all layers that a loop over layers returns."""
        run, inputs = sharded_gradients(decoder)
        loops = [each for _, each in equations(jax.make_jaxpr(run)(*inputs).jaxpr) if each.primitive.name == "scan"]
        return sum(variable.aval.shape == (LAYERS, WIDTH, EXPERTS, HIDDEN) for each in loops for variable in each.outvars)

    assert stacks(decoder) == stacks(without_order(decoder)) > 0


def test_only_where_tokens_are_exchanged_and_latent_attention_is_computed_again() -> None:
    latent = model_on({"fsdp": 4, "tensor": 2}, "full", {}, **LATENT_MODEL).model
    full = {"fsdp": 4, "tensor": 2}

    def applies(
        sizes: dict[str, int] = full, policy: str = "full", names: tuple[str, ...] = (), *, frozen: bool = False, **of_model: Any
    ) -> bool:
        compute = ComputeConfig(remat=RematConfig(policy=policy, names=list(names)))
        return beside_attention(latent.model_copy(update=of_model), compute, sizes, frozen=frozen)

    for sizes in MESHES:
        assert applies(sizes) and applies(sizes, "offload", ("block_input",))
    for sizes in ({"fsdp": 8}, {"data": 2, "fsdp": 4}, {"tensor": 2}, {"fsdp": 2, "tensor": 2, "context": 2}, full | {"pipeline": 2}):
        assert not applies(sizes), sizes
    for policy in set(POLICIES) - {"full", "offload"}:
        assert not applies(policy=policy, names=("mlp_up",) * (policy == "names")), policy
    assert not applies(policy="offload", names=("query", "mlp_up"))
    assert not applies(frozen=True) and not applies(latent_attention=None) and not applies(moe=None)
    assert not applies(latent_attention=LATENT.model_copy(update={"nope_dim": 124})), "fused kernels take these heads"
