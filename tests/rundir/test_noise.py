"""The noise model: what is no difference is never called one, and a real one is found."""

import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.rundir.noise import UNKNOWN_NOISE, compare, run_to_run_noise


def runs(rng, count, *, factor=1.0, within=0.05, between=0.03):
    """`count` pairs of runs of 15 steps: steps scatter within a run, and runs among themselves."""
    for _ in range(count):
        truth = (1.0, factor)
        yield [t * np.exp(rng.normal(0, between)) * np.exp(np.abs(rng.normal(0, within, 15))) for t in truth]


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def test_unchanged_code_on_a_noisy_machine_is_rarely_called_different(rng):
    verdicts = [compare(old, new, between_runs=0.03).verdict for old, new in runs(rng, 300)]
    assert verdicts.count("cannot tell") >= 0.97 * 300


def test_one_percent_is_never_reported_even_from_perfect_timings():
    assert compare([1.0] * 50, [0.99] * 50).verdict == "cannot tell"


def test_a_quarter_is_found_through_the_noise(rng):
    slower = [compare(old, new, between_runs=0.03) for old, new in runs(rng, 100, factor=1.25)]
    assert [c.verdict for c in slower].count("slower") >= 98
    faster = [compare(old, new, between_runs=0.03).verdict for old, new in runs(rng, 100, factor=0.8)]
    assert faster.count("faster") >= 98
    covered = sum(c.low <= 1.25 <= c.high for c in slower)
    assert covered >= 97  # the interval holds the truth


def test_one_outlier_changes_no_verdict():
    assert compare([1.0] * 9, [1.0] * 8 + [40.0]).verdict == "cannot tell"


def test_more_noise_between_runs_makes_it_more_careful():
    old, new = [1.0, 1.01, 0.99, 1.0], [0.9, 0.91, 0.89, 0.9]
    assert compare(old, new).verdict == "faster"
    assert compare(old, new, between_runs=0.06).verdict == "cannot tell"


def test_the_noise_between_runs_is_measured_from_repeats(rng):
    repeats = [np.exp(rng.normal(0, 0.05)) * np.exp(rng.normal(0, 0.01, 9)) for _ in range(200)]
    assert run_to_run_noise(repeats) == pytest.approx(0.05, rel=0.2)
    assert run_to_run_noise(repeats[:2]) == UNKNOWN_NOISE


def test_the_verdict_is_a_function_of_the_figures(rng):
    ((old, new),) = runs(rng, 1)
    assert compare(old, new) == compare(old, new)


def test_words_carry_the_figures():
    assert compare([2.0] * 5, [1.0] * 5).describe() == "faster by 50.0% (99 % interval -53.5% to -46.2%, noise between runs 2.0%)"
    assert compare([1.0] * 5, [1.01] * 5).describe().startswith("cannot tell: +1.0%")


@pytest.mark.parametrize("bad", [[1.0, 1.0], [1.0, 0.0, 1.0], [1.0, float("nan"), 1.0]])
def test_what_is_no_set_of_timings_is_refused(bad):
    with pytest.raises(UserError, match="timings of the new version"):
        compare([1.0, 1.0, 1.0], bad)
