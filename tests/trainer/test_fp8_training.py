"""Training with 8-bit products: as good as bfloat16 within the noise of seeds, the same on every mesh, resumed bitwise, and skipped when
not finite."""

from __future__ import annotations

import argparse
import ast
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ridgeline.configs.schema import CheckpointConfig, Config
from ridgeline.models.matmul import fp8
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer
from ridgeline.trainer.prepare import Prepared, prepare
from tests.sampling import drawn

pytestmark = pytest.mark.xdist_group("fp8-training")  # the steps are compiled once
MODEL = {"vocab_size": 256, "num_layers": 2, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
MODEL |= {"mlp_dim": 64, "max_seq_len": 32}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
ROWS, LENGTH, STEPS, TAIL, SEEDS = 8, 32, 100, 30, (0, 1, 2)
EXPERTS = MODEL | {"moe": {"experts": 4, "experts_per_token": 2, "expert_dim": 32}}
TEXT = np.frombuffer(b"".join(Path(str(module.__file__)).read_bytes() for module in (argparse, ast)), np.uint8).astype(np.int32)


def batch(seed: int, step: int) -> dict[str, np.ndarray]:
    """[rows, length] of bytes of the standard library, from places drawn for this seed and step."""
    starts = np.random.default_rng((seed, step)).integers(0, len(TEXT) - LENGTH - 1, ROWS)
    rows = TEXT[starts[:, None] + np.arange(LENGTH + 1)]
    return {
        "tokens": rows[:, :-1],
        "targets": rows[:, 1:],
        "weights": np.ones((ROWS, LENGTH), np.float32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)),
        "segment_ids": np.ones((ROWS, LENGTH), np.int32),
    }


@cache
def run_of(matmul: str, mesh: tuple[tuple[str, int], ...] = (), accumulation: int = 1, exchange: str | None = None) -> tuple[Prepared, Any]:
    """A run on as many devices as its mesh needs, and its step, which leaves the state it is given alone; `exchange`: of experts."""
    config = Config.model_validate(
        {
            "model": EXPERTS if exchange else MODEL,
            "compute": {"experts": {"exchange": exchange or "auto"}},
            "precision": {"compute": "bfloat16", "matmul": matmul, "amax_history": 4},
            "data": {"batch_size": ROWS, "seq_len": LENGTH},
            "mesh": {"fsdp": 1} | dict(mesh),
            "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
            "schedule": {"kind": "constant", "warmup_steps": 10},
            "trainer": {"steps": STEPS, "accumulation": accumulation},
        }
    )
    parts = prepare(config, jax.devices()[: int(np.prod(list(config.mesh.sizes.values())))])
    quick = QUICK if mesh else None  # on one device many steps are taken: there machine code is worth its time
    return parts, jax.jit(lambda state, given: parts.train_step(state, given), compiler_options=quick)


@cache
def initial(seed: int, experts: bool) -> Any:
    """Parameters of a seed, on the host."""
    return jax.tree.map(np.asarray, build(experts)(jax.random.key(seed)))


@cache
def build(experts: bool) -> Any:
    return jax.jit(run_of("compute", exchange="gather" if experts else None)[0].spec.build)


def train(run: tuple[Prepared, Any], steps: range, state: Any = None, seed: int = 0, spoil: bool = False) -> tuple[Any, np.ndarray]:
    """Take steps of a run and return its state and losses; `spoil`: with weights that make the loss infinite."""
    parts, step = run
    if state is None:
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parts.abstract)
        params = initial(seed, "router" in str(jax.tree.structure(zeros.params)))
        state = jax.device_put(replace(zeros, params=params), jax.tree.map(lambda leaf: leaf.sharding, parts.abstract))
    losses = []
    for index in steps:
        given = batch(seed, index)
        if spoil:
            given["weights"] = np.full_like(given["weights"], np.inf)
        state, metrics = step(state, jax.device_put(given, parts.partitioner.batch_sharding()))
        losses.append(metrics["loss"])
    return state, np.array([float(loss) for loss in losses])


def tails(run: tuple[Prepared, Any]) -> np.ndarray:
    """Mean loss of the last steps, per seed of parameters and data."""
    return np.array([np.mean(train(run, range(STEPS), seed=seed)[1][-TAIL:]) for seed in SEEDS])


@cache
def reference(exchange: str | None = None) -> np.ndarray:
    return tails(run_of("compute", exchange=exchange))


