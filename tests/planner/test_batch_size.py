"""The critical batch size: the law, and fits to runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.planner.calculators.batch_size import batch_estimate, fit_critical_batch


def test_at_the_critical_batch_steps_and_examples_are_twice_their_least():
    at = batch_estimate(s_min=1000, b_crit=256, batch=256)
    assert (at.steps, at.examples) == (2000, 512_000)
    assert (at.steps_over_min, at.examples_over_min) == (2, 2)


laws = st.tuples(st.floats(10, 1e6), st.floats(1, 1e6))


@given(laws, st.lists(st.floats(1, 1e6), min_size=2, max_size=6, unique_by=round))
def test_runs_that_follow_the_law_give_it_back(law, batches):
    s_min, b_crit = law
    runs = [(batch_estimate(s_min=s_min, b_crit=b_crit, batch=batch).steps, batch) for batch in batches]
    try:
        fit = fit_critical_batch(runs)
    except UserError:  # batches so far above the critical one that rounding decides the slope
        assert b_crit / min(batches) < 1e-3
        return
    assert not fit.misfit
    assert all(abs(r) < 1e-6 for r in fit.relative_residuals)
    if 1e-2 < b_crit / min(batches) < 1e2 and max(batches) > 2 * min(batches):
        assert fit.s_min == pytest.approx(s_min, rel=1e-3)
        assert fit.b_crit == pytest.approx(b_crit, rel=1e-3)


def test_two_runs_are_met_exactly():
    fit = fit_critical_batch([(200, 100), (150, 200)])
    assert (fit.s_min, fit.b_crit) == (pytest.approx(100), pytest.approx(100))
    assert fit.residuals == pytest.approx((0, 0), abs=1e-9)


def test_a_third_run_that_contradicts_is_a_misfit():
    assert not fit_critical_batch([(200, 100), (150, 200), (125, 400)]).misfit
    assert not fit_critical_batch([(202, 100), (149, 200), (124, 400)]).misfit  # a percent of noise
    assert fit_critical_batch([(200, 100), (150, 200), (160, 400)]).misfit
    assert fit_critical_batch([(200, 100), (210, 200), (220, 400)]).misfit  # steps that rise


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(100, 8), (90, 8)], "two or more different batch sizes"),
        ([(100, 8)], "two or more different batch sizes"),
        ([(100, 8), (110, 16)], "steps must fall as the batch grows"),
        ([(100, 8), (100, 16)], "steps must fall as the batch grows"),
        ([(100, 8), (40, 16)], "fewer examples were enough at the larger batch"),
        ([(0, 8), (40, 16)], "fit STEPS=0"),
        ([(10, -8), (40, 16)], "fit BATCH=-8"),
    ],
)
def test_nonsense_is_refused(runs, message):
    with pytest.raises(UserError, match=message):
        fit_critical_batch(runs)
