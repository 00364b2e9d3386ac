"""The order of the backward pass: after all that the loop over layers saved; layers of several kinds in one turn, one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.remat import zeroes_embedding_early
from ridgeline.configs.schema import AttentionConfig, ComputeConfig, PrecisionConfig, RematConfig
from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.models.decoder import Decoder
from ridgeline.models.parallelize import parallelize
from ridgeline.planner.recompute import gradients_first
from ridgeline.trainer.step import make_train_step, to_global
from tests.models.tiny import BASE, build, tokens, value_and_grad
from tests.sampling import drawn
from tests.sharding.test_equality import make_batch, make_config, prepared

ROWS, LENGTH = 2, 32
REMAT = {
    "none": RematConfig(policy="none"),
    "attention-only": RematConfig(policy="attention-only"),
    "full": RematConfig(policy="full"),
    "dots": RematConfig(policy="dots"),
    "names": RematConfig(policy="names", names=["mlp_up"]),
}


EXPERTS = {"moe": {"experts": 4, "experts_per_token": 2}}


def alternating(
    policy: str, period: int = 3, layers: int = 8, *, scan: bool = True, mesh: tuple[int, int, int] | None = None, **of_model: Any
) -> Decoder:
    """Every `period`-th layer attends to all tokens, the others to a window. mesh: data, fsdp, tensor; None: one device."""
    model = ModelConfig(**BASE | {"num_layers": layers, "sliding_window": 5, "full_attention_every": period} | of_model)
    attention = AttentionConfig(backend="chunked", chunk=8)
    partitioner = None if mesh is None else prepared(make_config(*mesh), jax.devices()[: math.prod(mesh)])[0]
    return build(model, ComputeConfig(remat=REMAT[policy], attention=attention, scan_layers=scan), partitioner=partitioner)


def equations(jaxpr: Any, loops: int = 0) -> Iterator[tuple[int, Any]]:
    """Every equation with the number of scans around it that have the turns or layers of the model (not blocks of attention)."""
    for equation in jaxpr.eqns:
        yield loops, equation
        for inner in programs_in(equation):
            yield from equations(inner, loops + (equation.primitive.name == "scan"))


def programs_in(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield inner


def barriers(decoder: Decoder, loops: int) -> list[tuple[tuple[int, ...], ...]]:
    """Shapes of the operands of each barrier in the gradients' program that has those of all parameters of a layer, in so many loops."""
    program, model, parameters = gradients_program(decoder), decoder.model, len(jax.tree.leaves(nnx.state(decoder.blocks)))
    wide = (BASE["embed_dim"], BASE["mlp_dim"])
    wide = wide if model.moe is None else (BASE["embed_dim"], model.moe.experts, model.expert_width)
    found = [
        tuple(operand.aval.shape for operand in equation.invars)
        for depth, equation in equations(program.jaxpr)
        if depth == loops and equation.primitive.name == "optimization_barrier"
    ]
    return [shapes for shapes in found if wide in shapes and len(shapes) > parameters]


def gradients_program(decoder: Decoder) -> Any:
    graphdef, state = nnx.split(decoder)
    return jax.make_jaxpr(jax.grad(lambda s: jnp.sum(nnx.merge(graphdef, s)(tokens(ROWS, LENGTH)))))(state)


@pytest.mark.parametrize("policy", drawn(list(REMAT), 2))
def test_loss_and_gradients_are_those_of_layers_without_an_order(policy: str) -> None:
    """8 layers in turns of three: two whole turns, and two layers after them."""
    want, want_grads = value_and_grad(alternating("none", scan=False), tokens(ROWS, LENGTH))
    value, grads = value_and_grad(alternating(policy), tokens(ROWS, LENGTH))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), grads, want_grads)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads["blocks"]))


@pytest.mark.parametrize("policy", drawn(["full", "names"], 1))
@pytest.mark.parametrize("of_model", [{}, {"moe": EXPERTS["moe"] | {"every": 3}}], ids=["all with experts", "every third"])
def test_with_experts_loss_and_gradients_are_those_of_layers_without_an_order(policy: str, of_model: dict[str, Any]) -> None:
    """8 layers in turns of three: two whole turns, and two layers after them."""
    model = EXPERTS | of_model
    want, want_grads = value_and_grad(alternating("none", scan=False, **model), tokens(ROWS, LENGTH))
    value, grads = value_and_grad(alternating(policy, **model), tokens(ROWS, LENGTH))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), grads, want_grads)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads["blocks"]))


