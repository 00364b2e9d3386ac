"""The mixture of experts: router, dispatch and grouped matmuls against a direct computation, expert by expert."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from ridgeline.configs.model_schema import MoEConfig
from ridgeline.configs.schema import MESH_AXES, Config, DataConfig, LossConfig, MeshConfig
from ridgeline.models.matmul import fp8
from ridgeline.models.moe import float8
from ridgeline.models.moe.adapters import Pair, added, gradients, input_gradient
from ridgeline.models.moe.exchange import Exchange, Route, Slices, padded_ragged_all_to_all
from ridgeline.models.moe.experts import _place, _within
from ridgeline.models.moe.grouped_matmul import Blocks, Capacity, Ragged, choose_kernel
from ridgeline.models.moe.router import Choice, RouterTotals, balanced_bias, choose, sums_of
from ridgeline.planner.experts import capacity
from ridgeline.planner.local import LocalSizes
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from tests.models import tiny
from tests.sampling import drawn, seed

ROWS, LENGTH = 4, 12


def direct_choice(moe: MoEConfig, logits: np.ndarray, bias: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Experts and weights of one token, by sorting."""
    scores = 1 / (1 + np.exp(-logits)) if moe.score == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    ranked = scores + bias
    size = moe.experts // moe.groups
    groups = ranked.reshape(moe.groups, size)
    best = np.sort(groups, axis=1)[:, -1 if moe.group_score == "best" else -2 :].sum(1)
    allowed = (
        {g * size + e for g in np.argsort(-best)[: moe.groups_per_token] for e in range(size)} if moe.grouped else set(range(moe.experts))
    )
    experts = sorted(allowed, key=lambda e: -ranked[e])[: moe.experts_per_token]
    weights = scores[experts] / (scores[experts].sum() if moe.normalize else 1)
    return experts, weights * moe.scale


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [{}, {"groups": 3, "groups_per_token": 2}, {"groups": 4, "groups_per_token": 2, "group_score": "best"}])
def test_experts_are_chosen_as_by_sorting(score: Any, groups: dict[str, Any]) -> None:
    rng = np.random.default_rng(len(groups))
    for normalize, scale in ((True, 1.0), (False, 2.5)):
        moe = MoEConfig(experts=12, experts_per_token=3, score=score, normalize=normalize, scale=scale, **groups)
        logits, bias = rng.normal(size=(1, 20, 12)).astype(np.float32), rng.normal(size=12).astype(np.float32) / 4
        choice, _ = choose(Partitioner.single(), moe, jnp.asarray(logits), jnp.asarray(bias))
        for token in range(20):
            experts, weights = direct_choice(moe, logits[0, token], bias)
            assert choice.experts_BTK[0, token].tolist() == experts
            np.testing.assert_allclose(choice.weights_BTK[0, token], weights, rtol=1e-5)


@pytest.mark.parametrize("kernel", [Ragged(), Capacity(), Blocks(16), Blocks()])
def test_every_assignment_has_one_row_of_its_expert_or_is_dropped(kernel: Any) -> None:
    for draw, factor in enumerate((None, 0.5, 0.9, 3.0)):
        factor = 5.0 if factor is None and isinstance(kernel, Capacity) else factor
        chosen_A = np.random.default_rng(draw).integers(0, 5, 40) ** 2 // 4  # loads differ
        limit = 40 if factor is None else capacity(40, 5, 1, factor)
        most = 40 if factor is None else 5 * limit
        expert_A = np.asarray(_within(jnp.asarray(chosen_A)[:, None], 5, limit))[:, 0]
        assignment_R, row_A, load_E = (np.asarray(a) for a in _place(kernel, jnp.asarray(expert_A), 5, most))
        rows, starts = kernel.rows(most, 5), np.asarray(kernel.starts(jnp.asarray(load_E), most))
        kept = row_A < rows
        np.testing.assert_array_equal(kept, expert_A < 5)
        np.testing.assert_array_equal(load_E, np.minimum(np.bincount(chosen_A, minlength=5), limit))
        assert kept.sum() == load_E.sum() == (assignment_R < 40).sum()
        for assignment in np.flatnonzero(kept):
            row, expert = row_A[assignment], chosen_A[assignment]
            assert assignment_R[row] == assignment
            assert starts[expert] <= row < starts[expert] + load_E[expert]
        for expert in range(5):  # the last tokens are dropped
            mine = kept[chosen_A == expert]
            assert mine.tolist() == sorted(mine, reverse=True)


WIDTHS = [(64, 128), (90, 45), (64, 200), (256, 384), (130, 512)]
LOADS = [(16, [5, 0, 20, 39, 0]), (16, [0, 0, 0, 64, 0]), (16, [16, 16, 16, 0, 16]), (128, [5, 0, 300, 39, 0]), (128, [128, 0, 0, 256, 1])]


