"""Run the trials of a study through Slurm: submit a job for every missing trial and wait for all jobs.

A trial whose job is pending or running is not submitted again, so the wait can be interrupted with Ctrl-C and resumed by the same command.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.launch.slurm import filesystems, shape
from ridgeline.launch.slurm.state import FORGOTTEN, JobState, job_states
from ridgeline.launch.slurm.submit import Submitter
from ridgeline.launch.trials.engine import Query
from ridgeline.launch.trials.failure import failure_reason
from ridgeline.launch.trials.study import Trial, Trials
from ridgeline.launch.trials.submission import Submission
from ridgeline.rundir import jobs as job_files
from ridgeline.rundir.progress import run_progress

POLL_S = 3.0
REPORT_EVERY_S = 30.0


@dataclass(frozen=True)
class Site:
    """Where and how trials are submitted."""

    cluster: ClusterConfig
    time: str | None
    preflight: bool
    at_once: int | None
    """Most jobs that are pending or running at the same time; None: no limit."""


def run_all(
    trials: Trials,
    site: Site,
    log: Callable[[str], None],
    query: Query = job_states,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Submit the missing trials and wait until every trial has ended. Ctrl-C ends the wait, not the jobs."""
    missing = trials.to_do()
    states = trials.files.last_states([trial.name for trial in missing], query)
    waiting = {trial.name: trial for trial in missing if trial.name in states and not states[trial.name].ended}
    todo = [trial for trial in missing if trial.name not in waiting]
    done = len(trials.trials) - len(missing)
    if done or waiting:
        log(f"{done} of {len(trials.trials)} runs are finished, {len(waiting)} more are pending or running")
    reported: dict[str, str] = {}
    slept_s = 0.0
    while todo or waiting:
        while todo and (site.at_once is None or len(waiting) < site.at_once):
            trial = todo.pop(0)
            log(f"{trial.name}: job {_submit(trials, trial, site)} submitted")
            waiting[trial.name] = trial
        for name, trial in list(waiting.items()):
            state = trials.files.last_states([name], query)[name]
            text = _describe(trial, state)
            if text != reported.get(name) and (state.ended or slept_s >= REPORT_EVERY_S or name not in reported):
                log(f"{name}: {text}")
                reported[name] = text
            if state.ended:
                del waiting[name]
                _record_end(trials, trial, state, log)
        if waiting:
            slept_s = slept_s + POLL_S if slept_s < REPORT_EVERY_S else 0.0
            sleep(POLL_S)


def _submit(trials: Trials, trial: Trial, site: Site) -> str:
    """Submit one trial; return its job id. Raises UserError if Slurm or the checks before it refuse the job."""
    assert trial.setting.nodes is not None
    trials.prepare(trial)
    size = shape.job_shape(site.cluster, trial.setting.nodes, site.time)
    by = Submitter.here(datetime.now(UTC))
    jobs = Submission(trials.files, trial.name, {trial.name: trial.config}, site.cluster, size, by, site.preflight)
    errors = [finding.message for finding in jobs.lint(filesystems.read_mounts()) if finding.error]
    if errors:
        raise UserError(f"{trial.name}: " + "; ".join(errors))
    (number,) = jobs.submit()
    return number


def _describe(trial: Trial, state: JobState) -> str:
    if state.waiting or state.state == "CONFIGURING":
        reason = f" ({state.reason})" if state.reason else ""
        return f"job {state.job} is pending{reason}" + (f": {state.advice}" if state.advice else "")
    now = run_progress(trial.config.directory)
    where = "starting" if now.step is None else f"step {now.step} of {trial.config.trainer.steps}"
    return f"job {state.job} {state.state.lower()}, {where}"


def _record_end(trials: Trials, trial: Trial, state: JobState, log: Callable[[str], None]) -> None:
    """Store why an ended job left no finished run. A cancelled trial counts as missing, not as failed."""
    if trials.measured(trial) is not None or state.state == "CANCELLED":
        return
    record = trials.files.jobs(trial.name)[-1]
    log_file = job_files.slurm_directory(trial.config.directory) / job_files.log_name(record)
    ends = {"TIMEOUT": "time limit reached", "OUT_OF_MEMORY": "out of host memory", "NODE_FAIL": "node failure"}
    ended_well = state.state in ("COMPLETED", FORGOTTEN) and not state.exit_code
    reason = ends.get(state.state) or (None if ended_well else failure_reason(log_file, state.exit_code or 0))
    reason = trials.record_failure(trial, reason, job=state.job, state=state.state, log=str(log_file))
    log(f"{trial.name}: failed: {reason}")
