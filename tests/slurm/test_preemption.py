"""Preemption, time limits and cancelling on a real Slurm: saved, requeued, resumed, and bitwise what an uninterrupted run computes."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.launch.exit_codes import DONE, PREEMPTED
from tests.slurm import jobs

STEPS, PACE_S = jobs.STEPS, 0.05
RANDOM_RUNS, RANDOM_PACE_S = 8, 0.1
"""Runs interrupted at random moments."""
Arrays = Mapping[str, np.ndarray]
STRIKES = [
    ["rendezvous", "job", 0],
    ["init", "job", 0],
    ["compile", "job", 1],
    ["first_step", "job", 0],
    ["restore", "job", 0],
    ["evaluation", "job", 1],
    ["save", "job", 0],
    ["data_wait", "rank", 1],
    ["step", "rank", 0],
]
"""Where each start is struck: Slurm signals all ranks, or a single rank gets the signal."""


def test_a_preempted_run_saves_requeues_and_ends_bitwise_equal(
    slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays
) -> None:
    run = jobs.submit(slurm, tmp_path, corpus, "low", steps=STEPS, pace_s=PACE_S, overrides=["checkpoint.every=0"], programs=programs)
    run.reaches(10)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 1\n")
    high = slurm.sbatch(urgent, "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null")
    slurm.wait_for_job(high, "COMPLETED")
    run.finishes()
    assert run.codes() == [PREEMPTED, DONE]
    assert run.restarts() == 1
    run.nothing_was_lost()
    starts = json.loads((run.directory / "run.json").read_text())["starts"]
    assert len(starts) == 2
    described = [event.fields["described"] for event in run.events() if event.kind == "cluster"]
    assert [cluster["restart"] for cluster in described] == [0, 1], "SLURM_RESTART_COUNT is in the event log"
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_a_signal_in_every_phase_is_honored_and_nothing_is_lost(slurm: Any, tmp_path: Path, corpus: Path, reference: Arrays) -> None:
    """One run whose starts are struck in one phase after another; the last one finishes. It compiles its programs itself."""
    run = jobs.submit(slurm, tmp_path, corpus, "phases", steps=STEPS, strikes=STRIKES, programs=tmp_path / "programs")
    run.finishes(timeout_s=1400)
    assert jobs.strikes_made(tmp_path, "phases") == [place for place, _, _ in STRIKES]
    assert run.codes() == [PREEMPTED] * len(STRIKES) + [DONE], run.log
    run.nothing_was_lost()
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_the_time_limit_saves_and_requeues(slurm: Any, tmp_path: Path, corpus: Path, programs: Path, reference: Arrays) -> None:
    """Slurm sends the signal 10 s before the limit of two minutes, or up to half a minute earlier: it looks only so often."""
    limits = ["slurm.signal_grace_s=10"]
    run = jobs.submit(slurm, tmp_path, corpus, "limited", steps=STEPS, minutes="2", pace_s=PACE_S, cluster=limits, programs=programs)
    run.finishes()
    assert run.restarts() >= 1
    assert run.codes() == [PREEMPTED] * run.restarts() + [DONE]
    run.nothing_was_lost()
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_a_cancelled_run_saves_and_is_not_requeued(slurm: Any, tmp_path: Path, corpus: Path, programs: Path) -> None:
    run = jobs.submit(slurm, tmp_path, corpus, "cancelled", steps=STEPS, pace_s=PACE_S, overrides=["checkpoint.every=0"], programs=programs)
    run.reaches(10)
    slurm.run("scancel", run.job)
    assert slurm.wait_for_job(run.job) == "CANCELLED"
    assert run.restarts() == 0
    assert run.codes() == [PREEMPTED]
    assert run.saved() == run.step() >= 10


def test_a_cancelled_point_of_a_sweep_saves_and_is_not_requeued(slurm: Any, tmp_path: Path, corpus: Path, programs: Path) -> None:
    point, other = jobs.sweep(slurm, tmp_path, corpus, "points", count=2, steps=STEPS, pace_s=PACE_S, at_once=2, programs=programs)
    point.reaches(10)
    slurm.run(jobs.RIDGE, "cancel", point.directory)
    assert slurm.wait_for_job(point.job) == "FAILED", "exited by itself with the code of a preemption"
    assert point.codes() == [PREEMPTED]
    assert point.saved() == point.step() >= 10
    assert point.restarts() == 0
    assert slurm.job_state(other.job) == "RUNNING", "the other point continues"


def test_runs_interrupted_at_random_moments_all_save_and_resume(slurm: Any, tmp_path: Path, corpus: Path) -> None:
    """An array of runs that differ in nothing that computes; Slurm signals each once, at a moment of its own.

    Every other moment is drawn from the time that a start takes to its first step, here and now; the others from the steps. The first
    points compile, at once, what later ones load; the run they are held against compiles by itself.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    undisturbed = jobs.submit(slurm, tmp_path, corpus, "reference", steps=STEPS, nodes=1)
    undisturbed.finishes()
    reference = undisturbed.arrays()
    moments = [jobs.Moment(step=rng.randrange(1, STEPS - 5)) if index % 2 else jobs.Moment(rng.random()) for index in range(RANDOM_RUNS)]
    programs = tmp_path / "programs"
    points = jobs.sweep(
        slurm, tmp_path, corpus, "random", count=RANDOM_RUNS, steps=STEPS, pace_s=RANDOM_PACE_S, at_once=4, programs=programs
    )
    jobs.strike_each(slurm, points, moments, jobs.start_s(undisturbed), timeout_s=1400)
    for point in points:
        point.finishes()
    for index, point in enumerate(points):
        codes = point.codes()
        assert codes[-1] == DONE, f"seed {seed}, run {index}: {codes}"
        assert set(codes[:-1]) <= {PREEMPTED, 143}, f"seed {seed}, run {index}: {codes}"
        assert len(codes) == 2, f"seed {seed}, run {index}: {codes}"
        point.nothing_was_lost()
        jobs.assert_bitwise_equal(point.arrays(), reference)
