"""Preemption, time limits and cancelling on a real Slurm: saved, requeued, resumed, and bitwise what an uninterrupted run computes."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.exit_codes import DONE, PREEMPTED
from tests.slurm import jobs

PACE_S = 0.1
RANDOM_RUNS, RANDOM_STEPS, RANDOM_PACE_S, LATEST_S = 20, 60, 0.2, 14.0
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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_corpus(tmp_path_factory.mktemp("corpus"))


def uninterrupted(slurm: Any, directory: Path, corpus: Path, steps: int, nodes: int) -> Arrays:
    """Return what a run ends with that nothing disturbs."""
    run = jobs.submit(slurm, directory, corpus, "reference", steps=steps, nodes=nodes)
    run.finishes()
    assert run.restarts() == 0
    return run.arrays()


@pytest.fixture(scope="module")
def reference(slurm_session: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    """Two ranks, 150 steps."""
    return uninterrupted(slurm_session, tmp_path_factory.mktemp("reference"), corpus, 150, 2)


def test_a_preempted_run_saves_requeues_and_ends_bitwise_equal(slurm: Any, tmp_path: Path, corpus: Path, reference: Arrays) -> None:
    run = jobs.submit(slurm, tmp_path, corpus, "low", steps=150, pace_s=PACE_S, overrides=["checkpoint.every=0"])
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


def test_a_signal_in_every_phase_is_honoured_and_nothing_is_lost(slurm: Any, tmp_path: Path, corpus: Path, reference: Arrays) -> None:
    """One run whose starts are struck in one phase after another; the last one finishes."""
    run = jobs.submit(slurm, tmp_path, corpus, "phases", steps=150, strikes=STRIKES)
    run.finishes(timeout_s=900)
    assert jobs.strikes_made(tmp_path, "phases") == [place for place, _, _ in STRIKES]
    assert run.codes() == [PREEMPTED] * len(STRIKES) + [DONE], run.log
    run.nothing_was_lost()
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_the_time_limit_saves_and_requeues(slurm: Any, tmp_path: Path, corpus: Path, reference: Arrays) -> None:
    """Slurm sends the signal 10 s before the limit of a minute, or up to half a minute earlier: it looks only so often."""
    limits = ["slurm.signal_grace_s=10"]
    run = jobs.submit(slurm, tmp_path, corpus, "limited", steps=150, minutes="1", pace_s=0.4, cluster=limits)
    run.finishes()
    assert run.restarts() >= 1
    assert run.codes() == [PREEMPTED] * run.restarts() + [DONE]
    run.nothing_was_lost()
    jobs.assert_bitwise_equal(run.arrays(), reference)


def test_a_cancelled_run_saves_and_is_not_requeued(slurm: Any, tmp_path: Path, corpus: Path) -> None:
    run = jobs.submit(slurm, tmp_path, corpus, "cancelled", steps=10**6, pace_s=PACE_S, overrides=["checkpoint.every=0"])
    run.reaches(10)
    slurm.run("scancel", run.job)
    assert slurm.wait_for_job(run.job) == "CANCELLED"
    assert run.restarts() == 0
    assert run.codes() == [PREEMPTED]
    assert run.saved() == run.step() >= 10


def test_a_cancelled_point_of_a_sweep_saves_and_is_not_requeued(slurm: Any, tmp_path: Path, corpus: Path) -> None:
    point, other = jobs.sweep(slurm, tmp_path, corpus, "points", count=2, steps=10**6, pace_s=PACE_S, at_once=2)
    point.reaches(10)
    slurm.run(jobs.RIDGE, "cancel", point.directory)
    assert slurm.wait_for_job(point.job) == "FAILED", "ended by itself with the code that says it was asked to"
    assert point.codes() == [PREEMPTED]
    assert point.saved() == point.step() >= 10
    assert point.restarts() == 0
    assert slurm.job_state(other.job) == "RUNNING", "its neighbour goes on"


def test_twenty_runs_interrupted_at_random_moments_all_save_and_resume(slurm: Any, tmp_path: Path, corpus: Path) -> None:
    """An array of twenty runs that differ in nothing that computes; Slurm signals each once, at a moment of its own."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    reference = uninterrupted(slurm, tmp_path, corpus, RANDOM_STEPS, 1)
    points = jobs.sweep(slurm, tmp_path, corpus, "twenty", count=RANDOM_RUNS, steps=RANDOM_STEPS, pace_s=RANDOM_PACE_S, at_once=4)
    strikers = [threading.Thread(target=point.is_struck_after, args=(rng.uniform(0, LATEST_S),), daemon=True) for point in points]
    for striker in strikers:
        striker.start()
    for point in points:
        point.finishes(timeout_s=900)
    for index, point in enumerate(points):
        codes = point.codes()
        assert codes[-1] == DONE, f"seed {seed}, run {index}: {codes}"
        assert set(codes[:-1]) <= {PREEMPTED, 143}, f"seed {seed}, run {index}: {codes}"
        assert len(codes) == 2, f"seed {seed}, run {index}: {codes}"
        point.nothing_was_lost()
        jobs.assert_bitwise_equal(point.arrays(), reference)
