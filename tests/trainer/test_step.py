"""The optimizer step: weighting, accumulation, clipping, non-finite steps, determinism."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ridgeline.configs.schema import Config
from ridgeline.hlo.parse import parse
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.schedules import build_schedule
from ridgeline.trainer.state import TrainState, abstract_state, init_state, model_spec
from ridgeline.trainer.step import LOSS_LIMIT, make_evaluation_step, make_train_step, split_rows
from tests.sampling import drawn

ROWS, LENGTH, VOCAB = 8, 16, 61
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
"""These programs run for milliseconds: compiling them well would take longer."""
MODEL = {"vocab_size": VOCAB, "num_layers": 1, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 48, "max_seq_len": LENGTH}


def make_config(**sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "model": MODEL,
        "precision": {"compute": "float32"},
        "data": {"batch_size": ROWS, "seq_len": LENGTH},
        "optimizer": {"learning_rate": 1e-2},
        "trainer": {"steps": 20},
    }
    return Config.model_validate({**base, **{name: {**base.get(name, {}), **values} for name, values in sections.items()}})


def make_batch(seed: int = 0) -> dict[str, jax.Array]:
    """Packed rows with two segments each, padding, and masked targets."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1))
    split = rng.integers(3, LENGTH - 3, ROWS)
    index = np.arange(LENGTH)
    second = index >= split[:, None]
    padded = index >= LENGTH - rng.integers(0, 3, ROWS)[:, None]
    segments = np.where(padded, 0, 1 + second)
    weights = (rng.random((ROWS, LENGTH)) > 0.3) & ~padded
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.where(second, index - split[:, None], index),
        "segment_ids": segments,
    }
    arrays = {name: jnp.asarray(x, jnp.int32) for name, x in batch.items()}
    return {**arrays, "weights": jnp.asarray(weights, jnp.float32)}


class Trainer:
    """A state and its jitted step."""

    def __init__(self, config: Config) -> None:
        partitioner = Partitioner.single()
        self.spec = model_spec(config, partitioner)
        optimizer = build_optimizer(config.optimizer, config.precision, self.spec.param_axes, partitioner)
        schedule = build_schedule(config.schedule, config.optimizer.learning_rate, config.trainer.steps)
        self.state: TrainState = init_state(config, self.spec, optimizer, abstract_state(config, self.spec, optimizer, partitioner))
        self.step = jax.jit(make_train_step(self.spec, config, optimizer, schedule, partitioner), compiler_options=QUICK_COMPILE)
        self.evaluate = jax.jit(make_evaluation_step(self.spec, config, partitioner), compiler_options=QUICK_COMPILE)

    def run(self, *batches: dict[str, jax.Array]) -> list[dict[str, float]]:
        found = []
        for batch in batches:
            self.state, metrics = self.step(self.state, batch)
            found.append({name: float(value) for name, value in metrics.items()})
        return found


def leaves(state: TrainState) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state))]


