"""When to save and what to keep."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.configs.schema import CheckpointConfig
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint.retention import Cadence, steps_to_delete


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def cadence(clock: Clock, **settings: float) -> Cadence:
    return Cadence(CheckpointConfig(**settings), clock, Agreement("test"))


@given(st.sets(st.integers(0, 500), max_size=40), st.integers(1, 6), st.integers(0, 60))
def test_kept_are_exactly_the_last_k_and_the_multiples_of_m(steps: set[int], keep_last: int, keep_every: int) -> None:
    deleted = set(steps_to_delete(list(steps), steps, keep_last=keep_last, keep_every=keep_every, newest_proven=True))
    kept = steps - deleted
    newest = set(sorted(steps)[-keep_last:])
    assert deleted <= steps
    assert newest <= kept
    for step in steps - newest:
        assert (step in kept) == bool(keep_every and step % keep_every == 0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 4), st.integers(0, 40))
def test_deleting_after_each_save_ends_as_deleting_once_would(gaps: list[int], keep_last: int, keep_every: int) -> None:
    kept: set[int] = set()
    every, step = set(), 0
    for gap in gaps:
        step += gap
        every.add(step)
        kept.add(step)
        kept -= set(steps_to_delete(sorted(kept), kept, keep_last=keep_last, keep_every=keep_every, newest_proven=True))
        assert step in kept
        assert len([s for s in kept if not (keep_every and s % keep_every == 0)]) <= keep_last
    assert kept == every - set(steps_to_delete(sorted(every), every, keep_last=keep_last, keep_every=keep_every, newest_proven=True))


@given(st.dictionaries(st.integers(0, 99), st.booleans(), max_size=30), st.integers(1, 5), st.integers(0, 20), st.booleans())
def test_only_judged_steps_make_others_go(steps: dict[int, bool], keep_last: int, keep_every: int, tried: bool) -> None:
    """`steps`: step -> whether it was judged."""
    judged = {step for step in steps if steps[step]}
    deleted = steps_to_delete(list(steps), judged, keep_last=keep_last, keep_every=keep_every, newest_proven=tried)
    for step in deleted:
        after = [other for other in judged if other > step]
        assert len(after) >= keep_last
        assert tried or len(after) >= 2, "the newest gave no finite step yet: it lets nothing go"


def test_saves_at_the_multiples_of_every() -> None:
    due = cadence(Clock(), every=3, final=False)
    assert [step for step in range(1, 10) if due.due(step, last=step == 9)] == [3, 6, 9]


def test_saves_at_the_end_unless_disabled() -> None:
    assert cadence(Clock(), every=0, final=True).due(7, last=True)
    assert not cadence(Clock(), every=0, final=False).due(7, last=True)
    assert not cadence(Clock(), every=0, final=True).due(7, last=False)


def test_saves_when_the_minutes_have_passed_since_the_last_save() -> None:
    clock = Clock()
    due = cadence(clock, every=0, every_minutes=2, final=False)
    saved = []
    for step in range(1, 13):
        clock.now_s += 50
        if due.due(step, last=False):
            due.saved()
            saved.append(step)
    assert saved == [3, 6, 9, 12]


def test_a_save_by_steps_starts_the_minutes_anew() -> None:
    clock = Clock()
    due = cadence(clock, every=4, every_minutes=2, final=False)
    saved = []
    for step in range(1, 10):
        clock.now_s += 50
        if due.due(step, last=False):
            due.saved()
            saved.append(step)
    assert saved == [3, 4, 7, 8]
