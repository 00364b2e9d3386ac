"""Collective matmuls over tensor: the losses and gradients of all-gather and reduce-scatter, with exactly the planned permutes."""

from __future__ import annotations

import jax
import pytest

from ridgeline.configs.schema import Config, RematConfig
from ridgeline.hlo.collectives import collectives
from ridgeline.hlo.parse import parse
from ridgeline.planner.collectives import as_compiled_for_cpu, planned_collectives
from tests.sharding import test_collective_budget as budgets
from tests.sharding.test_equality import compare, make_config, reference, run

PERMUTE = "collective-permute"


pytestmark = pytest.mark.usefixtures("quick_compile")


def collective(config: Config, policy: str = "none") -> Config:
    return config.model_copy(
        update={"compute": config.compute.model_copy(update={"tensor_overlap": "ring", "remat": RematConfig(policy=policy)})}
    )


MODEL = {"attention_bias": True, "mlp_bias": True, "output_bias": True, "qk_norm": True, "num_kv_heads": 4}


@pytest.mark.parametrize(("mesh", "policy", "accumulation"), [((2, 2, 2), "none", 2), ((1, 2, 4), "full", 1)], ids=str)
def test_losses_and_gradients_equal_one_device(mesh: tuple[int, int, int], policy: str, accumulation: int) -> None:
    compare(run(collective(make_config(*mesh, accumulation=accumulation, **MODEL), policy), jax.devices()), reference(**MODEL))


@pytest.mark.parametrize(("mesh", "policy"), [((1, 2, 4), "none"), ((2, 2, 2), "full"), ((1, 2, 4), "dots")], ids=str)
def test_the_compiled_gradient_has_the_planned_permutes_and_no_other_collective_of_the_residual_stream(
    mesh: tuple[int, int, int], policy: str
) -> None:
    # float16: in float32 CPUs save matmul inputs that GPUs recompute, and bfloat16 is widened before it is communicated
    config = collective(budgets.make_config(*mesh, compute="float16"), policy)
    text, shape = budgets.compile_gradient(config)
    found = [c for c in collectives(parse(text), shape) if budgets.array_bytes(c)]
    planned = [as_compiled_for_cpu(item) for item in planned_collectives(config, shape)]
    assert budgets.budget(((c.kind, c.axes), budgets.array_bytes(c) * c.count) for c in found) == budgets.budget(
        ((item.kind, item.axes), item.bytes * item.count) for item in planned
    )
    in_layers = [c for c in found if c.kind == PERMUTE]
    assert in_layers and all(c.axes == ("tensor",) and c.count == budgets.LAYERS for c in in_layers)
