"""Pipeline bubbles: the worked example, the printed confusion of shares, a simulated schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.planner.calculators.pipeline_schedule import pipeline_estimate


def test_8_stages_and_64_microbatches_take_2130_ms_at_90_1_percent():
    step = pipeline_estimate(stages=8, microbatches=64, forward_s=0.010, backward_s=0.020)
    assert step.seconds == pytest.approx(2.130)
    assert step.efficiency == pytest.approx(0.901, abs=5e-4)


def test_the_bubble_of_the_total_is_not_that_of_the_ideal():
    step = pipeline_estimate(stages=8, microbatches=64, forward_s=0.010, backward_s=0.020)
    assert step.bubble_fraction == pytest.approx(7 / 71)
    assert step.bubble_over_ideal == pytest.approx(7 / 64)
    assert step.efficiency == pytest.approx(1 - step.bubble_fraction)


def test_interleaving_divides_the_bubble():
    plain = pipeline_estimate(stages=8, microbatches=64, forward_s=1, backward_s=2)
    interleaved = pipeline_estimate(stages=8, microbatches=64, interleave=4, forward_s=1, backward_s=2)
    assert interleaved.seconds - interleaved.ideal_s == pytest.approx((plain.seconds - plain.ideal_s) / 4)
    assert interleaved.bubble_fraction == pytest.approx(7 / (4 * 64 + 7))


def simulated_gpipe(stages, microbatches, forward, backward):
    """Play the schedule: a stage starts when its input is there and it is free."""
    done = [[0.0] * microbatches for _ in range(stages)]
    for stage in range(stages):
        free = 0.0
        for micro in range(microbatches):
            ready = done[stage - 1][micro] if stage else 0.0
            free = done[stage][micro] = max(free, ready) + forward
    gradients = [[0.0] * microbatches for _ in range(stages)]
    for stage in reversed(range(stages)):
        free = done[stage][-1]
        for micro in range(microbatches):
            ready = gradients[stage + 1][micro] if stage + 1 < stages else done[stage][-1]
            free = gradients[stage][micro] = max(free, ready) + backward
    return gradients[0][-1]


@given(st.integers(1, 9), st.integers(1, 20), st.floats(0.01, 3), st.floats(0.01, 3))
def test_the_formula_is_the_schedule_played_out(stages, microbatches, forward, backward):
    step = pipeline_estimate(stages=stages, microbatches=microbatches, forward_s=forward, backward_s=backward)
    assert step.seconds == pytest.approx(simulated_gpipe(stages, microbatches, forward, backward))


def test_1f1b_keeps_as_many_microbatches_as_stages_and_gpipe_all():
    settings = {"stages": 4, "microbatches": 32, "forward_s": 1, "backward_s": 2}
    assert pipeline_estimate(**settings).microbatches_in_flight == 4
    assert pipeline_estimate(**settings, schedule="gpipe").microbatches_in_flight == 32


@pytest.mark.parametrize("change", [{"stages": 0}, {"microbatches": -1}, {"interleave": 0}, {"forward_s": 0}, {"backward_s": -1}])
def test_nonsense_is_refused(change):
    with pytest.raises(UserError, match="must be"):
        pipeline_estimate(**({"stages": 4, "microbatches": 8, "forward_s": 1, "backward_s": 2} | change))