@pytest.mark.parametrize("kernel", [Ragged(), Capacity(), Blocks(16)])
def test_the_rows_of_each_expert_are_added_up_without_a_copy_of_all_rows(kernel: Any) -> None:
    rng = np.random.default_rng(random.Random(seed()).randrange(2**32))
    load_E = np.full(5, 48) if isinstance(kernel, Capacity) else rng.multinomial(240, rng.dirichlet(np.ones(5)))
    rows = kernel.rows(240, 5)
    starts_E = np.asarray(kernel.starts(jnp.asarray(load_E), rows))
    y_RO, wanted_EO = np.zeros((rows, 7), np.float32), np.zeros((5, 7))
    for expert, (start, load) in enumerate(zip(starts_E, load_E, strict=True)):
        y_RO[start : start + load] = rng.normal(size=(load, 7))
        wanted_EO[expert] = y_RO[start : start + load].sum(0, dtype=np.float64)
    found_EO = jax.jit(kernel.sums)(y_RO, load_E)
    assert found_EO.dtype == jnp.float32
    np.testing.assert_allclose(found_EO, wanted_EO, rtol=0, atol=1e-5)
    if not isinstance(kernel, Ragged):  # for small models
        text = str(jax.make_jaxpr(kernel.sums)(y_RO, load_E))
        assert f"[{rows},5]" not in text, "a matmul over all rows, whose number XLA pads"


@pytest.mark.parametrize(
    ("block", "loads", "width", "hidden"), drawn([(*rows, *widths) for rows, widths in itertools.product(LOADS, WIDTHS)], 10)
)
def test_the_pallas_kernels_multiply_each_row_with_the_matrix_of_its_expert(block: int, loads: list[int], width: int, hidden: int) -> None:
    kernel, rng, total = Blocks(block, interpret=True), np.random.default_rng(0), sum(loads)
    assignment_R, row_A, load_E = _place(kernel, jnp.repeat(jnp.arange(5), np.array(loads), total_repeat_length=total), 5, total)
    x_SD, w_DEF, y_SF = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((total, width), (width, 5, hidden), (total, hidden))
    )
    expert_S = np.repeat(np.arange(5), loads)
    x_RD, y_RF = (a.at[assignment_R].get(mode="fill", fill_value=0) for a in (x_SD, y_SF))
    found = kernel.matmul(x_RD, w_DEF, load_E)[row_A]
    np.testing.assert_allclose(found, np.einsum("sd,dsf->sf", x_SD, w_DEF[:, expert_S]), atol=1e-4)
    found = kernel.matmul(y_RF, w_DEF, load_E, transposed=True)[row_A]
    np.testing.assert_allclose(found, np.einsum("sf,dsf->sd", y_SF, w_DEF[:, expert_S]), atol=1e-4)
    wanted = np.stack([np.asarray(x_SD)[expert_S == e].T @ np.asarray(y_SF)[expert_S == e] for e in range(5)], 1)
    np.testing.assert_allclose(kernel.outer(x_RD, y_RF, load_E, jnp.dtype("float32")), wanted, atol=1e-4)


def _launched(kernel: Blocks, inputs: int, outputs: int) -> list[Any]:
    """Grid mappings of matmul, transposed matmul and outer, for two experts."""
    x_RI, y_RO, w_IEO, load_E = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((512, inputs), jnp.bfloat16),
            ((512, outputs), jnp.bfloat16),
            ((inputs, 2, outputs), jnp.bfloat16),
            ((2,), jnp.int32),
        )
    )
    traced = [
        jax.make_jaxpr(kernel.matmul)(x_RI, w_IEO, load_E),
        jax.make_jaxpr(lambda *given: kernel.matmul(*given, transposed=True))(y_RO, w_IEO, load_E),
        jax.make_jaxpr(lambda *given: kernel.outer(*given, jnp.dtype("float32")))(x_RI, y_RO, load_E),
    ]
    return [eqn.params["grid_mapping"] for jaxpr in traced for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "grids"),
    [
        (512, 768, ((12,), (8,), (4, 3, 2))),  # tiles of 256 outputs, of 128 inputs x 256
        (384, 128, ((4,), (12,), (3, 1, 2))),  # 128
        (320, 65, ((4,), (20,), (5, 1, 2))),  # 64, for 320 and 128 outputs; 64 x 128
    ],
)
def test_tiles_are_as_wide_as_the_padded_widths_allow(inputs: int, outputs: int, grids: tuple[tuple[int, ...], ...]) -> None:
    assert tuple(mapping.grid for mapping in _launched(Blocks(), inputs, outputs)) == grids