TURNS = [(2, 8, 0), (3, 8, 1), (4, 11, 2)]
"""Layers of a turn, of the model, and barriers between the layers after its last whole turn."""


@pytest.mark.parametrize(("period", "layers", "after", "policy"), drawn([(*turns, policy) for turns in TURNS for policy in REMAT], 6))
def test_the_gradient_of_a_layers_input_waits_for_the_next_layers_weight_gradients(
    policy: str, period: int, layers: int, after: int
) -> None:
    """A barrier, twice, between two layers of a turn, and between two of the layers after the last whole turn.

    It has the gradient of the stream and of each parameter of one layer, reduced: [..] and not [layers of a turn, ..].
    """
    decoder = alternating(policy, period, layers)
    parameters = len(jax.tree.leaves(nnx.state(decoder.blocks)))
    in_turn, outside = barriers(decoder, 1), barriers(decoder, 0)
    assert len(in_turn) == 2 * (period - 1) and len(outside) == 2 * after
    for shapes in in_turn + outside:
        assert shapes[0] == (ROWS, LENGTH, BASE["embed_dim"]) and len(shapes) == 1 + parameters


@pytest.mark.parametrize("policy", drawn(list(REMAT), 2))
@pytest.mark.parametrize(("mesh", "waits"), [((1, 2, 1), True), ((2, 1, 2), True), ((2, 1, 1), False)])
def test_also_the_last_layer_of_a_turn_waits(policy: str, mesh: tuple[int, int, int], waits: bool) -> None:
    """Not over data alone, where XLA aborts (models/parallelize.py)."""
    decoder = alternating(policy, 3, 11, mesh=mesh, vocab_size=64)
    assert decoder.execution.in_order
    parameters = len(jax.tree.leaves(nnx.state(decoder.blocks)))
    in_turn, outside = barriers(decoder, 1), barriers(decoder, 0)
    outside = [shapes for shapes in outside if len(shapes) == 1 + parameters]  # over tensor there is that of all that was saved
    assert len(in_turn) == 2 * (2 + waits) and len(outside) == 2
    for shapes in in_turn + outside:
        assert shapes[0] == (ROWS, LENGTH, BASE["embed_dim"]) and len(shapes) == 1 + parameters


@pytest.mark.parametrize("policy", list(REMAT))
def test_with_experts_also_the_last_layer_of_a_turn_waits_where_mlps_are_recomputed(policy: str) -> None:
    """11 layers in turns of three: three barriers, twice, in a turn, and one between the two layers after the last whole turn.

    That of the turn's last layer has the gradients of the first layer after the turn, which the loop carries.
    """
    decoder = alternating(policy, 3, 11, **EXPERTS)
    waits = policy in ("full", "names")
    assert decoder.execution.in_order is waits
    parameters = len(jax.tree.leaves(nnx.state(decoder.blocks)))
    in_turn, outside = barriers(decoder, 1), barriers(decoder, 0)
    assert len(in_turn) == 2 * 3 * waits and len(outside) == 2 * waits
    for shapes in in_turn + outside:
        assert shapes[0] == (ROWS, LENGTH, BASE["embed_dim"]) and len(shapes) == 1 + parameters


