"""The mixture of experts: router, dispatch and grouped matmuls against a direct computation, expert by expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ridgeline.configs.schema import LossConfig, MoEConfig
from ridgeline.models.moe.experts import _plan
from ridgeline.models.moe.grouped_matmul import Blocks, Capacity, Ragged
from ridgeline.models.moe.router import Choice, RouterTotals, balanced_bias, choose, sums_of
from ridgeline.sharding.partition import Partitioner
from tests.models import tiny

ROWS, LENGTH = 2, 12


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


@pytest.mark.parametrize("kernel", [Ragged(), Capacity(0.5), Capacity(3.0), Blocks(16)])
def test_a_plan_places_every_assignment_once_or_drops_it(kernel: Any) -> None:
    for seed in range(5):
        expert_A = np.random.default_rng(seed).integers(0, 5, 40) ** 2 // 4  # loads differ
        plan = jax.tree.map(np.asarray, _plan(kernel, jnp.asarray(expert_A), 5, 40))
        rows, starts = kernel.rows(40, 5), np.asarray(kernel.starts(jnp.asarray(np.bincount(expert_A, minlength=5)), 40))
        kept = plan.row_A < rows
        np.testing.assert_array_equal(plan.load_E, np.minimum(np.bincount(expert_A, minlength=5), kernel.limit(40, 5)))
        assert kept.sum() == plan.load_E.sum() == (plan.assignment_R < 40).sum()
        for assignment in np.flatnonzero(kept):
            row, expert = plan.row_A[assignment], expert_A[assignment]
            assert plan.assignment_R[row] == assignment
            assert starts[expert] <= row < starts[expert] + plan.load_E[expert]
        for expert in range(5):  # the last tokens are dropped
            mine = kept[expert_A == expert]
            assert mine.tolist() == sorted(mine, reverse=True)


@pytest.mark.parametrize("loads", [[5, 0, 20, 39, 0], [0, 0, 0, 64, 0], [16, 16, 16, 0, 16]])
def test_the_pallas_kernels_multiply_each_row_with_the_matrix_of_its_expert(loads: list[int]) -> None:
    kernel, rng, width, hidden = Blocks(16, interpret=True), np.random.default_rng(0), 64, 128
    plan = _plan(kernel, jnp.repeat(jnp.arange(5), np.array(loads), total_repeat_length=64), 5, 64)
    x_SD, w_DEF, y_SF = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((64, width), (width, 5, hidden), (64, hidden)))
    expert_S = np.repeat(np.arange(5), loads)
    x_RD, y_RF = (a.at[plan.assignment_R].get(mode="fill", fill_value=0) for a in (x_SD, y_SF))
    found = kernel.matmul(x_RD, w_DEF, plan.load_E)[plan.row_A]
    np.testing.assert_allclose(found, np.einsum("sd,dsf->sf", x_SD, w_DEF[:, expert_S]), atol=1e-4)
    found = kernel.matmul(y_RF, w_DEF, plan.load_E, transposed=True)[plan.row_A]
    np.testing.assert_allclose(found, np.einsum("sf,dsf->sd", y_SF, w_DEF[:, expert_S]), atol=1e-4)
    wanted = np.stack([np.asarray(x_SD)[expert_S == e].T @ np.asarray(y_SF)[expert_S == e] for e in range(5)], 1)
    np.testing.assert_allclose(kernel.outer(x_RD, y_RF, plan.load_E, jnp.dtype("float32")), wanted, atol=1e-4)


MOE = {"experts": 6, "experts_per_token": 2, "expert_dim": 20, "shared_experts": 1}


def layer_and_input(moe: dict[str, Any], capacity: float | None = None) -> tuple[Any, jax.Array]:
    model = tiny.ModelConfig(**{**tiny.BASE, "num_layers": 1, "moe": moe})
    decoder = tiny.build(model, tiny.ComputeConfig.model_validate({"experts": {"capacity_factor": capacity}}))
    structure, stacked = nnx.split(decoder.blocks.mlp)
    layer = nnx.merge(structure, jax.tree.map(lambda leaf: 8 * leaf[0], stacked))
    return layer, jax.random.normal(jax.random.key(1), (ROWS, LENGTH, model.embed_dim))


def direct_layer(params: Any, moe: MoEConfig, x_BTD: jax.Array, kept_BTK: jax.Array | None = None) -> jax.Array:
    """Every expert processes every token; those that were not chosen count with weight 0."""
    choice, _ = choose(Partitioner.single(), moe, x_BTD @ params["router"], None)
    weights = choice.weights_BTK if kept_BTK is None else choice.weights_BTK * kept_BTK
    weight_BTE = jnp.sum(jax.nn.one_hot(choice.experts_BTK, moe.experts) * weights[..., None], 2)

    def mlp(gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return (jax.nn.silu(x_BTD @ gate) * (x_BTD @ up)) @ down

    each = jax.vmap(mlp, 1)(params["gate"], params["up"], params["down"].transpose(2, 1, 0))
    return jnp.einsum("ebtd,bte->btd", each, weight_BTE) + mlp(*(params["shared"][name] for name in ("gate", "up", "down")))


@pytest.mark.parametrize("capacity", [None, 0.6])
def test_layer_and_gradients_equal_a_direct_computation(capacity: float | None) -> None:
    moe = MoEConfig(**MOE)
    layer, x_BTD = layer_and_input(MOE, capacity)
    structure, state = nnx.split(layer)
    dy_BTD = jax.random.normal(jax.random.key(2), x_BTD.shape)
    kept_BTK = None
    if capacity is not None:
        choice, _ = choose(Partitioner.single(), moe, x_BTD @ layer.router[...], None)
        plan = _plan(Capacity(capacity), choice.experts_BTK.reshape(-1), moe.experts, choice.experts_BTK.size)
        kept_BTK = (plan.row_A < plan.assignment_R.shape[0]).reshape(choice.experts_BTK.shape).astype(jnp.float32)
        assert 0 < kept_BTK.mean() < 1

    def ours(params: Any, x_BTD: jax.Array) -> tuple[jax.Array, Any]:
        layer = nnx.merge(structure, params)
        update = layer(x_BTD, lambda x: x)
        return jnp.sum(update * dy_BTD), (update, layer.sums.get_raw_value().dropped)

    def theirs(params: Any, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        update = direct_layer(params, moe, x_BTD, kept_BTK)
        return jnp.sum(update * dy_BTD), update

    quick = {"compiler_options": tiny.QUICK_COMPILE}
    (_, (found, dropped)), grads = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True), **quick)(state, x_BTD)
    (_, expected), wanted = jax.jit(jax.value_and_grad(theirs, (0, 1), has_aux=True), **quick)(nnx.to_pure_dict(state), x_BTD)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert float(dropped.sum()) == (0 if kept_BTK is None else float((1 - kept_BTK).sum()))
    for one, other in zip(jax.tree.leaves((nnx.to_pure_dict(grads[0]), grads[1])), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()) + 1e-7)


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