@pytest.mark.parametrize("accumulation", [2, 8])
def test_accumulation_gives_the_same_update_as_the_whole_batch(accumulation: int) -> None:
    # eps tames AdamW where a gradient is almost 0: there rounding alone would decide the direction of the update
    tame = {"eps": 1e-2}
    whole, split = (Trainer(make_config(trainer={"accumulation": a}, optimizer=tame)) for a in (1, accumulation))
    batches = [make_batch(seed) for seed in range(3)]
    for one, other in zip(whole.run(*batches), split.run(*batches), strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=2e-6)
        np.testing.assert_allclose(one["grad_norm"], other["grad_norm"], rtol=1e-5)
    for one, other in zip(leaves(whole.state), leaves(split.state), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_experts_are_balanced_alike_in_one_and_in_two_microbatches_and_the_bias_is_not_the_optimizers() -> None:
    moe = {"experts": 6, "experts_per_token": 2, "expert_dim": 16, "choice_bias": True, "score": "sigmoid"}
    losses = {"load_balance": 0.1, "router_z_loss": 0.01, "router_bias_rate": 0.5}
    sections = {"model": {**MODEL, "num_layers": 2, "moe": moe}, "loss": losses, "optimizer": {"eps": 1e-2, "decay": "all"}}
    whole, split = (Trainer(make_config(**sections, trainer={"accumulation": a})) for a in (1, 2))
    for seed in range(2):
        (one,), (other,) = whole.run(make_batch(seed)), split.run(make_batch(seed))
        assert one.keys() == other.keys() >= {"router_balance_loss", "router_load_max", "router_entropy", "router_dropped"}
        for name, value in one.items():
            np.testing.assert_allclose(value, other[name], rtol=1e-5, err_msg=name)
        assert one["router_balance_loss"] >= 0.9 and one["router_load_max"] > 1
        if seed == 0:
            bias = np.asarray(whole.state.params["blocks"]["mlp"]["router_bias"])
            assert {-0.5, 0.5} <= set(np.unique(bias)) <= {-0.5, 0.0, 0.5}  # without weight decay
    for a, b in zip(leaves(whole.state), leaves(split.state), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_xla_does_not_learn_how_many_microbatches_there_are_but_readers_of_its_output_do() -> None:
    """A count it knows is unrolled on GPUs, and the activations of two microbatches then live at once."""
    trainer = Trainer(make_config(trainer={"accumulation": 4}))
    module = parse(trainer.step.lower(trainer.state, make_batch()).compile().as_text())
    loops = [each for _, each in module.instructions() if each.opcode == "while"]
    hidden = [loop for loop in loops if "known_trip_count" not in loop.attributes]
    assert [loop.trip_count for loop in hidden] == [4] and module.unknown_loops == []


def test_the_loss_is_the_mean_over_counted_targets_only() -> None:
    trainer = Trainer(make_config())
    batch = make_batch()
    sums = trainer.evaluate(trainer.state.params, batch)
    (metrics,) = trainer.run(batch)
    assert metrics["weight"] == float(batch["weights"].sum()) == float(sums["weight"])
    np.testing.assert_allclose(metrics["loss"], float(sums["nats"]) / metrics["weight"], rtol=1e-6)
    other = {**batch, "targets": jnp.where(batch["weights"] > 0, batch["targets"], 0)}
    assert Trainer(make_config()).run(other)[0]["loss"] == metrics["loss"]


def test_rows_stay_on_their_device_when_they_are_split() -> None:
    x = jnp.arange(12).reshape(6, 2)
    np.testing.assert_array_equal(split_rows(x, 3, Partitioner.single()), x.reshape(3, 2, 2))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_non_finite_step_changes_nothing_and_is_counted(poison: float) -> None:
    trainer = Trainer(make_config())
    good, bad = make_batch(0), make_batch(1)
    bad = {**bad, "weights": bad["weights"].at[0, 0].set(poison)}
    trainer.run(good)
    before = leaves(trainer.state)
    first, second = trainer.run(bad, bad)
    assert not np.isfinite(first["loss"])
    assert (first["skipped"], first["bad_in_a_row"]) == (1, 1)
    assert (second["skipped"], second["bad_in_a_row"]) == (2, 2)
    for one, other in zip(before, leaves(trainer.state), strict=True):
        np.testing.assert_array_equal(one, other)
    (third,) = trainer.run(good)
    assert (third["skipped"], third["bad_in_a_row"]) == (2, 0)
    assert int(trainer.state.step) == 4


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_above_the_norm_limit_changes_nothing_and_others_are_as_without_it(accumulation: int) -> None:
    """The limit lies between drawn batches' norms, which a run without updates measures; an update is skipped exactly above it."""
    still = {"learning_rate": 1e-12, "clip_norm": None}
    trainer = {"steps": 100, "accumulation": accumulation}
    batches = [make_batch(seed) for seed in range(5)]
    norms = [metrics["grad_norm"] for metrics in Trainer(make_config(optimizer=still, trainer=trainer)).run(*batches)]
    limit = float(np.median(norms)) * (1 + 1e-6)
    limited = Trainer(make_config(optimizer={**still, "learning_rate": 1e-4, "skip_norm": limit}, trainer=trainer))
    plain = Trainer(make_config(optimizer={**still, "learning_rate": 1e-4}, trainer=trainer))
    skipped = 0
    for batch in batches:
        before = leaves(limited.state)
        plain.state = copy.copy(limited.state)
        (metrics,), (free,) = limited.run(batch), plain.run(batch)
        above = metrics["grad_norm"] > limit
        skipped += above
        assert metrics["grad_norm"] == free["grad_norm"]
        assert metrics["skipped"] == skipped
        assert (metrics["bad_in_a_row"] > 0) == above
        expected = before if above else leaves(plain.state)
        for one, other in zip(expected, leaves(limited.state), strict=True):
            np.testing.assert_array_equal(one, other)
    assert 0 < skipped < len(batches)


def test_a_row_without_targets_is_harmless() -> None:
    trainer = Trainer(make_config())
    batch = make_batch()
    (metrics,) = trainer.run({**batch, "weights": jnp.zeros_like(batch["weights"])})
    assert metrics["loss"] == 0
    assert metrics["skipped"] == 0


def test_clipping_bounds_the_gradient_that_is_applied() -> None:
    """Plain SGD without momentum, decay or warm-up moves by learning rate x clipped norm."""
    sgd = {"kind": "sgd", "b1": 0.0, "weight_decay": 0.0, "learning_rate": 1.0}
    for limit in (0.05, None):
        trainer = Trainer(make_config(optimizer={**sgd, "clip_norm": limit}, schedule={"kind": "constant"}))
        before = [np.asarray(x) for x in jax.tree.leaves(trainer.state.params)]
        (metrics,) = trainer.run(make_batch())
        after = jax.tree.leaves(trainer.state.params)
        moved = np.sqrt(sum(float(((np.asarray(b) - a) ** 2).sum()) for a, b in zip(before, after, strict=True)))
        expected = metrics["grad_norm"] if limit is None else min(limit, metrics["grad_norm"])
        np.testing.assert_allclose(moved, expected, rtol=1e-4)
        assert metrics["grad_norm"] > 0.05


def test_z_loss_enters_the_gradient_but_not_the_reported_loss() -> None:
    plain, with_z = Trainer(make_config()), Trainer(make_config(loss={"z_loss": 0.1}))
    (one,), (other,) = plain.run(make_batch()), with_z.run(make_batch())
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert abs(one["grad_norm"] - other["grad_norm"]) > 1e-3


@pytest.mark.parametrize("kind", drawn(["adamw", "adafactor", "lion", "muon", "sgd"], 2))
def test_same_seed_gives_bitwise_equal_losses_and_parameters(kind: str) -> None:
    batches = [make_batch(seed) for seed in range(3)]
    one = Trainer(make_config(optimizer={"kind": kind}))
    other = copy.copy(one)
    assert one.run(*batches) == other.run(*batches)
    for a, b in zip(leaves(one.state), leaves(other.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_seed_gives_other_parameters() -> None:
    one, other = (Trainer(Config.model_validate({**make_config().model_dump(), "seed": seed})) for seed in (0, 1))
    assert any((a != b).any() for a, b in zip(leaves(one.state), leaves(other.state), strict=True))


def test_an_update_whose_loss_is_above_the_limit_of_its_batch_changes_nothing_and_others_are_as_with_any_limit() -> None:
    """The limit lies between drawn losses."""
    trainer = make_config(trainer={"steps": 100, "accumulation": 2})
    limited, free = Trainer(trainer), Trainer(trainer)
    batches = [make_batch(seed) for seed in range(5)]
    limit = float(np.median([metrics["loss"] for metrics in Trainer(make_config(optimizer={"learning_rate": 1e-12})).run(*batches)]))
    skipped = 0
    for batch in batches:
        before = leaves(limited.state)
        free.state = copy.copy(limited.state)
        (metrics,) = limited.run({**batch, LOSS_LIMIT: jnp.float32(limit)})
        (other,) = free.run({**batch, LOSS_LIMIT: jnp.float32(np.inf)})
        above = metrics["loss"] > limit
        skipped += above
        assert metrics["loss"] == other["loss"] and metrics["skipped"] == skipped and (metrics["bad_in_a_row"] > 0) == above
        for one, expected in zip(leaves(limited.state), before if above else leaves(free.state), strict=True):
            np.testing.assert_array_equal(one, expected)
    assert 0 < skipped < len(batches)