@pytest.mark.parametrize("policy", ["full", "dots", "names"])
def test_recomputation_waits_for_the_gradient_of_the_result_but_gathers_parameters_before(policy: str) -> None:
    program = gradients_program(alternating(policy))
    blocks = [e for _, e in equations(program.jaxpr) if e.primitive.name == "remat2" and e.params["differentiated"]]
    stream, matrix = (ROWS, LENGTH, BASE["embed_dim"]), (BASE["embed_dim"], BASE["mlp_dim"])
    query = (BASE["embed_dim"], BASE["num_heads"], BASE["embed_dim"] // BASE["num_heads"])
    blocks = [e for e in blocks if {matrix, query} <= {v.aval.shape[-n:] for v in e.invars for n in (2, 3)}]  # not parts of a block
    assert len(blocks) == 3 + 2
    for block in blocks:
        waits = block.params["prevent_cse"]
        assert isinstance(waits, tuple)
        by_shape = [(v.aval.shape, wait) for v, wait in zip(block.invars, waits, strict=True)]
        assert sum(wait for shape, wait in by_shape if shape == stream) >= 2  # the block's input, and the gradient of its result
        assert not any(wait for shape, wait in by_shape if shape[-2:] == matrix)


@pytest.mark.parametrize("policy", drawn(list(REMAT), 2))
@pytest.mark.parametrize(("mesh", "first"), [(None, True), ((1, 2, 1), True), ((2, 1, 1), True), ((1, 1, 2), False)])
def test_weight_gradients_are_computed_before_the_gradient_of_the_input_is_used_and_reduced_after(
    policy: str, mesh: tuple[int, int, int] | None, first: bool
) -> None:
    """In each layer four times: queries, keys and values; the attention's result; gate and up; down. Not over tensor.

    Eight layers, of which a turn of three is in the loop: five are compiled.
    """
    decoder = alternating(policy, mesh=mesh, vocab_size=64)
    assert decoder.execution.matmul.gradients_first is first
    if first:
        check_weight_gradients_come_first(
            decoder, layers=5, reduced_by=None if mesh is None else "reduce_scatter" if mesh[1] > 1 else "psum"
        )


@pytest.mark.parametrize(
    ("policy", "axes", "first"),
    [("full", {"fsdp": 2}, True), ("full", {"data": 2}, True), ("full", {}, True), ("full", {"tensor": 2}, False)]
    + [(policy, {"fsdp": 2}, False) for policy in REMAT if policy != "full"],
)
def test_so_they_are_in_alike_layers_over_context_that_are_computed_again(policy: str, axes: dict[str, int], first: bool) -> None:
    """XLA would delay those of the MLP until attention's backward pass, a ring, is over."""
    config = make_config(*(axes.get(axis, 1) for axis in ("data", "fsdp", "tensor")))
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"context": 2})})
    partitioner = prepared(config, jax.devices()[: 2 * math.prod(axes.values())])[0]
    compute = ComputeConfig(remat=REMAT[policy], attention=AttentionConfig(backend="chunked", chunk=8))
    decoder = build(ModelConfig(**BASE | {"num_layers": 3, "vocab_size": 64}), compute, partitioner=partitioner)
    assert not decoder.execution.in_order
    assert decoder.execution.matmul.gradients_first is first
    if first:
        check_weight_gradients_come_first(decoder, layers=1, reduced_by="reduce_scatter" if "fsdp" in axes else "psum")


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("context", [1, 2])
def test_zeros_of_the_embeddings_gradient_come_early_only_where_weight_gradients_do_not_come_first(
    context: int, tensor: int, moe: bool
) -> None:
    """Inputs of blocks in host memory: over context XLA would delay the last layer's weight gradients until its ring is done."""
    compute = ComputeConfig(remat=RematConfig(policy="offload", names=["block_input"]))
    model = ModelConfig(**BASE | (EXPERTS if moe else {}))
    early = zeroes_embedding_early("offload", ["block_input"], context, tensor, experts=moe)
    first = gradients_first(model, compute, {"context": context, "tensor": tensor}, frozen=False)
    assert (early, first) == (not moe and context == 2 and tensor == 2, not moe and context == 2 and tensor == 1)
    assert not gradients_first(model, compute, {"context": context, "tensor": tensor}, frozen=True)
    assert not gradients_first(model, compute, {"context": context, "tensor": tensor, "pipeline": 2}, frozen=False)
    kept = ComputeConfig(remat=RematConfig(policy="names", names=["mlp_gate", "mlp_up"]))
    assert not gradients_first(model, kept, {"context": context, "tensor": tensor}, frozen=False)


