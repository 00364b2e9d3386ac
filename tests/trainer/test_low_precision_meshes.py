"""Narrow state on meshes: bfloat16 masters rounded stochastically, moments in 8 bits: one run, whatever the mesh, however often resumed."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from ridgeline.configs.rules import check_config
from ridgeline.configs.schema import Config
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.schedules import build_schedule
from ridgeline.trainer.state import abstract_state, init_state, model_spec
from ridgeline.trainer.step import make_train_step
from tests.sampling import drawn

ROWS, LENGTH, VOCAB, STEPS = 8, 16, 64, 3
MESHES = {
    "one device": {},
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tensor": {"tensor": 2},
    "mixed": {"data": 2, "fsdp": 2, "tensor": 2},
}
NARROW = {"compute": "float32", "params": "bfloat16", "stochastic_rounding": True, "moments": "int8"}
pytestmark = pytest.mark.xdist_group("narrow")  # the steps are compiled once


def make_config(mlp_dim: int = 256, kind: str = "adamw", **precision: Any) -> Config:
    model = {"vocab_size": VOCAB, "num_layers": 2, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": LENGTH}
    return Config.model_validate(
        {
            "model": {**model, "mlp_dim": mlp_dim},
            "precision": {**NARROW, **precision},
            "data": {"batch_size": ROWS, "seq_len": LENGTH},
            "optimizer": {"learning_rate": 3e-3, "kind": kind},
            "trainer": {"steps": 20},
        }
    )


class Run:
    """A mesh with its compiled step."""

    def __init__(self, config: Config, mesh: dict[str, int]) -> None:
        config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"fsdp": 1, **mesh})})
        devices = int(np.prod([size for axis, size in mesh.items() if axis != "zero_stage"], dtype=int))
        self.partitioner = Partitioner.of(build_mesh(config.mesh, jax.devices()[:devices]), config)
        self.spec = model_spec(config, self.partitioner)
        self.optimizer = build_optimizer(config.optimizer, config.precision, self.spec.param_axes, self.partitioner)
        self.abstract = abstract_state(config, self.spec, self.optimizer, self.partitioner)
        self.config = config
        schedule = build_schedule(config.schedule, config.optimizer.learning_rate, config.trainer.steps)
        step = make_train_step(self.spec, config, self.optimizer, schedule, self.partitioner)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        self._step = jax.jit(
            step, donate_argnums=0, out_shardings=(shardings, None), compiler_options={"xla_backend_optimization_level": 0}
        )

    def fresh(self) -> Any:
        """The same first state on every mesh; made once."""
        return jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), first_state(), self.abstract)

    def batch(self, seed: int) -> dict[str, jax.Array]:
        tokens = np.random.default_rng(seed).integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
        batch = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": np.ones((ROWS, LENGTH), np.float32),
            "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)),
            "segment_ids": np.ones((ROWS, LENGTH), np.int32),
        }
        return {name: jax.device_put(x, self.partitioner.batch_sharding()) for name, x in batch.items()}

    def advance(self, state: Any, first: int, last: int) -> tuple[Any, list[float]]:
        losses = []
        for number in range(first, last):
            state, metrics = self._step(state, self.batch(number))
            losses.append(float(metrics["loss"]))
        return state, losses


@cache
def run(name: str) -> Run:
    return Run(make_config(), MESHES[name])


@cache
def first_state() -> Any:
    alone = run("one device")
    return jax.device_get(init_state(alone.config, alone.spec, alone.optimizer, alone.abstract))


@cache
def trained(name: str) -> tuple[Any, list[float]]:
    """Host copies of the state after STEPS steps, and the losses."""
    state, losses = run(name).advance(run(name).fresh(), 0, STEPS)
    return jax.device_get(state), losses


def optimizer_arrays(tree: Any) -> dict[str, Any]:
    """Codes and scales by kind and parameter."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    return {name: leaf for name, leaf in named.items() if ".code" in name or ".scale" in name}


@pytest.mark.parametrize("mesh", drawn([name for name in MESHES if name != "one device"], 1))
def test_a_mesh_changes_neither_losses_nor_draws(mesh: str) -> None:
    """Only the order of sums differs: it moves a value across its draw now and then. Other draws would move every second parameter."""
    (alone, alone_losses), (state, losses) = trained("one device"), trained(mesh)
    np.testing.assert_allclose(losses, alone_losses, rtol=2e-4)
    for one, other in ((alone.params, state.params), (optimizer_arrays(alone.opt_state), optimizer_arrays(state.opt_state))):
        pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
        narrow = [(a, b) for a, b in pairs if a.dtype != np.float32]
        assert narrow
        equal, total = sum((a == b).sum() for a, b in narrow), sum(a.size for a, _ in narrow)
        assert equal / total > 0.97


