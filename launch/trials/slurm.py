"""Trials through Slurm: every missing one submitted as a job of its own, then waited for.

A trial whose job still waits or runs is not submitted again: the wait may be broken off with Ctrl-C and taken up by the same command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.launch.slurm import filesystems, lint, shape
from ridgeline.launch.slurm import submit as jobs
from ridgeline.launch.slurm.progress import run_progress
from ridgeline.launch.slurm.state import FORGOTTEN, JobState, job_states
from ridgeline.launch.trials.engine import Trial, Trials
from ridgeline.launch.trials.failure import failure_words
from ridgeline.rundir import jobs as places

POLL_S = 3.0
TELL_EVERY_S = 30.0


@dataclass(frozen=True)
class Site:
    """Where and how trials are submitted."""

    cluster: ClusterConfig
    time: str | None
    preflight: bool
    at_once: int | None
    """Jobs that may wait or run at once; None: all."""


def run_all(
    trials: Trials,
    site: Site,
    say: Callable[[str], None],
    ask: Callable[[str, str | None], Sequence[JobState]] = job_states,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Submit what is missing and wait until every trial has ended. Ctrl-C ends the waiting, not the jobs."""
    waiting = {trial.name: trial for trial in trials.to_do() if (state := _state(trial, ask)) is not None and not state.ended}
    todo = [trial for trial in trials.to_do() if trial.name not in waiting]
    done = len(trials.trials) - len(todo) - len(waiting)
    if done or waiting:
        say(f"{done} of {len(trials.trials)} runs are there already, {len(waiting)} more wait or run")
    told: dict[str, str] = {}
    slept_s = 0.0
    while todo or waiting:
        while todo and (site.at_once is None or len(waiting) < site.at_once):
            trial = todo.pop(0)
            say(f"{trial.name}: job {_submit(trials, trial, site)} submitted")
            waiting[trial.name] = trial
        for name, trial in list(waiting.items()):
            state = _state(trial, ask)
            assert state is not None
            words = _words(trial, state)
            if words != told.get(name) and (state.ended or slept_s >= TELL_EVERY_S or name not in told):
                say(f"{name}: {words}")
                told[name] = words
            if state.ended:
                del waiting[name]
                _settle(trials, trial, state, say)
        if waiting:
            slept_s = slept_s + POLL_S if slept_s < TELL_EVERY_S else 0.0
            sleep(POLL_S)


def _submit(trials: Trials, trial: Trial, site: Site) -> str:
    """Submit one trial; return its job id. Raises UserError when Slurm or the checks before it refuse."""
    assert trial.setting.nodes is not None
    trials.prepare(trial)
    config = shape.placed(trial.config, site.cluster)
    size = shape.job_shape(site.cluster, trial.setting.nodes, site.time)
    errors = [f.message for f in lint.lint(config, site.cluster, size, _mounts()) if f.error]
    if errors:
        raise UserError(f"{trial.name}: " + "; ".join(errors))
    by = jobs.Submitter.here(datetime.now(UTC))
    return jobs.submit(jobs.training_job(config, site.cluster, size, by, preflight=site.preflight), config, by, {"nodes": size.nodes})


def _mounts() -> list[filesystems.Mount]:
    return filesystems.read_mounts(Path("/proc/mounts").read_text())


def _state(trial: Trial, ask: Callable[[str, str | None], Sequence[JobState]]) -> JobState | None:
    """Return the state of a trial's job; None when it was never submitted."""
    if not (places.slurm_directory(trial.config.directory) / places.JOBS_FILE).exists():
        return None
    record = places.read_jobs(trial.config.directory)[-1]
    return next(iter(ask(record.job, record.slurm_cluster)), JobState(record.job, FORGOTTEN))


def _words(trial: Trial, state: JobState) -> str:
    if state.state in ("PENDING", "CONFIGURING"):
        return f"job {state.job} waits ({state.reason})" if state.reason else f"job {state.job} waits"
    now = run_progress(trial.config.directory)
    where = "starting" if now.step is None else f"step {now.step} of {trial.config.trainer.steps}"
    return f"job {state.job} {state.state.lower()}, {where}"


def _settle(trials: Trials, trial: Trial, state: JobState, say: Callable[[str], None]) -> None:
    """Record why an ended job made no finished run. A cancelled one is missing, not failed."""
    if trials.measured(trial) is not None or state.state == "CANCELLED":
        return
    record = places.read_jobs(trial.config.directory)[-1]
    log = places.slurm_directory(trial.config.directory) / places.log_name(record)
    ends = {"TIMEOUT": "the time limit ended it", "OUT_OF_MEMORY": "out of host memory", "NODE_FAIL": "a node failed"}
    ended_well = state.state in ("COMPLETED", FORGOTTEN) and not state.exit_code
    reason = ends.get(state.state) or (trials.why_unmeasured(trial) if ended_well else failure_words(log, state.exit_code or 0))
    trials.record_failure(trial, reason, job=state.job, state=state.state, log=str(log))
    say(f"{trial.name}: failed: {reason}")