def check_weight_gradients_come_first(decoder: Decoder, *, layers: int, reduced_by: str | None) -> None:
    """layers: that are traced. reduced_by: the first collective of weight gradients; None: on one device."""
    found = list(equations(gradients_program(decoder).jaxpr))
    matrices = {tuple(sorted(leaf.shape[1:])) for leaf in jax.tree.leaves(nnx.state(decoder.blocks)) if leaf.ndim > 2}
    made = {out: equation for _, equation in found for out in equation.outvars}
    returned = [out for _, equation in found for program in programs_in(equation) for out in program.outvars]
    tied = [e for _, e in found if e.primitive.name == "optimization_barrier" and 2 <= len(e.invars) <= 4]
    tied = [e for e in tied if all(tuple(sorted(each.aval.shape)) in matrices for each in e.invars[1:])]
    assert len(tied) == 4 * layers
    for barrier in tied:
        dx, *unreduced = barrier.invars
        assert all(equation is barrier for _, equation in found if dx in equation.invars)
        assert not any(out is dx for out in returned)
        assert {made[each].primitive.name for each in unreduced} <= {"dot_general", "transpose", "reshape", "convert_element_type"}
        if reduced_by is not None:
            after = {e.primitive.name for _, e in found for each in barrier.outvars[1:] if each in e.invars}
            assert after == {reduced_by}, after


def test_layers_of_one_kind_and_frozen_ones_have_no_barriers() -> None:
    model = ModelConfig(**BASE)
    assert not barriers(build(model, ComputeConfig(remat=REMAT["full"])), 1)
    assert not barriers(alternating("full", scan=False), 0)
    own = alternating("full")
    compute = ComputeConfig(remat=REMAT["full"], attention=AttentionConfig(backend="chunked", chunk=8))
    for lora, in_order in ((None, True), (LoraConfig(), True), (LoraConfig(rank=2), False)):
        execution = parallelize(own.model, compute, PrecisionConfig(compute="float32"), own.execution.partitioner, lora)
        assert execution.in_order is execution.matmul.gradients_first is in_order


WINDOWED = {"sliding_window": 5, "full_attention_every": 2, "num_layers": 6}


@pytest.mark.parametrize(
    ("tensor", "policy", "overlap", "accumulation", "model"),
    [(4, policy, "gather", 1, {}) for policy in REMAT]
    + [(2, "none", "gather", 2, {}), (4, "full", "ring", 1, {}), (4, "dots", "gather", 1, WINDOWED), (1, "none", "gather", 1, {})]
    + [(tensor, policy, "gather", 1, EXPERTS) for tensor in (1, 2) for policy in REMAT]
    + [(tensor, policy, "gather", 1, EXPERTS | WINDOWED) for tensor in (1, 2) for policy in REMAT],
)
def test_over_tensor_and_with_kept_gates_of_experts_the_backward_pass_of_the_loop_waits_for_all_that_was_saved(
    tensor: int, policy: str, overlap: str, accumulation: int, model: dict[str, Any]
) -> None:
    """Each stack and each constant that it reads comes from a barrier; gathered inputs that are kept have a layout.

    Experts in layers of several kinds follow each other instead where inputs of MLP down are computed again.
    """
    follow = "moe" in model and "sliding_window" in model and policy in ("full", "names")
    kept = "moe" in model and policy != "full"
    waits = (tensor > 1 or kept) and not follow
    config = make_config(1, 4 // tensor, tensor, accumulation, **model)
    compute = config.compute.model_copy(update={"remat": REMAT[policy], "tensor_overlap": overlap})
    config = config.model_copy(update={"compute": compute})
    partitioner, spec, optimizer, abstract = prepared(config, jax.devices()[:4])
    step = make_train_step(spec, config, optimizer, lambda _: jnp.float32(1e-3), partitioner)
    program = jax.make_jaxpr(step)(abstract, to_global(make_batch(0), partitioner)).jaxpr
    made = {out: equation.primitive.name for _, equation in equations(program) for out in equation.outvars}
    (loop,) = [e for _, e in equations(program) if e.primitive.name == "scan" and e.params["reverse"]]
    constants, carried = loop.params["num_consts"], loop.params["num_carry"]
    of_routers = {"broadcast_in_dim", "reshape"} if "moe" in model else {"broadcast_in_dim"}  # gradients of routers' sums, by turns
    saved = {made.get(each) for each in loop.invars[constants + carried :]} - of_routers
    assert (saved == {"optimization_barrier"}) == waits
    laid_out = sum(equation.primitive.name == "layout_constraint" for _, equation in equations(program))
    assert (laid_out > 0) == (tensor > 1 and waits and (policy in ("none", "attention-only") or overlap == "ring"))
