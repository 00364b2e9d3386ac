"""Optimizer state in host memory: the same run as without it, the same checkpoints, and what is refused; the order in which updated
parameters are gathered over data, wherever the state is."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from ridgeline.configs.rules import check_config
from ridgeline.sharding.host import HOST
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.checkpoint import local_part, payload
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.schedules import build_schedule
from ridgeline.trainer.state import TrainState, abstract_state, init_state, model_spec
from ridgeline.trainer.step import make_train_step, to_global
from tests.sampling import drawn
from tests.trainer.test_step import QUICK_COMPILE, make_batch, make_config

CASES: dict[str, dict[str, Any]] = {
    "one device": {
        "optimizer": {"kind": "lion"},
        "precision": {"compute": "float32", "params": "bfloat16", "stochastic_rounding": True},
        "mesh": {"fsdp": 1},
    },
    "sharded": {"precision": {"compute": "float32", "moments": "bfloat16"}, "mesh": {"data": 2, "fsdp": 2, "zero_stage": 2}},
}


class Run:
    """State and step of a case, with or without offloading."""

    def __init__(self, case: str, *, offload: bool) -> None:
        config = make_config(**CASES[case] | {"optimizer": {**CASES[case].get("optimizer", {}), "offload": offload}})
        devices = jax.devices()[: config.mesh.data * config.mesh.fsdp]
        self.partitioner = Partitioner.of(build_mesh(config.mesh, devices), config)
        spec = model_spec(config, self.partitioner)
        optimizer = build_optimizer(config.optimizer, config.precision, spec.trained_axes, self.partitioner)
        schedule = build_schedule(config.schedule, config.optimizer.learning_rate, config.trainer.steps)
        self.abstract: TrainState = abstract_state(config, spec, optimizer, self.partitioner)
        self.first = values(init_state(config, spec, optimizer, self.abstract))
        self._step = jax.jit(
            make_train_step(spec, config, optimizer, schedule, self.partitioner),
            donate_argnums=0,
            out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, self.abstract), None),
            compiler_options=QUICK_COMPILE,
        )

    def state(self, values: dict[str, np.ndarray]) -> TrainState:
        """Return the state with these values, where the run has it."""
        leaves = [jax.device_put(values[name], leaf.sharding) for name, leaf in payload.named_leaves(self.abstract).items()]
        return jax.tree.unflatten(jax.tree.structure(self.abstract), leaves)

    def step(self, state: TrainState, seed: int, weight: float = 1.0) -> tuple[TrainState, float]:
        batch = {name: np.asarray(x) for name, x in make_batch(seed).items()}
        batch["weights"] = batch["weights"] * np.float32(weight)
        state, metrics = self._step(state, to_global(batch, self.partitioner))
        return state, float(metrics["loss"])


@cache
def run(case: str, offload: bool) -> Run:
    return Run(case, offload=offload)


def values(state: TrainState) -> dict[str, np.ndarray]:
    return {name: np.array(leaf) for name, leaf in payload.named_leaves(state).items()}


def check_equal(found: TrainState, wanted: dict[str, np.ndarray]) -> None:
    for name, leaf in values(found).items():
        np.testing.assert_array_equal(leaf, wanted[name], err_msg=name)


@pytest.mark.parametrize("case", drawn(list(CASES), 1))
def test_steps_are_those_without_offloading_and_the_state_stays_in_host_memory_sharded_alike(case: str) -> None:
    plain, offloaded = run(case, offload=False), run(case, offload=True)
    one, other = plain.state(plain.first), offloaded.state(offloaded.first)
    check_equal(other, plain.first)
    for seed in range(3):
        (one, loss), (other, same) = plain.step(one, seed), offloaded.step(other, seed)
        assert same == pytest.approx(loss, rel=1e-6)
    for name, leaf in values(other).items():
        np.testing.assert_allclose(leaf.astype(np.float64), values(one)[name].astype(np.float64), rtol=1e-2, atol=1e-5, err_msg=name)
    for here, there in zip(jax.tree.leaves(one.opt_state), jax.tree.leaves(other.opt_state), strict=True):
        assert there.sharding.memory_kind == (HOST if there.ndim else here.sharding.memory_kind)
        assert there.sharding.spec == here.sharding.spec
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(other.params)} == {"device"}


def test_a_step_that_is_not_finite_changes_neither_parameters_nor_the_state_in_host_memory() -> None:
    offloaded = run("sharded", offload=True)
    state = offloaded.step(offloaded.state(offloaded.first), 1)[0]
    before = values(state)
    state, loss = offloaded.step(state, 2, weight=float("nan"))
    assert not np.isfinite(loss) and int(state.skipped) == 1
    check_equal(state, {**values(state), **{n: v for n, v in before.items() if n.startswith(("params", "opt_state"))}})


def test_checkpoints_are_the_same_with_and_without_offloading_and_not_changed_by_the_next_step(tmp_path: Any) -> None:
    plain, offloaded = run("sharded", offload=False), run("sharded", offload=True)
    state = offloaded.step(offloaded.state(offloaded.first), 3)[0]
    saved, shards = values(state), local_part.host_shards(state)
    writing = payload.save_async(tmp_path / "global", state)
    state = offloaded.step(state, 4)[0]  # overwrites the arrays that are being written
    writing.result()
    local_part.write(tmp_path / "local", shards, {})
    for wanted in (plain.abstract, offloaded.abstract):
        for found in (payload.load(tmp_path / "global", wanted), local_part.read(tmp_path / "local", wanted)):
            check_equal(found, saved)
            kinds = [leaf.sharding == want.sharding for leaf, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)]
            assert all(kinds)
    check_equal(offloaded.step(payload.load(tmp_path / "global", offloaded.abstract), 4)[0], values(state))


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2}, {"data": 4, "fsdp": 1}, {"data": 2, "fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize("offload", [False, True])
def test_updated_parameters_are_gathered_over_data_in_turn(mesh: dict[str, int], offload: bool) -> None:
    """Each waits until the one before the previous one is in its place, and of two that follow each other one is small."""
    config = make_config(
        mesh={**mesh, "zero_stage": 2}, model={"vocab_size": 64}, optimizer={"offload": offload}, precision={"compute": "float32"}
    )
    partitioner = Partitioner.of(build_mesh(config.mesh, jax.devices()[: math.prod(mesh.values())]), config)
    spec = model_spec(config, partitioner)
    optimizer = build_optimizer(config.optimizer, config.precision, spec.trained_axes, partitioner)
    schedule = build_schedule(config.schedule, config.optimizer.learning_rate, config.trainer.steps)
    step = make_train_step(spec, config, optimizer, schedule, partitioner)
    state = abstract_state(config, spec, optimizer, partitioner)
    traced = jax.make_jaxpr(step)(state, to_global(make_batch(), partitioner)).jaxpr

    made = {id(x): eqn for eqn in traced.eqns for x in eqn.outvars}
    params = [x for x, leaf in zip(traced.outvars, jax.tree_util.tree_leaves_with_path(state), strict=False) if "params" in str(leaf[0])]

    def origin(x: Any) -> Any:
        """Return the array that was gathered: the shard, or what the barrier gives of it. None: it is not in a layout of its own."""
        constrained = made[id(x)]
        placed = made.get(id(constrained.invars[0])) if constrained.primitive.name == "sharding_constraint" else None
        if placed is None or placed.primitive.name != "shard_map":
            return None
        gather = made[id(placed.invars[0])]
        assert gather.primitive.name == "sharding_constraint"
        return gather.invars[0]

    # position in the program -> size, and the position of what it waits for
    gathers: dict[int, tuple[int, int | None]] = {}
    for x in params:
        if (shard := origin(x)) is None:
            continue
        whole, before = made[id(x)].invars[0], made[id(shard)]
        waits = before.primitive.name == "optimization_barrier" and traced.eqns.index(made[id(before.invars[1])])
        placed = made[id(before.invars[0])] if before.primitive.name == "optimization_barrier" else before
        assert placed.primitive.name == "shard_map"  # the shard has a layout too
        gathers[traced.eqns.index(made[id(whole)])] = (math.prod(x.aval.shape), waits or None)
    order = sorted(gathers)
    wide = [axes for axes in jax.tree.leaves(spec.trained_axes, is_leaf=lambda x: type(x) is tuple) if "embed" in axes]
    assert len(order) == len(wide) > 6
    assert [gathers[at][1] for at in order] == [None, None, *order[:-2]]
    sizes = [gathers[at][0] for at in order]
    assert sizes[::2] == sorted(sizes, reverse=True)[: len(sizes[::2])] and sizes[1::2] == sorted(sizes)[: len(sizes[1::2])]


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"optimizer": {"kind": "muon"}}, "optimizer.kind"),
        ({"optimizer": {"kind": "adafactor"}}, "optimizer.kind"),
        ({"corruption_check": {"every": 10}}, "corruption_check.every"),
        ({"mesh": {"pipeline": 2, "fsdp": 1}, "model": {"num_layers": 2}, "trainer": {"accumulation": 2}}, "mesh.pipeline"),
    ],
)
def test_what_does_not_work_with_offloading_is_refused_by_name(sections: dict[str, Any], key: str) -> None:
    config = make_config(**sections)
    assert not check_config(config)
    offloaded = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"offload": True})})
    assert [problem.keys for problem in check_config(offloaded)] == [("optimizer.offload", key)]
