"""The ladder: its rungs sum, and it points at what adds most."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.measure.ladder import RUNGS, amortized_s, build_ladder, save_cadence

times = st.lists(st.floats(1e-5, 10), min_size=3, max_size=7)


@given(st.fixed_dictionaries({"step": times}, optional={name: times for name in RUNGS if name != "step"}))
def test_what_the_rungs_add_sums_to_the_last_one(samples: dict[str, list[float]]) -> None:
    ladder = build_ladder(samples)
    assert [rung.name for rung in ladder.rungs] == [name for name in RUNGS if name in samples]
    assert sum(rung.adds_s for rung in ladder.rungs) == pytest.approx(ladder.time_s)
    assert sum(rung.share for rung in ladder.rungs) == pytest.approx(1)
    for below, rung in itertools.pairwise(ladder.rungs):
        assert rung.time_s - rung.adds_s == pytest.approx(below.time_s)
    for rung in ladder.rungs:
        if rung.name in ("step", "loop"):
            assert rung.time_s == statistics.median(samples[rung.name])


HEALTHY = {
    "matmul": [0.060, 0.061, 0.060],
    "memory": [0.010, 0.010, 0.011],
    "collectives": [0.010, 0.010, 0.010],
    "step": [0.100, 0.101, 0.100],
    "loop": [0.101, 0.101, 0.102],
    "checkpoint": [0.0001, 0.0001, 0.0001],
}


@pytest.mark.parametrize(
    ("changed", "rung"),
    [
        ({}, "matmul"),
        ({"memory": [0.07, 0.07, 0.07], "step": [0.16, 0.16, 0.16], "loop": [0.16, 0.16, 0.16]}, "memory"),
        ({"collectives": [0.08, 0.08, 0.08], "step": [0.18, 0.18, 0.18], "loop": [0.18, 0.18, 0.18]}, "collectives"),
        ({"step": [0.30, 0.31, 0.30], "loop": [0.31, 0.31, 0.31]}, "step"),
        ({"loop": [0.40, 0.41, 0.39]}, "loop"),
        ({"checkpoint": [0.2, 0.2, 0.2]}, "checkpoint"),
    ],
)
def test_the_verdict_names_the_layer_that_adds_most_and_the_next(changed: dict[str, list[float]], rung: str) -> None:
    ladder = build_ladder({**HEALTHY, **changed}, {rung: "because of this"})
    verdict = ladder.verdict
    assert verdict.rung == rung
    ranked = sorted(ladder.rungs, key=lambda r: -r.adds_s)
    assert (ranked[0].name, ranked[1].name) == (rung, verdict.next_rung)
    assert verdict.gain == pytest.approx(ladder.time_s / (ladder.time_s - verdict.adds_s) - 1)
    assert verdict.sentence.startswith(f"Look at {rung}: ")
    assert ": because of this. " in verdict.sentence
    assert verdict.next_rung in verdict.sentence


def test_a_machine_that_slows_down_between_rounds_unstacks_nothing() -> None:
    slowed = {name: [value * factor for value, factor in zip(values, (1, 3, 2), strict=True)] for name, values in HEALTHY.items()}
    slowed["loop"] = [value * 1.5 for value in slowed["step"]]
    ladder = build_ladder(slowed)
    assert all(rung.clear for rung in ladder.rungs)
    assert ladder.verdict.rung == "matmul"
    assert ladder.verdict.gain is not None
    assert [round(rung.adds_s / ladder.time_s, 1) for rung in ladder.rungs] == [0.4, 0.1, 0.1, 0.1, 0.3, 0.0]


def test_a_step_that_hides_its_collectives_adds_less_than_nothing() -> None:
    ladder = build_ladder({**HEALTHY, "collectives": [0.050] * 3})
    added = {rung.name: rung.adds_s for rung in ladder.rungs}
    assert added["step"] == pytest.approx(-0.020)
    assert sum(added.values()) == pytest.approx(ladder.time_s)
    assert ladder.verdict.rung == "matmul"


def test_a_piece_that_took_longer_than_the_whole_is_reported_as_noise() -> None:
    verdict = build_ladder({**HEALTHY, "matmul": [0.3, 0.3, 0.3]}).verdict
    assert (verdict.rung, verdict.gain) == ("matmul", None)
    assert "measure again" in verdict.sentence


def test_a_difference_within_the_noise_is_marked_and_never_the_verdict() -> None:
    noisy = {"step": [0.10, 0.16, 0.22, 0.11, 0.19], "loop": [0.12, 0.25, 0.17, 0.30, 0.10]}
    ladder = build_ladder(noisy)
    assert {rung.name: rung.clear for rung in ladder.rungs} == {"step": True, "loop": False}
    assert ladder.verdict.rung == "step"
    assert ladder.verdict.next_rung is None


@pytest.mark.parametrize(
    ("settings", "steps", "words"),
    [
        ({"every": 50, "every_minutes": 0, "final": True}, 50, "checkpoint.every=50"),
        ({"every": 5000, "every_minutes": 1, "final": True}, 600, "checkpoint.every_minutes=1"),
        ({"every": 0, "every_minutes": 0, "final": True}, 1000, "only the final save"),
        ({"every": 0, "every_minutes": 0, "final": False}, None, "no saves"),
    ],
)
def test_saves_are_spread_over_the_steps_to_the_next(settings: dict[str, float], steps: float | None, words: str) -> None:
    cadence = save_cadence(**settings, steps=1000, step_s=0.1)  # type: ignore[arg-type]
    assert cadence.steps == steps
    assert words in cadence.reason
    spread = amortized_s([2.0, 3.0], [2.5, 3.5], cadence, 0.1)
    assert spread == ([0.0, 0.0] if steps is None else pytest.approx([2 / steps, 3 / steps]))


def test_a_write_that_outlasts_the_interval_holds_up_the_next_save() -> None:
    cadence = save_cadence(every=10, every_minutes=0, final=True, steps=100, step_s=0.1)
    assert amortized_s([0.5], [0.9], cadence, 0.1) == pytest.approx([0.05])
    assert amortized_s([0.5], [4.5], cadence, 0.1) == pytest.approx([0.05 + (4.5 - 0.5 - 1.0) / 10])
