"""Schedules at their corner points."""

import jax
import numpy as np
import pytest

from ridgeline.configs.choices import SCHEDULES as NAMES
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import ScheduleConfig
from ridgeline.trainer.schedules import SCHEDULES, build_schedule

PEAK = 2e-3


def rates(steps: int, **kwargs) -> np.ndarray:
    schedule = build_schedule(ScheduleConfig(**kwargs), PEAK, steps)
    return np.asarray(jax.vmap(schedule)(np.arange(steps)))


def test_registry_implements_exactly_the_names_a_config_may_use():
    assert set(SCHEDULES) == set(NAMES)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_warmup_is_linear_and_reaches_the_peak_and_the_first_step_trains(kind, warmup):
    found = rates(100, kind=kind, warmup_steps=warmup)
    np.testing.assert_allclose(found[: warmup + 1], PEAK * np.arange(1, warmup + 2) / (warmup + 1), rtol=1e-6)
    assert found[0] > 0


@pytest.mark.parametrize("kind", NAMES)
def test_without_warmup_the_first_step_has_the_peak(kind):
    assert rates(50, kind=kind)[0] == np.float32(PEAK)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("final", [0.0, 0.25])
def test_last_step_has_the_final_fraction_and_later_steps_keep_it(kind, final):
    schedule = build_schedule(ScheduleConfig(kind=kind, warmup_steps=5, final_fraction=final), PEAK, 60)
    for step in (59, 60, 1000):
        assert float(schedule(step)) == pytest.approx(PEAK * final, abs=1e-9)


@pytest.mark.parametrize("kind", NAMES)
def test_never_rises_after_warmup(kind):
    assert (np.diff(rates(80, kind=kind, warmup_steps=8)[8:]) <= 1e-12).all()


@pytest.mark.parametrize("kind", NAMES)
def test_a_rewarmed_run_follows_the_plain_formula(kind):
    """From a tenth of the peak up to it, then down to a fifth of it."""
    rng = np.random.default_rng(3)
    for _ in range(5):
        warmup, steps, first, final = int(rng.integers(1, 40)), int(rng.integers(80, 200)), rng.uniform(0, 1), rng.uniform(0, 1)
        found = rates(steps, kind=kind, warmup_steps=warmup, initial_fraction=first, final_fraction=final, decay_fraction=0.25)
        for step in range(steps):
            if step < warmup:
                expected = first + (1 - first) * (step + 1) / (warmup + 1)
            else:
                done = (step - warmup) / (steps - 1 - warmup)
                falling = max(0.0, 1 - (steps - 1 - step) / (0.25 * steps))
                expected = {
                    "constant": 1.0,
                    "linear": 1 + (final - 1) * done,
                    "cosine": final + (1 - final) * (1 + np.cos(np.pi * done)) / 2,
                    "wsd": 1 + (final - 1) * falling,
                }[kind]
            assert found[step] == pytest.approx(PEAK * expected, rel=2e-5)


def test_a_stable_run_decays_from_any_of_its_checkpoints():
    """The decay phase of wsd: the same run with other trainer.steps, or a new run that falls from the first step on."""
    stable = rates(1000, kind="wsd", warmup_steps=10, decay_fraction=0.1, final_fraction=0.0)
    shorter = rates(600, kind="wsd", warmup_steps=10, decay_fraction=1 / 6, final_fraction=0.0)
    np.testing.assert_array_equal(shorter[:499], stable[:499])
    assert shorter[-1] == 0
    new = rates(100, kind="linear", final_fraction=0.0)
    np.testing.assert_allclose(new, PEAK * (1 - np.arange(100) / 99), rtol=1e-5, atol=1e-9)


def test_constant_stays_at_the_peak():
    assert (rates(40, kind="constant") == np.float32(PEAK)).all()


def test_linear_and_cosine_are_half_way_in_the_middle():
    for kind in ("linear", "cosine"):
        schedule = build_schedule(ScheduleConfig(kind=kind, warmup_steps=10, final_fraction=0.2), PEAK, 111)
        assert float(schedule(60)) == pytest.approx(PEAK * 0.6, rel=1e-6)
    quarter = build_schedule(ScheduleConfig(kind="cosine", final_fraction=0.0), PEAK, 101)
    assert float(quarter(25)) == pytest.approx(PEAK * 0.5 * (1 + np.cos(np.pi / 4)), rel=1e-6)


def test_wsd_is_flat_until_the_last_share_of_the_steps_and_then_linear():
    found = rates(101, kind="wsd", warmup_steps=10, decay_fraction=0.2, final_fraction=0.0)
    start = 100 - 20
    assert (found[10:80] == np.float32(PEAK)).all()
    np.testing.assert_allclose(found[81:], PEAK * (1 - (np.arange(81, 101) - (start - 0.2)) / 20.2), rtol=1e-5, atol=1e-9)


def test_wsd_over_all_steps_after_warmup_has_no_flat_part():
    found = rates(100, kind="wsd", warmup_steps=50, decay_fraction=0.5, final_fraction=0.0)
    assert found[50] == np.float32(PEAK)
    assert found[52] < found[51] < found[50]


def test_one_step_run_has_the_peak():
    for kind in NAMES:
        assert rates(1, kind=kind)[0] == np.float32(PEAK)


def test_is_a_function_of_the_step_alone_under_jit():
    schedule = build_schedule(ScheduleConfig(kind="cosine", warmup_steps=3), PEAK, 30)
    assert [float(jax.jit(schedule)(s)) for s in (29, 7, 0)] == [float(schedule(s)) for s in (29, 7, 0)]


def test_unknown_kind_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"schedule.kind 'cosin'; did you mean 'cosine'"):
        build_schedule(ScheduleConfig.model_construct(kind="cosin"), PEAK, 10)


def test_warmup_longer_than_the_run_is_refused():
    with pytest.raises(UserError, match=r"schedule.warmup_steps=11 is longer than the run \(trainer.steps=10\)"):
        build_schedule(ScheduleConfig(warmup_steps=11), PEAK, 10)


def test_warmup_as_long_as_the_run_only_rises():
    assert (np.diff(rates(10, warmup_steps=10)) > 0).all()


def test_wsd_whose_decay_meets_the_warmup_is_refused():
    with pytest.raises(UserError, match=r"decay_fraction may be at most 0.4"):
        build_schedule(ScheduleConfig(kind="wsd", warmup_steps=60, decay_fraction=0.5), PEAK, 100)