def test_a_resumed_run_is_bitwise_the_one_that_went_on(checkpointer: Any, assert_bitwise_equal: Any) -> None:
    runs = run("mixed")
    state, _ = runs.advance(runs.fresh(), 0, 2)
    with_checkpoints = checkpointer()
    with_checkpoints.save(2, state, {}, block=True)
    restored, _ = with_checkpoints.restore(runs.abstract)
    assert_bitwise_equal(restored, state)
    elsewhere, _ = with_checkpoints.restore(run("fsdp").abstract)
    assert_bitwise_equal(jax.device_get(elsewhere), jax.device_get(state))
    assert all(a.sharding == b.sharding for a, b in zip(jax.tree.leaves(elsewhere), jax.tree.leaves(run("fsdp").abstract), strict=True))
    with_checkpoints.close()
    went_on, losses = runs.advance(state, 2, STEPS)
    again, losses_again = runs.advance(restored, 2, STEPS)
    assert losses == losses_again
    assert_bitwise_equal(again, went_on)
    _, moved = run("fsdp").advance(elsewhere, 2, STEPS)
    np.testing.assert_allclose(moved, losses, rtol=2e-4)


@pytest.mark.parametrize("mesh", ["fsdp", "tensor", "mixed"])
def test_codes_and_scales_are_cut_as_their_parameters(mesh: str) -> None:
    runs = run(mesh)
    params = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(runs.abstract.params)}
    found = optimizer_arrays(runs.abstract.opt_state)
    assert len(found) == 2 * 2 * 7, "mu and nu, codes and scales, of seven matrices"
    for name, leaf in found.items():
        param = next(params[path] for path in params if name.endswith(path))
        assert leaf.sharding.spec == param.sharding.spec, name
        if ".code" in name:
            assert (leaf.dtype, leaf.shape) in ((jnp.int8, param.shape), (jnp.uint8, param.shape))


def test_scales_of_a_block_that_spans_devices_are_whole_on_each() -> None:
    """A hidden width of 48 is one block; tensor=2 cuts it, so only the other dims of its scales are cut."""
    odd = Run(make_config(mlp_dim=48), MESHES["mixed"])
    gates = {name: leaf for name, leaf in optimizer_arrays(odd.abstract.opt_state).items() if ".scale" in name and "gate" in name}
    assert [(leaf.shape, tuple(leaf.sharding.spec)) for leaf in gates.values()] == [((2, 32, 1), ("pipeline", "fsdp", None))] * 2


def test_the_state_is_updated_in_place() -> None:
    runs = run("mixed")
    state = runs.fresh()
    runs.advance(state, 0, 1)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2}, {"data": 4}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_an_update_over_data_computes_nothing_of_a_parameters_size_before_the_microbatches(mesh: dict[str, int]) -> None:
    """What depends on the state alone may be computed at any time, and XLA chose the beginning: it was kept through all microbatches."""
    config = make_config()
    two = config.trainer.model_copy(update={"accumulation": 2})
    runs = Run(config.model_copy(update={"trainer": two}), {**mesh, "zero_stage": 2})
    step = make_train_step(runs.spec, runs.config, runs.optimizer, lambda _: jnp.float32(1e-3), runs.partitioner)
    traced = jax.make_jaxpr(step)(runs.abstract, runs.batch(0)).jaxpr
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(runs.abstract)]
    of_state = {x for name, x in zip(names, traced.invars, strict=False) if name.startswith((".opt_state", ".rng"))}
    (loop,) = [at for at, eqn in enumerate(traced.eqns) if eqn.primitive.name == "while"]
    read = [{x for x in eqn.invars if not isinstance(x, Literal)} for eqn in traced.eqns]
    after = set(traced.eqns[loop].outvars)
    for eqn, inputs in zip(traced.eqns, read, strict=True):
        after |= {*eqn.outvars} if after & inputs else set()
        of_state |= {*eqn.outvars} if of_state & inputs else set()
    smallest = min(leaf.size for leaf in jax.tree.leaves(runs.abstract.params) if leaf.ndim > 2)
    large = {x for eqn in traced.eqns for x in eqn.outvars if x.aval.size >= smallest}
    assert len(of_state & after & large) > 100
    found = [eqn.primitive.name for eqn in traced.eqns if (of_state - after) & large & {*eqn.outvars}]
    assert not found


def test_muon_takes_bfloat16_and_names_the_setting_for_8_bits() -> None:
    (problem,) = check_config(make_config(kind="muon"))
    assert problem.keys[0] == "precision.moments"
    assert "precision.moments=bfloat16" in problem.message and "optimizer.kind=adamw" in problem.message and "\n" not in problem.message
    muon = Run(make_config(kind="muon", moments="bfloat16"), {}).abstract
    momenta = jax.tree.leaves(muon.opt_state[0][0].inner_states["muon"].inner_state)
    assert {leaf.dtype for leaf in (*momenta, *jax.tree.leaves(muon.params)) if leaf.ndim > 1} == {jnp.dtype(jnp.bfloat16)}
