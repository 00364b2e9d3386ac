"""The kernel that computes the activation of experts backward, against autodiff of the function in float32."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ridgeline.configs.load import load
from ridgeline.models.activation import ACTIVATIONS, ExpertActivation
from ridgeline.models.parallelize import parallelize
from ridgeline.planner.experts import activates_in_place
from ridgeline.sharding.partition import Partitioner
from tests.models import tiny
from tests.models.test_moe import MOE, ON_MESH, layer_and_input
from tests.sampling import seed

NAMES = sorted(set(ACTIVATIONS) - {"gelu"})
"""Those of which GPUs have a kernel."""


def of_rows(activation: ExpertActivation, weight_R: jax.Array, *wide_RF: jax.Array) -> jax.Array:
    """Weighted hidden values, from the definition."""
    act, clamp, weight_R1 = ACTIVATIONS[activation.name], activation.clamp, weight_R[:, None]
    up_RF, *gate_RF = [h_RF * weight_R1 for h_RF in wide_RF] if activation.scale_input else wide_RF
    if not gate_RF:
        hidden_RF = act(up_RF)
    elif clamp is None:
        hidden_RF = act(gate_RF[0]) * up_RF
    else:
        hidden_RF = act(jnp.minimum(gate_RF[0], clamp)) * (jnp.clip(up_RF, -clamp, clamp) + 1)
    return hidden_RF if activation.scale_input else hidden_RF * weight_R1


@pytest.mark.parametrize("number", range(12))
def test_gradients_equal_autodiff_for_any_rows_columns_and_activation(number: int) -> None:
    """Rows and columns are no multiples of the kernel's tile; half of the weights are 0, as those of empty rows."""
    rng = random.Random(f"{seed()} activation {number}")
    rows, columns, gates = rng.randrange(1, 40), rng.choice([1, 17, 176, 256, 300, 520]), rng.randrange(2)
    name = NAMES[number % len(NAMES)] if number % 5 else "gelu"
    clamp = rng.choice([None, 0.7]) if gates else None
    activation = ExpertActivation(name, clamp, scale_input=bool(number % 2), in_place=True, interpret=True)
    values = np.random.default_rng(rng.randrange(2**32))
    wide = tuple(jnp.asarray(values.normal(size=(rows, columns)), jnp.bfloat16) for _ in range(1 + gates))
    dresult = jnp.asarray(values.normal(size=(rows, columns)), jnp.bfloat16)
    weight = jnp.asarray(values.random(rows) * values.integers(0, 2, rows), jnp.float32)
    weighted = activation.scale_input or rng.random() < 0.5
    *exact, dexact = [each.astype(jnp.float32) for each in (*wide, dresult)]
    result, pull = jax.vjp(partial(of_rows, activation), weight, *exact)
    dweight, *dwide = pull(dexact)
    hidden = result if activation.scale_input else of_rows(activation, jnp.ones(rows), *exact)
    expected = (*dwide, result if weighted else hidden)
    np.testing.assert_allclose(activation(exact, weight[:, None]), hidden, rtol=1e-5, atol=1e-6)
    for each in (activation, replace(activation, in_place=False)):
        found = each.gradients(tuple(exact), dexact, weight, weighted=weighted)
        for one, other in zip((*found.wide_RF, found.hidden_RF, found.weight_R), (*expected, dweight), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * columns**0.5)
    # of bfloat16 arrays the kernel rounds once, when it writes; sums over columns are not rounded
    found = activation.gradients(wide, dresult, weight, weighted=weighted)
    for one, other in zip((*found.wide_RF, found.hidden_RF), expected, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=2**-7, atol=1e-5)
    assert found.weight_R.dtype == jnp.float32
    np.testing.assert_allclose(found.weight_R, dweight, rtol=1e-4, atol=1e-5 * columns**0.5)


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_activation_has_a_kernel_for_gpus_that_writes_to_its_inputs(name: str, scale_input: bool) -> None:
    activation = ExpertActivation(name, scale_input=scale_input, in_place=True)
    array = jax.ShapeDtypeStruct((128, 176), jnp.bfloat16)
    step = jax.jit(partial(activation.gradients, weighted=True))
    text = step.trace((array, array), array, jax.ShapeDtypeStruct((128,), jnp.float32)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("expert_activation_gradient") > 0
    aliases = re.findall(r"output_tuple_indices = \[(\d)\],\s*operand_index = (\d)", text)
    assert sorted((int(operand), int(result)) for result, operand in aliases) == [(1, 0), (2, 1), (3, 2)]


@pytest.mark.parametrize(
    ("moe", "factor", "mesh"),
    [
        (MOE, None, None),
        (MOE | {"scale_input": True}, 1.1, None),
        (ON_MESH, None, {"fsdp": 2, "tensor": 2, "expert": 2}),
        (ON_MESH | {"scale_input": True}, None, {"fsdp": 2, "tensor": 2, "expert": 2}),
    ],
)
def test_a_layer_has_the_same_gradients_with_the_kernel(moe: dict[str, Any], factor: float | None, mesh: dict[str, int] | None) -> None:
    layer, x_BTD = layer_and_input(moe, factor, mesh)
    dy_BTD = jax.random.normal(jax.random.key(2), x_BTD.shape)
    structure, state = nnx.split(layer)

    def gradients(in_place: bool) -> Any:
        def product(params: Any, x_BTD: jax.Array) -> jax.Array:
            layer = nnx.merge(structure, params)
            experts = layer.execution.experts
            activation = replace(experts.activation, in_place=in_place, interpret=True)
            layer.execution = replace(layer.execution, experts=replace(experts, activation=activation))
            return jnp.sum(layer(x_BTD, lambda x: x) * dy_BTD)

        run = jax.jit(jax.grad(product, (0, 1)), compiler_options=tiny.QUICK_COMPILE)
        assert ("expert_activation_gradient" in str(run.trace(state, x_BTD).jaxpr)) == in_place
        return jax.tree.leaves(run(state, x_BTD))

    for one, other in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()) + 1e-7)


MODELS = ["qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b", "llama-4-scout-17b-16e"]


@pytest.mark.parametrize(("matmul", "activation"), [("compute", "silu"), ("compute", "gelu"), ("fp8", "silu"), ("fp8_delayed", "silu")])
@pytest.mark.parametrize("model", MODELS)
def test_gpus_use_the_kernel_exactly_where_the_plan_counts_with_it(
    monkeypatch: pytest.MonkeyPatch, model: str, matmul: str, activation: str
) -> None:
    config = load(f"models/{model}", [f"precision.matmul={matmul}", f"model.activation={activation}"]).config
    wanted = "gpt-oss" not in model and activation == "silu" and matmul == "compute"
    assert activates_in_place(config.model, config.precision) == wanted
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(sys.modules[parallelize.__module__], "platform_of", lambda _, platform=platform: platform)
        execution = parallelize(config.model, config.compute, config.precision, Partitioner.single())
        assert execution.experts is not None
        assert execution.experts.activation.in_place == (wanted and platform == "gpu")