def excess(run: tuple[Prepared, Any], exchange: str | None = None) -> float:
    """Loss above bfloat16 from the same seeds, in standard deviations of bfloat16's own over seeds; infinite where not finite."""
    found, wanted = tails(run), reference(exchange)
    return float(np.mean(found - wanted) / np.std(wanted, ddof=1)) if np.isfinite(found).all() else np.inf


@pytest.mark.parametrize(
    ("matmul", "exchange"), drawn([("fp8", None), ("fp8_delayed", None), ("mxfp8", None), ("nvfp4", None), ("fp8", "gather")], 1)
)
def test_narrow_products_learn_as_well_as_16_bit_ones(matmul: str, exchange: str | None) -> None:
    """With an exchange: of a model with experts."""
    assert abs(excess(run_of(matmul, exchange=exchange), exchange)) < (1.0 if matmul == "nvfp4" else 0.5)


def test_the_comparison_finds_gradients_that_are_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(x: jax.Array, *_: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.clip(x.astype(jnp.float32), -448, 448).astype(fp8.VALUES), jnp.float32(1)

    monkeypatch.setattr(fp8, "quantize", unscaled)
    assert excess(run_of.__wrapped__("fp8")) > 1.0


def test_every_mesh_and_microbatch_gives_the_losses_and_magnitudes_of_one_device() -> None:
    steps, mesh = range(8), (("data", 2), ("fsdp", 2), ("tensor", 2))
    one, losses = train(run_of("fp8_delayed"), steps)
    state, found = train(run_of("fp8_delayed", mesh, accumulation=2), steps)
    np.testing.assert_allclose(found, losses, rtol=3e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.25), state.amax, one.amax)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.amax))


@pytest.mark.parametrize("exchange", drawn(["gather", "all_to_all"], 1))
def test_experts_in_float8_give_the_losses_of_one_device(exchange: str) -> None:
    steps, mesh = range(8), (("data", 2), ("expert", 2), ("tensor", 2))
    _, losses = train(run_of("fp8", exchange="gather"), steps)
    _, found = train(run_of("fp8", mesh, accumulation=2, exchange=exchange), steps)
    np.testing.assert_allclose(found, losses, rtol=3e-3)


@pytest.mark.parametrize("matmul", drawn(["mxfp8", "nvfp4"], 1))
def test_block_scaled_products_give_the_losses_of_one_device_where_rows_and_parameters_are_cut(matmul: str) -> None:
    steps, mesh = range(8), (("data", 2), ("fsdp", 2))
    _, losses = train(run_of(matmul), steps)
    _, found = train(run_of(matmul, mesh, accumulation=2), steps)
    np.testing.assert_allclose(found, losses, rtol=3e-3)


def test_magnitudes_are_the_newest_first_and_resume_bitwise(tmp_path: Path) -> None:
    run = run_of("fp8_delayed")
    early, _ = train(run, range(5))
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    checkpointer.save(5, early, {"kind": "train"}, block=True)
    straight, losses = train(run, range(5, 8), early)
    restored, _ = checkpointer.restore(run[0].abstract)
    checkpointer.close()
    resumed, again = train(run, range(5, 8), restored)
    np.testing.assert_array_equal(again, losses)
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    for old, new in zip(jax.tree.leaves(early.amax), jax.tree.leaves(straight.amax), strict=True):
        np.testing.assert_array_equal(np.asarray(new)[..., 3], np.asarray(old)[..., 0])
        assert new.shape[::2] == (2, 4) and (np.asarray(new) > 0).all()


def test_a_step_that_is_skipped_leaves_the_magnitudes_as_they_were() -> None:
    run = run_of("fp8_delayed")
    before, _ = train(run, range(3))
    after, losses = train(run, range(3, 4), before, spoil=True)
    assert not np.isfinite(losses).any() and int(after.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, (after.amax, after.params), (before.amax, before.params))


def test_magnitudes_are_no_parameters() -> None:
    parts = run_of("fp8_delayed")[0]
    assert jax.tree.structure(parts.abstract.params) == jax.tree.structure(run_of("fp8")[0].abstract.params)
    assert jax.tree.leaves(run_of("fp8")[0].abstract.amax) == []
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(parts.abstract.amax))
    assert shapes == [(2, 2, 4), (2, 2, 4), (2, 3, 4), (2, 4, 4)], "of each input, and of the gradients of the products that share it"
