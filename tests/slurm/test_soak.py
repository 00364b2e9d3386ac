"""A run under a seeded schedule of faults: bitwise the undisturbed run, its time explained, its resources flat, its goodput predicted.

`make test-slurm` takes a sample of some minutes, CI one of ten, `make soak MINUTES=240 SEED=7` a long one. All print what each fault cost.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.launch.exit_codes import DONE, PREEMPTED
from ridgeline.planner.campaign.model import Outcome
from ridgeline.rundir.goodput import Ledger
from tests.slurm import jobs, soak
from tests.slurm.soak import MEASURE_MINUTES, MINUTES
from tests.trainer import storage_trouble

GAP_S = float(os.environ.get("SOAK_GAP_S", "6"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
LONG_MINUTES = 30.0
"""From this length on the prediction must hold: a short run has few faults."""
MEASURED = [
    *((40, "kill"), (90, "stop"), (140, "node down"), (190, "preempt"), (240, "slow link"), (300, "node down")),
    *(
        (350, "kill"),
        (400, "node down"),
        (450, "stop"),
        (500, "node down"),
        (550, "preempt"),
        (600, "node down"),
        (650, "node down"),
        (700, ""),
    ),
]
"""Steps after which the run that is measured for the prediction meets its faults; its last step."""


@pytest.mark.timeout(900 + 180 * MINUTES)
def test_a_run_under_faults_ends_bitwise_equal_explained_and_flat(slurm: Any, tmp_path: Path, corpus: Path, programs: Path) -> None:
    seed = SEED or random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    library = storage_trouble.build(tmp_path)

    def start(name: str, steps: int) -> soak.Soak:
        control = tmp_path / f"{name}.control"
        env = storage_trouble.environment(library, control)
        deadlines = [f"trainer.deadlines.{phase}={soak.PHASE_S}" for phase in ("startup_s", "compile_s", "save_s")]
        overrides = [f"trainer.hang_timeout_s={soak.HANG_S}", *deadlines, f"checkpoint.every={soak.SAVE_EVERY}", "evaluation.every=0"]
        cluster = [f"slurm.srun_options=[--wait={soak.WAIT_S}]", "slurm.max_restarts=100000"]
        run = jobs.submit(
            slurm,
            tmp_path,
            corpus,
            name,
            steps=steps,
            overrides=overrides,
            cluster=cluster,
            programs=programs,
            step_s=soak.STEP_S,
            env=env,
            minutes="2-00:00:00",
        )
        return soak.Soak(slurm, run, control, rng, steps)

    times = soak.TYPICAL
    if MINUTES >= MEASURE_MINUTES:
        short = start("measured", MEASURED[-1][0])
        for step, kind in MEASURED[:-1]:
            short.inject_at(step, kind)
        short.run.finishes()
        short.bring_all_back()
        times = soak.measure(short)
    steps = max(150, round(MINUTES * 60 / (times.step_s + times.save_s / soak.SAVE_EVERY) / 2))
    schedule = scheduled(seed, GAP_S, 10 + round(3 * steps * times.step_s / GAP_S))
    predicted = soak.predict(times, steps, schedule)
    print(f"\nseed {seed}: {steps} steps, a fault every {GAP_S:g} s; {times}")
    print(f"predicted before the run: goodput {predicted.goodput[0]:.1%}, {predicted.wall_s[0] / 60:.1f} minutes")

    long, begin_s = start("soak", steps), time.time()
    long.until_done(iter(schedule), timeout_s=300 + 2 * predicted.wall_s[0])
    took_s = time.time() - begin_s
    long.settle()
    ledger = long.ledger()
    print(
        f"measured: goodput {ledger.goodput:.1%}, {ledger.wall_s / 60:.1f} minutes, {ledger.starts} starts, {ledger.lost_steps} lost steps"
    )
    print("\n".join(table(long)))
    print("\n".join(compared(predicted, ledger)))

    assert long.run.codes()[-1] == DONE
    assert long.faults
    explained(ledger, took_s)
    flat(long)
    overrides = [f"checkpoint.every={steps}", "evaluation.every=0", "trainer.log_every=100"]
    undisturbed = jobs.submit(slurm, tmp_path, corpus, "reference", steps=steps, programs=programs, overrides=overrides)
    undisturbed.finishes(timeout_s=900 + steps * times.step_s)
    jobs.assert_bitwise_equal(long.run.arrays(), undisturbed.arrays())
    if MINUTES >= LONG_MINUTES:
        assert PREEMPTED in long.run.codes()
        assert abs(ledger.goodput - predicted.goodput[0]) < 0.03


def scheduled(seed: int, mean_gap_s: float, count: int) -> list[tuple[float, str]]:
    """Return the first faults of the schedule of a seed. Gaps are uniform: with independent moments a sample might have no fault."""
    rng = random.Random(f"schedule {seed}")
    return list(itertools.islice(soak.faults(rng, lambda: rng.uniform(0.5, 1.5) * mean_gap_s), count))


def explained(ledger: Ledger, took_s: float) -> None:
    """The categories sum to the wall time, which is what the job took, and nearly nothing is left over."""
    assert abs(sum(ledger.seconds.values()) - ledger.wall_s) < 1e-3
    # a preemption after the last step costs a start that finds the run complete and writes no event
    assert -10 < took_s - ledger.wall_s < 60, (ledger.wall_s, took_s)
    print("ledger: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in ledger.seconds.items() if seconds >= 0.05))
    gaps = [
        f"{gap.duration_s:.2f} s between {before.category} and {after.category} of start {gap.restart + 1}"
        for before, gap, after in zip(ledger.stretches, ledger.stretches[1:], ledger.stretches[2:], strict=False)
        if gap.category == "unexplained" and gap.duration_s > 0.1
    ]
    assert ledger.seconds["unexplained"] < 1.0 * ledger.starts, gaps


def flat(run: soak.Soak) -> None:
    """Later starts hold no more than earlier ones, and a long start no more than at its beginning. A failed save leaves waiting threads.

    While the run trains: the summary at its end reads the event log, with memory for all of it (cli/commands/train.py has the limit).
    """
    by_start: dict[int, list[soak.Sample]] = {}
    for sample in run.samples:
        if 5 < sample.step < run.steps:
            by_start.setdefault(sample.restart, []).append(sample)
    filled = {fault.restart for fault in run.faults if fault.kind == "fill disk"}
    quiet = [samples for restart, samples in sorted(by_start.items()) if restart not in filled]
    for first, last in pairs(quiet):
        assert max(last.files) <= max(first.files) + 12, (first, last)
        assert max(last.threads) <= max(first.threads) + 30, (first, last)
        assert max(last.rss) <= 1.25 * max(first.rss) + 100e6, (first, last)
    sizes = [sample.disk for sample in run.samples]
    assert max(sizes) < 10 * statistics.median(sizes)  # two checkpoints, the one in flight, and four set aside
    ends = [samples[-1] for samples in quiet]
    print(
        f"resources of a rank: memory {max(max(s.rss) for s in ends) / 1e6:.0f} MB (least {min(max(s.rss) for s in ends) / 1e6:.0f}), "
        f"files {min(max(s.files) for s in ends)} to {max(max(s.files) for s in ends)}, "
        f"threads {min(max(s.threads) for s in ends)} to {max(max(s.threads) for s in ends)}; checkpoints {max(sizes) / 1e6:.1f} MB at most"
    )


def pairs(starts: list[list[soak.Sample]]) -> Iterator[tuple[soak.Sample, soak.Sample]]:
    """Yield what to compare: the middle and the end of each start, and the ends of the first starts with that of each later one."""
    for samples in starts:
        yield samples[len(samples) // 2], settled(samples)
    for samples in starts[2:]:
        yield max((earlier[-1] for earlier in starts[:2]), key=lambda sample: max(sample.rss)), settled(samples)


def settled(samples: list[soak.Sample]) -> soak.Sample:
    """Return which of the last samples has the fewest open files: a save opens some for half a second, what leaks stays."""
    return min(samples[-3:], key=lambda sample: max(sample.files))


def table(run: soak.Soak) -> list[str]:
    """Return the lines of what each kind of fault cost."""
    lines = ["fault        injected  time to recover, s (median, most)  repeated steps (mean)"]
    for kind in soak.KINDS:
        mine = [fault for fault in run.faults if fault.kind == kind]
        back = [fault.recovered_s for fault in mine if fault.recovered_s is not None]
        if mine:
            shown = f"{statistics.median(back):.1f}, {max(back):.1f}" if back else "at the end"
            lost = statistics.mean(fault.lost_steps for fault in mine)
            lines.append(f"{kind:<12} {len(mine):>8}  {shown:>34}  {lost:>21.1f}")
    return lines


def compared(predicted: Outcome, ledger: Ledger) -> list[str]:
    """Return the lines of where the time was predicted to go and where it went.

    `ridge goodput` counts the time from the last step before a failure to the end of the processes as lost, the simulation as hang.
    """
    lines = [f"category     predicted s  measured s   ({predicted.interruptions[0]:.0f} and {ledger.starts - 1} interruptions)"]
    for name in sorted({*predicted.seconds, *ledger.seconds}):
        expected_s, seconds = float(np.sum(predicted.seconds.get(name, 0.0))), ledger.seconds.get(name, 0.0)
        if expected_s >= 0.05 or seconds >= 0.05:
            lines.append(f"{name:<12} {expected_s:>11.1f} {seconds:>11.1f}")
    return lines


def test_any_stretch_of_the_schedule_has_its_share_of_faults() -> None:
    rng = random.Random(3)
    for share in (0.3, 1.0, 2.5):
        counts = []
        for _ in range(4000):
            schedule = soak.faults(rng, lambda: rng.uniform(0.5, 1.5) * 60)
            counts.append(sum(1 for _ in itertools.takewhile(lambda fault, end_s=share * 60: fault[0] < end_s, schedule)))
        assert abs(statistics.mean(counts) - share) < 4 * statistics.stdev(counts) / math.sqrt(len(counts))


def test_the_prediction_without_faults_is_the_time_of_steps_and_saves() -> None:
    times, steps = soak.TYPICAL, 1000
    outcome = soak.predict(times, steps, [])
    work_s = steps * times.step_s
    expected = work_s / (work_s + steps / soak.SAVE_EVERY * times.save_s + times.startup_s + times.compile_s + times.write_s)
    assert abs(float(outcome.goodput[0]) - expected) < 0.01


def test_the_prediction_is_the_sum_of_what_its_faults_cost() -> None:
    """Each interruption costs its time away, a start, and the steps since the last save, an interval more for a corrupted checkpoint."""
    times, steps = soak.TYPICAL, 3000
    without = float(soak.predict(times, steps, []).wall_s[0])
    for seed in range(20):
        schedule = scheduled(seed, 60.0, 30)
        outcome = soak.predict(times, steps, schedule)
        kinds = [kind for due_s, kind in schedule if due_s <= steps * times.step_s]
        starts = [kind for kind in kinds if kind in (*soak.FAILURES, "preempt")]
        interval_s, ready_s = soak.SAVE_EVERY * times.step_s, times.startup_s + times.compile_s + times.restore_s
        cost_s = sum(times.away_s.get(kind, times.away_s["kill"] + interval_s) + ready_s for kind in starts)
        cost_s += kinds.count("slow link") * times.slow_s
        assert abs(float(outcome.interruptions[0]) - len(starts)) <= 3
        slack_s = 3 * 70 + len(starts) * (interval_s + 1)
        assert without + cost_s - slack_s < float(outcome.wall_s[0]) < without + cost_s + slack_s
