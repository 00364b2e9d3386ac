"""Collective matmuls over tensor: the losses and gradients of all-gather and reduce-scatter, with exactly the planned permutes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal, jaxprs_in_params

from ridgeline.configs.schema import Config, RematConfig
from ridgeline.hlo.collectives import collectives
from ridgeline.hlo.parse import parse
from ridgeline.planner.collectives import as_compiled_for_cpu, planned_collectives
from ridgeline.trainer.step import make_train_step, to_global
from tests.sharding import test_collective_budget as budgets
from tests.sharding.test_equality import compare, make_batch, make_config, prepared, reference, run

PERMUTE = "collective-permute"


pytestmark = pytest.mark.usefixtures("quick_compile")


def collective(config: Config, policy: str = "none") -> Config:
    return config.model_copy(
        update={"compute": config.compute.model_copy(update={"tensor_overlap": "ring", "remat": RematConfig(policy=policy)})}
    )


MODEL = {"attention_bias": True, "mlp_bias": True, "output_bias": True, "qk_norm": True, "num_kv_heads": 4}
WINDOWED = {"sliding_window": 5, "full_attention_every": 2, "num_layers": 4}


@pytest.mark.parametrize(("mesh", "policy", "accumulation"), [((2, 2, 2), "none", 2), ((1, 2, 4), "full", 1)], ids=str)
def test_losses_and_gradients_equal_one_device(mesh: tuple[int, int, int], policy: str, accumulation: int) -> None:
    compare(run(collective(make_config(*mesh, accumulation=accumulation, **MODEL), policy), jax.devices()), reference(**MODEL))


def test_losses_and_gradients_of_layers_with_and_without_a_window_equal_one_device() -> None:
    compare(run(collective(make_config(1, 2, 4, **WINDOWED), "none"), jax.devices()), reference(**WINDOWED))


@pytest.mark.parametrize(("model", "scan"), [({}, True), (WINDOWED, True), ({}, False)])
def test_zeros_that_chunks_are_written_into_wait_for_their_layer(model: dict[str, Any], scan: bool) -> None:
    """XLA would fill those of all layers at once."""
    config = collective(make_config(1, 1, 4, **model))
    config = config.model_copy(update={"compute": config.compute.model_copy(update={"scan_layers": scan})})
    partitioner, spec, optimizer, abstract = prepared(config, jax.devices()[:4])
    step = make_train_step(spec, config, optimizer, lambda _: jnp.float32(1e-3), partitioner)
    started = list(chunk_buffers(jax.make_jaxpr(step)(abstract, to_global(make_batch(0), partitioner)).jaxpr))
    assert len(started) >= 6
    assert set(started) == {False}


def chunk_buffers(jaxpr: Any) -> Iterator[bool]:
    """Of each array that chunks of a sequence are written into, whether its first value is a constant."""
    made = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            yield from chunk_buffers(inner)
        before = made.get(eqn.invars[0]) if eqn.primitive.name == "dynamic_update_slice" else None
        if before is not None and before.primitive.name == "broadcast_in_dim":
            yield isinstance(before.invars[0], Literal)


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