def test_a_block_of_rows_is_multiplied_with_all_columns_before_the_next() -> None:
    for mapping, columns in zip(_launched(Blocks(), 512, 768)[:2], (3, 2), strict=True):
        where = mapping.block_mappings[-1].index_map_jaxpr
        order = [tuple(map(int, jax.core.eval_jaxpr(where.jaxpr, where.consts, np.int32(p)))) for p in range(*mapping.grid)]
        assert order == [(row, column) for row in range(4) for column in range(columns)]


@pytest.mark.parametrize(("experts", "per_token", "groups"), [(8, 2, 1), (8, 2, 8), (64, 6, 4), (128, 8, 16), (256, 8, 8), (8, 4, 4)])
def test_the_flops_that_the_kernels_state_are_those_of_the_blocks_that_have_rows(experts: int, per_token: int, groups: int) -> None:
    """Not of the room for the worst case: with experts over 8 devices that is 8 times as large. Tokens choose at random here."""
    kernel = choose_kernel("gpu", jnp.dtype(jnp.bfloat16), experts, per_token, groups, None)
    assert isinstance(kernel, Blocks)
    rng, tokens, local = np.random.default_rng(experts), 2048 * groups, experts // groups
    rows = kernel.rows(tokens * min(per_token, local), local)
    w_DEF, x_RD, y_RF = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, local, 128), (rows, 64), (rows, 128)))
    load_E = jax.ShapeDtypeStruct((local,), jnp.int32)
    traced = [
        jax.make_jaxpr(kernel.matmul)(x_RD, w_DEF, load_E),
        jax.make_jaxpr(lambda *given: kernel.outer(*given, jnp.dtype("float32")))(x_RD, y_RF, load_E),
    ]
    stated = [int(eqn.params["metadata"]["flops"]) for jaxpr in traced for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]
    chosen = [np.argsort(rng.random((tokens, experts)), 1)[:, :per_token] for _ in range(2)]
    loads = [np.bincount(chosen_SK.ravel(), minlength=experts).reshape(groups, local) for chosen_SK in chosen]
    multiplied = np.mean([np.sum(-(-load_GE // kernel.block), 1) * kernel.block for load_GE in loads])
    assert len(stated) == 2
    assert [flops / (2 * 64 * 128) for flops in stated] == pytest.approx([multiplied] * 2, rel=0.04)


@pytest.mark.parametrize("kernel", [Blocks(16, interpret=True), Ragged()], ids=["pallas", "ragged"])
def test_adapters_of_experts_have_any_rank(kernel: Any) -> None:
    """The Pallas kernels multiply 64 columns at a time, or more; a smaller rank is padded."""
    rng, width, hidden, experts, rank, scale = np.random.default_rng(1), 64, 128, 5, 3, 0.7
    loads = [5, 0, 20, 39, 0]
    assignment_R, row_A, load_E = _place(kernel, jnp.repeat(jnp.arange(5), np.array(loads), total_repeat_length=64), 5, 64)
    shapes = ((64, width), (64, hidden), (width, experts, rank), (rank, experts, hidden))
    x_SD, dy_SF, a_DEZ, b_ZEF = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    expert_S, pair = np.repeat(np.arange(experts), loads), Pair(a_DEZ, b_ZEF)

    def direct(x_SD: jax.Array, pair: Pair) -> jax.Array:
        return scale * jnp.einsum("sd,dsz,zsf->sf", x_SD, pair.a[:, expert_S], pair.b[:, expert_S])

    y_SF, pull = jax.vjp(direct, x_SD, pair)
    dx_SD, dpair = pull(dy_SF)
    x_RD, dy_RF = (value.at[assignment_R].get(mode="fill", fill_value=0) for value in (x_SD, dy_SF))
    np.testing.assert_allclose(added(kernel, scale, x_RD, pair, load_E)[row_A], y_SF, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(input_gradient(kernel, scale, dy_RF, pair, load_E)[row_A], dx_SD, rtol=1e-4, atol=1e-3)
    found = gradients(kernel, scale, x_RD, dy_RF, pair, load_E, jnp.dtype("float32"))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3), found, dpair)


MOE = {"experts": 6, "experts_per_token": 2, "expert_dim": 20, "shared_experts": 1}


def layer_and_input(
    moe: dict[str, Any], factor: float | None = None, mesh: dict[str, int] | None = None, exchange: str = "auto"
) -> tuple[Any, jax.Array]:
    model = tiny.ModelConfig(**{**tiny.BASE, "num_layers": 1, "moe": moe})
    compute = tiny.ComputeConfig.model_validate({"experts": {"capacity_factor": factor, "exchange": exchange}})
    partitioner = Partitioner.single() if mesh is None else Partitioner.of(build_mesh(MeshConfig(**mesh)), Config(mesh=MeshConfig(**mesh)))
    structure, stacked = nnx.split(tiny.build(model, compute, partitioner=partitioner).blocks.mlp)
    layer = nnx.merge(structure, jax.tree.map(lambda leaf: 8 * leaf[0], stacked))
    return layer, jax.random.normal(jax.random.key(1), (ROWS, LENGTH, model.embed_dim))


def direct_layer(params: Any, moe: MoEConfig, x_BTD: jax.Array, kept_BTK: jax.Array | None = None) -> jax.Array:
    """Every expert processes every token; those that were not chosen count with weight 0."""
    choice, _ = choose(Partitioner.single(), moe, x_BTD @ params["router"], None)
    weights = choice.weights_BTK if kept_BTK is None else choice.weights_BTK * kept_BTK
    weight_BTE = jnp.sum(jax.nn.one_hot(choice.experts_BTK, moe.experts) * weights[..., None], 2)

    def mlp(gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return (jax.nn.silu(x_BTD @ gate) * (x_BTD @ up)) @ down

    def weighted(weight_BT: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        wide = (weight_BT[..., None] * x_BTD @ matrix if moe.scale_input else x_BTD @ matrix for matrix in (gate, up))
        hidden_BTF = jax.nn.silu(next(wide)) * next(wide)
        return hidden_BTF @ down * (1 if moe.scale_input else weight_BT[..., None])

    each = jax.vmap(weighted, (2, 1, 1, 1))(weight_BTE, params["gate"], params["up"], params["down"].transpose(2, 1, 0))
    return jnp.sum(each, 0) + mlp(*(params["shared"][name] for name in ("gate", "up", "down")))


def of_sources(x_BTx: jax.Array, rows: int, parts: int) -> jax.Array:
    """[B, T, ...] -> [devices, tokens of a device, ...] for rows and the sequence cut into this many parts."""
    split = x_BTx.reshape(rows, x_BTx.shape[0] // rows, parts, x_BTx.shape[1] // parts, *x_BTx.shape[2:])
    return jnp.moveaxis(split, 2, 1).reshape(rows * parts, -1, *x_BTx.shape[2:])


ON_MESH = {**MOE, "experts": 8, "experts_per_token": 3}
"""On four devices of expert: tokens choose up to two experts of a device."""


SCALED = {**MOE, "scale_input": True, "expert_dim": 48}
"""Inputs of the experts are weighted, and hidden values wider than they."""


@pytest.mark.parametrize(
    ("moe", "factor", "mesh", "exchange"),
    [
        (MOE, None, None, "auto"),
        (MOE, 0.6, None, "auto"),
        (SCALED, None, None, "auto"),
        (SCALED | {"experts": 8}, 0.6, {"tensor": 2, "expert": 4}, "gather"),
        (ON_MESH, None, {"tensor": 2, "expert": 4}, "gather"),
        (ON_MESH, None, {"tensor": 2, "expert": 4}, "all_to_all"),
        (ON_MESH, 0.6, {"tensor": 2, "expert": 4}, "gather"),
        (ON_MESH, 0.6, {"tensor": 2, "expert": 4}, "all_to_all"),
        (ON_MESH, 1.1, {"fsdp": 2, "tensor": 2, "expert": 2}, "all_to_all"),
    ],
)
def test_layer_and_gradients_equal_a_direct_computation(
    moe: dict[str, Any], factor: float | None, mesh: dict[str, int] | None, exchange: str
) -> None:
    """On meshes too: the exchange changes nothing, also not which tokens are dropped."""
    config, sizes = MoEConfig(**moe), {"fsdp": 1, "tensor": 1, "expert": 1} | (mesh or {})
    layer, x_BTD = layer_and_input(moe, factor, mesh, exchange)
    structure, state = nnx.split(layer)
    dy_BTD = jax.random.normal(jax.random.key(2), x_BTD.shape)
    choice, _ = choose(Partitioner.single(), config, x_BTD @ layer.router[...], None)
    kept_BTK = jnp.ones(choice.experts_BTK.shape)
    if factor is not None:
        cut = (sizes["fsdp"] * sizes["expert"], sizes["tensor"])
        kept = []
        for expert_SK in of_sources(choice.experts_BTK, *cut):
            limit = capacity(expert_SK.shape[0], config.experts, config.experts_per_token, factor)
            kept.append(_within(expert_SK, config.experts, limit) < config.experts)
        at_BT = jnp.argsort(of_sources(jnp.arange(ROWS * LENGTH).reshape(ROWS, LENGTH), *cut).reshape(-1))
        kept_BTK = jnp.concatenate(kept)[at_BT].reshape(choice.experts_BTK.shape).astype(jnp.float32)
        assert 0 < kept_BTK.mean() < 1

    def ours(params: Any, x_BTD: jax.Array) -> tuple[jax.Array, Any]:
        layer = nnx.merge(structure, params)
        update = layer(x_BTD, lambda x: x)
        return jnp.sum(update * dy_BTD), (update, layer.sums.get_raw_value().dropped)

    def theirs(params: Any, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        update = direct_layer(params, config, x_BTD, kept_BTK)
        return jnp.sum(update * dy_BTD), update

    quick = {"compiler_options": tiny.QUICK_COMPILE}
    (_, (found, dropped)), grads = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True), **quick)(state, x_BTD)
    (_, expected), wanted = jax.jit(jax.value_and_grad(theirs, (0, 1), has_aux=True), **quick)(nnx.to_pure_dict(state), x_BTD)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert float(dropped.sum()) == float((1 - kept_BTK).sum())
    for one, other in zip(jax.tree.leaves((nnx.to_pure_dict(grads[0]), grads[1])), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()) + 1e-7)


def barriers(jaxpr: Any) -> list[list[tuple[int, ...]]]:
    """Shapes of the operands of each barrier in a program, also of those within its calls."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "optimization_barrier":
            found.append([operand.aval.shape for operand in equation.invars])
        for inner in jaxprs_in_params(equation.params):
            found += barriers(inner)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_weight_gradients_of_experts_are_computed_with_the_gradient_of_their_layers_input_where_their_operands_are_large(seed: int) -> None:
    """XLA would compute them layers later, and keep what they are computed from: here float32, in 4 bytes per element.

    Where rows are wider than hidden activations, those of gate and up come before the gradients of the rows, and not only before their sum.
    """
    rng = np.random.default_rng(seed)
    width, per_token = tiny.BASE["embed_dim"], int(rng.integers(1, 3))
    hidden = width + 4 * int(rng.integers(0, 3)) if seed % 3 == 0 else 4 * int(rng.integers(2, width // 4))
    at_limit = ROWS * LENGTH * per_token * (width + hidden) / (4 * width * hidden)
    experts = max(per_token, int(at_limit * (rng.uniform(0.3, 0.9) if seed % 2 else rng.uniform(1.2, 3))))
    moe = {"experts": experts, "experts_per_token": per_token, "expert_dim": hidden}
    model = tiny.ModelConfig(**{**tiny.BASE, "num_layers": 1, "moe": moe, "mlp_bias": True})
    compute = tiny.ComputeConfig()
    structure, stacked = nnx.split(tiny.build(model, compute).blocks.mlp)
    state, x_BTD = jax.tree.map(lambda leaf: leaf[0], stacked), jnp.ones((ROWS, LENGTH, width))
    program = jax.make_jaxpr(jax.grad(lambda state: jnp.sum(nnx.merge(structure, state)(x_BTD, lambda x: x))))(state)
    found = [shapes for shapes in barriers(program.jaxpr) if (width, experts, hidden) in shapes]
    assert sorted(shapes.count((width, experts, hidden)) for shapes in found) == ([1, 2] if seed % 2 else [])
    both = [shapes for shapes in found if shapes.count((width, experts, hidden)) == 2]
    waiting = [[shape for shape in shapes if shape != (width, experts, hidden)] for shapes in both]
    rows = ROWS * LENGTH * per_token
    assert waiting == ([[(rows, hidden)] * 2 if width > hidden else [x_BTD.shape]] if seed % 2 else [])
    assert [shapes.count((experts, hidden)) for shapes in barriers(program.jaxpr) if (experts, hidden) in shapes] == [2]
    # the gradients that biases are summed from are written before, in the place of what they are computed from
    assert sum(list(shapes) == [(rows, hidden)] * 2 for shapes in barriers(program.jaxpr)) == 1


def test_the_padded_exchange_moves_the_slices_that_the_ragged_one_is_documented_to_move() -> None:
    """As in the documentation of jax.lax.ragged_all_to_all, which XLA's CPU backend does not have."""
    devices, rng, spec = 4, np.random.default_rng(0), jax.sharding.PartitionSpec("expert")
    sent = rng.integers(0, 4, (devices, devices))
    start = np.cumsum(sent, 1) - sent
    to = np.cumsum(sent, 0) - sent  # where each slice starts at its receiver
    x, out = rng.normal(size=(devices, 16, 3)), rng.normal(size=(devices, 20, 3))
    wanted = out.copy()
    for source, target in np.ndindex(devices, devices):
        size, first, at = sent[source, target], start[source, target], to[source, target]
        wanted[target, at : at + size] = x[source, first : first + size]

    def local(x: jax.Array, out: jax.Array, start: jax.Array, sent: jax.Array, to: jax.Array, received: jax.Array) -> jax.Array:
        return padded_ragged_all_to_all(x, out, Slices(start, sent), Slices(to, received), 4)

    mesh = build_mesh(MeshConfig(expert=devices), jax.devices()[:devices])
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec, check_vma=False))
    arrays = [jnp.asarray(a).reshape(-1, *a.shape[2:]) for a in (x, out, start, sent, to.T, sent.T)]
    np.testing.assert_allclose(run(*arrays).reshape(wanted.shape), wanted, rtol=1e-6)


def test_the_ragged_exchange_brings_each_token_once_to_each_device_of_its_experts_and_back() -> None:
    """What GPUs are asked to send, computed here as documented for jax.lax.ragged_all_to_all, which XLA's CPU backend does not have."""
    devices, tokens, experts, per_token, rng = 4, 6, 8, 3, np.random.default_rng(3)
    partitioner = Partitioner(build_mesh(MeshConfig(expert=devices), jax.devices()[:devices]))
    exchange = Exchange(partitioner, "all_to_all", experts, per_token, None, ragged=True)
    expert_PSK = np.stack([[rng.permutation(experts)[:per_token] for _ in range(tokens)] for _ in range(devices)])
    expert_PSK[0] = [0, 1, 2]  # a device that sends to two devices only, and one, 3, that it sends nothing
    spec = jax.sharding.PartitionSpec("expert")
    find = jax.shard_map(exchange.route, mesh=partitioner.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    route: Route = jax.tree.map(lambda a: np.asarray(a).reshape(devices, -1), jax.jit(find)(jnp.asarray(expert_PSK.reshape(-1, per_token))))

    def ragged(x_PN: np.ndarray, out_PN: np.ndarray, sent: Slices, received: Slices, to_PP: np.ndarray) -> np.ndarray:
        for source, target in np.ndindex(devices, devices):
            size, first, at = sent.size_P[source, target], sent.start_P[source, target], to_PP[source, target]
            assert size == received.size_P[target, source]  # XLA requires it
            assert at == received.start_P[target, source]
            out_PN[target, at : at + size] = x_PN[source, first : first + size]
        return out_PN

    name_PS = 1 + np.arange(devices * tokens).reshape(devices, tokens)
    padded_PS = np.concatenate([name_PS, np.zeros((devices, 1), int)], 1)
    rows_PN = np.take_along_axis(padded_PS, route.token_N, 1)
    slots_PG = ragged(rows_PN, np.zeros((devices, devices * tokens), int), route.rows, route.slots, route.to_P)
    goes_PSP = (expert_PSK[..., None] // (experts // devices) == np.arange(devices)).any(2)
    for source, target in np.ndindex(devices, devices):
        wanted = name_PS[source][goes_PSP[source, :, target]]
        found = slots_PG[target, source * tokens :][:tokens]
        np.testing.assert_array_equal(found, np.pad(wanted, (0, tokens - len(wanted))))
    back_PN = ragged(slots_PG, np.zeros_like(rows_PN), route.slots, route.rows, route.from_P)
    np.testing.assert_array_equal(back_PN, rows_PN)
    copies_PSJ = np.take_along_axis(np.pad(back_PN, ((0, 0), (0, 1))), route.row_SJ.reshape(devices, -1), 1).reshape(devices, tokens, -1)
    np.testing.assert_array_equal(copies_PSJ.sum(2), name_PS * goes_PSP.sum(2))


def documented_exchange(
    x: jax.Array, out: jax.Array, start_P: jax.Array, sent_P: jax.Array, to_P: jax.Array, received_P: jax.Array, *, axis_name: str
) -> jax.Array:
    """As the documentation of jax.lax.ragged_all_to_all."""
    x_PN, start_PP, sent_PP, to_PP = (jax.lax.all_gather(each, axis_name) for each in (x, start_P, sent_P, to_P))
    me, row_M = jax.lax.axis_index(axis_name), jnp.arange(out.shape[0])
    for source in range(received_P.shape[0]):
        offset_M = row_M - to_PP[source, me]
        moved = x_PN[source].at[start_PP[source, me] + offset_M].get(mode="clip")
        out = jnp.where(((offset_M >= 0) & (offset_M < sent_PP[source, me]))[:, None], moved, out)
    return out


@pytest.mark.parametrize("seed", range(3))
def test_the_ragged_exchange_has_the_values_and_gradients_of_the_padded_one(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", documented_exchange)
    devices, tokens, experts, per_token, rng = 4, 6, 8, 1 + seed, np.random.default_rng(seed)
    partitioner, spec = Partitioner(build_mesh(MeshConfig(expert=devices), jax.devices()[:devices])), jax.sharding.PartitionSpec("expert")
    chosen = jnp.asarray([rng.permutation(experts)[:per_token] for _ in range(devices * tokens)])
    x, factors = (jnp.asarray(rng.normal(size=(rows, 5)), jnp.float32) for rows in (devices * tokens, devices * devices * tokens))

    def run(ragged: bool) -> Any:
        exchange = Exchange(partitioner, "all_to_all", experts, per_token, None, ragged=ragged)

        def local(x_SD: jax.Array, expert_SK: jax.Array, factor_GD: jax.Array) -> jax.Array:
            route = exchange.route(expert_SK)
            return exchange.combine(jnp.sin(exchange.dispatch(x_SD, route)) * factor_GD, route)

        shards = jax.shard_map(local, mesh=partitioner.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.cos(shards(x, chosen, factors)))))(x)

    jax.tree.map(lambda found, wanted: np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6), run(True), run(False))


def made_of(jaxpr: Any, primitive: str, operand: int) -> list[list[str]]:
    """The primitives that an operand of each such equation comes from, by the first of their own operands; also within calls."""
    made, found = {out: equation for equation in jaxpr.eqns for out in equation.outvars}, []
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            chain, at = [], equation.invars[operand]
            while (source := made.get(at) if not hasattr(at, "val") else None) is not None and source.invars:
                chain.append(source.primitive.name)
                at = source.invars[0]
            found.append(chain)
        for inner in jaxprs_in_params(equation.params):
            found += made_of(inner, primitive, operand)
    return found


@pytest.mark.parametrize("hidden", [8, 16, 24])
@pytest.mark.parametrize("matmul", ["compute", "fp8"])
@pytest.mark.parametrize("mesh", [{}, {"expert": 2}, {"tensor": 2}, {"fsdp": 2}], ids=str)
def test_gradients_of_rows_wait_for_weight_gradients_where_the_plan_says(mesh: dict[str, int], matmul: str, hidden: int) -> None:
    """Their matmuls read what comes out of the barrier: XLA drops what is unused of it."""
    moe = {"experts": 2, "experts_per_token": 2, "expert_dim": hidden}
    sharding = MeshConfig(**mesh)
    config = Config(
        model=tiny.ModelConfig(**{**tiny.BASE, "num_layers": 1, "moe": moe}),
        precision=tiny.PrecisionConfig(matmul=matmul),
        data=DataConfig(seq_len=LENGTH, batch_size=ROWS),
        mesh=sharding,
    )
    partitioner = Partitioner.of(build_mesh(sharding, jax.devices()[: math.prod(mesh.values())]), config)
    structure, stacked = nnx.split(tiny.build(config.model, config.compute, config.precision, partitioner).blocks.mlp)
    state, x_BTD = jax.tree.map(lambda leaf: leaf[0], stacked), jnp.ones((ROWS, LENGTH, config.model.embed_dim), jnp.bfloat16)
    program = jax.make_jaxpr(jax.grad(lambda state, x: jnp.sum(nnx.merge(structure, state)(x, lambda x: x).astype(jnp.float32)), (0, 1)))
    chains = made_of(program(state, x_BTD).jaxpr, "ragged_dot_general", 0)
    waiting = [chain for chain in chains if [name for name in chain if name != "convert_element_type"][:1] == ["optimization_barrier"]]
    local = LocalSizes.of(config, dict.fromkeys(MESH_AXES, 1) | mesh)
    assert local.ties_weight_gradients
    assert len(waiting) == (2 if local.weight_gradients_first else 0), chains


def test_the_ragged_exchange_writes_zeros_when_its_tokens_are_there() -> None:
    """XLA would write those of all exchanges of a turn at once."""
    devices, tokens, experts = 4, 6, 8
    partitioner, spec = Partitioner(build_mesh(MeshConfig(expert=devices), jax.devices()[:devices])), jax.sharding.PartitionSpec("expert")
    exchange = Exchange(partitioner, "all_to_all", experts, 2, None, ragged=True)

    def local(x_SD: jax.Array, expert_SK: jax.Array) -> jax.Array:
        route = exchange.route(expert_SK)
        return exchange.combine(jnp.sin(exchange.dispatch(x_SD, route)), route)

    shards = jax.shard_map(local, mesh=partitioner.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x, chosen = jnp.ones((devices * tokens, 5)), jnp.zeros((devices * tokens, 2), jnp.int32)
    program = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jnp.cos(shards(x, chosen)))))(x)
    zeros = made_of(program.jaxpr, "ragged_all_to_all", 1)
    assert len(zeros) == 4 and all(chain[:2] == ["broadcast_in_dim", "optimization_barrier"] for chain in zeros), zeros
    sent = made_of(program.jaxpr, "ragged_all_to_all", 0)
    assert all(chain[0] == "optimization_barrier" for chain in sent), "XLA drops what is unused of a barrier, and what it waits for"


