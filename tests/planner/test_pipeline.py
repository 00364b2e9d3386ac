"""The schedule of pipeline stages, played tick by tick."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.planner.calculators.pipeline_schedule import pipeline_estimate
from ridgeline.planner.pipeline import Schedule

SCHEDULES = st.builds(
    lambda stages, groups, chunks, rest: Schedule(stages, groups * stages + rest, chunks),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 5),
)


def played(schedule: Schedule, unit_of) -> dict[tuple[int, int, int], int]:
    """(stage, microbatch, chunk) -> tick."""
    found: dict[tuple[int, int, int], int] = {}
    for tick in range(schedule.ticks):
        for stage in range(schedule.stages):
            unit = unit_of(stage, tick)
            if unit.real:
                assert (stage, unit.microbatch, unit.chunk) not in found
                found[stage, unit.microbatch, unit.chunk] = tick
    return found


@settings(max_examples=40, deadline=None)
@given(SCHEDULES)
def test_every_unit_runs_once_after_what_it_needs_and_before_its_slot_is_used_again(schedule):
    forward, backward = played(schedule, schedule.forward), played(schedule, schedule.backward)
    every = {(s, m, c) for s in range(schedule.stages) for m in range(schedule.microbatches) for c in range(schedule.chunks)}
    assert forward.keys() == backward.keys() == every
    assert max(forward.values()) < schedule.forward_ticks
    assert schedule.first_backward == min(backward.values()) and max(backward.values()) < schedule.ticks
    last = schedule.stages - 1
    for (stage, microbatch, chunk), tick in forward.items():
        before = (stage - 1, microbatch, chunk) if stage else (last, microbatch, chunk - 1)
        if before in forward:  # the residual stream arrives one tick after it was computed, and its gradient on the way back
            assert tick == forward[before] + 1
            assert backward[before] == backward[stage, microbatch, chunk] + 1
        else:
            assert (stage, chunk) == (0, 0)
        later = backward[stage, microbatch, chunk]
        assert tick <= later and all(
            other == tick or other % schedule.kept != tick % schedule.kept
            for (at, _, _), other in forward.items()
            if at == stage and tick <= other <= later
        )
    ends = (last, schedule.microbatches - 1, schedule.chunks - 1)
    assert forward[ends] == backward[ends]  # the loss of a microbatch and its backward pass are in one tick


@settings(max_examples=40, deadline=None)
@given(SCHEDULES)
def test_the_bubble_of_the_played_schedule_is_that_of_the_formula(schedule):
    busy = len(played(schedule, schedule.forward))
    idle = 1 - busy / (schedule.stages * schedule.forward_ticks)
    assert abs(schedule.bubble_fraction - idle) < 1e-9
    if schedule.chunks > 1 and schedule.microbatches % schedule.stages:
        return  # the formula is for whole groups of microbatches
    counts = {"stages": schedule.stages, "microbatches": schedule.microbatches, "interleave": schedule.chunks}
    formula = pipeline_estimate(**counts, forward_s=1, backward_s=2).bubble_fraction
    assert abs(idle - formula) < 1e-9 and abs(schedule.bubble_fraction - formula) < 1e-9