def test_losses_of_the_router_are_1_at_balance_and_largest_where_all_tokens_choose_the_same() -> None:
    partitioner, experts = Partitioner.single(), 4
    even = jnp.tile(jnp.arange(experts), (ROWS, LENGTH // experts))[..., None]
    totals = {}
    for name, chosen in (("even", even), ("same", jnp.zeros_like(even))):
        logits = 30.0 * jax.nn.one_hot(chosen[..., 0], experts)
        choice = Choice(chosen, jnp.ones(chosen.shape))
        sums = sums_of(partitioner, logits, jax.nn.softmax(logits, -1), choice, jnp.zeros(1))
        totals[name] = RouterTotals.of(jax.tree.map(lambda x: x[None], sums), LENGTH)
    metrics = {name: total.metrics(ROWS, ROWS * LENGTH) for name, total in totals.items()}
    np.testing.assert_allclose([float(metrics[name]["router_balance_loss"]) for name in metrics], [1, experts], rtol=1e-5)
    np.testing.assert_allclose([float(metrics[name]["router_load_max"]) for name in metrics], [1, experts], rtol=1e-5)
    np.testing.assert_allclose(float(metrics["even"]["router_z_loss"]), 900, rtol=1e-5)
    assert float(metrics["even"]["router_entropy"]) == pytest.approx(0, abs=1e-6)
    objective = totals["same"].objective(LossConfig(load_balance=0.1, router_z_loss=0.01), ROWS, ROWS * LENGTH)
    assert float(objective) == pytest.approx(0.1 * experts + 0.01 * 900, rel=1e-5)


def test_the_choice_bias_moves_against_the_load() -> None:
    bias = balanced_bias(jnp.zeros((1, 3)), jnp.asarray([[9.0, 3.0, 6.0]]), 0.01)
    np.testing.assert_allclose(bias, [[-0.01, 0.01, 0.0]])


def on_grid(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Values of which float32 adds products exactly."""
    return jnp.asarray(rng.integers(-8, 9, shape), jnp.float32).astype(dtype)


@pytest.mark.parametrize("kernel", [Blocks(16, interpret=True), Ragged(), Capacity()], ids=["pallas", "ragged", "capacity"])
def test_products_of_float8_equal_those_of_their_values_times_their_scales(kernel: Any) -> None:
    """Of rows in e4m3 and gradients in e5m2, with a scale per expert."""
    rng, width, hidden, experts = np.random.default_rng(2), 64, 128, 5
    loads, most = [5, 0, 20, 39, 0], experts * 39 if isinstance(kernel, Capacity) else 64
    assignment_R, row_A, load_E = _place(kernel, jnp.repeat(jnp.arange(experts), np.array(loads), total_repeat_length=64), experts, most)
    x_SD, w_DEF = on_grid(rng, (64, width), fp8.VALUES), on_grid(rng, (width, experts, hidden), fp8.VALUES)
    dy_SF, expert_S = on_grid(rng, (64, hidden), fp8.GRADIENTS), np.repeat(np.arange(experts), loads)
    scale_E = 2.0 ** np.arange(-3, 2).astype(np.float32)
    rows = [float8.Quantized(a.at[assignment_R].get(mode="fill", fill_value=0), jnp.float32(s)) for a, s in ((x_SD, 4), (dy_SF, 0.5))]
    w = float8.Quantized(w_DEF, jnp.asarray(scale_E))
    x, dy, exact = (np.asarray(a, np.float32) for a in (x_SD, dy_SF, w_DEF))
    exact = exact * scale_E[:, None]
    found = float8.matmul(kernel, rows[0], w, load_E)[row_A]
    np.testing.assert_array_equal(found, jnp.asarray(4 * np.einsum("sd,dsf->sf", x, exact[:, expert_S])).astype(jnp.bfloat16))
    found = float8.matmul(kernel, rows[1], w, load_E, transposed=True)[row_A]
    np.testing.assert_array_equal(found, jnp.asarray(0.5 * np.einsum("sf,dsf->sd", dy, exact[:, expert_S])).astype(jnp.bfloat16))
    wanted = 2 * np.stack([x[expert_S == e].T @ dy[expert_S == e] for e in range(experts)], 1)
    np.testing.assert_array_equal(float8.outer(kernel, *rows, load_E, jnp.dtype("float32")), wanted)
