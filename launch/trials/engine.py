"""The trials of a sweep or a study on disk: where each keeps its files, the state of its job, how far it is, why it failed.

A `Layout` declares the files; everything else is common to both. `ridge sweep` (sweep.py) and the studies of `ridge scale` and
`ridge bench sweep` (study.py) differ in the layout, in how a trial is named, and in which trials run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.diff import diff
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.configs.schema import Config
from ridgeline.launch.slurm.pending import STUCK
from ridgeline.launch.slurm.state import FORGOTTEN, JobState, job_states
from ridgeline.rundir import jobs as job_files
from ridgeline.rundir.directory import METRICS_FILE
from ridgeline.rundir.files import Record, read_record
from ridgeline.rundir.jobs import JobRecord
from ridgeline.rundir.jsonl import read_last_jsonl
from ridgeline.rundir.liveness import FINISHED, NOT_STARTED, RUNNING, run_state
from ridgeline.rundir.progress import run_progress

MISSING = "not submitted"
DIGITS = 3
"""Least digits of the name of a trial of an array, which is its number."""

Query = Callable[[str, str | None], Sequence[JobState]]
"""(job id, Slurm cluster) -> its state, for an array one per task; `job_states`, unless a test replaces it."""


@dataclass(frozen=True)
class Layout:
    """Files of a trial below the root directory; `{name}` stands for the trial's name."""

    run: str
    """Run directory."""
    config: str
    """Config it was trained with."""
    array: bool
    """True: Slurm job arrays over many trials, recorded in the root. False: one job per trial, recorded in its run directory."""
    log: str
    """Output of a trial on this machine."""
    failure: str
    """Why a trial failed on this machine, or as a job of its own."""


STUDY = Layout("runs/{name}", "configs/{name}.yaml", array=False, log="logs/{name}.log", failure="failures/{name}.json")
SWEEP = Layout("{name}", "{name}/config.yaml", array=True, log="logs/{name}.log", failure="failures/{name}.json")


@dataclass(frozen=True)
class Status:
    """State and results of a trial so far."""

    state: str
    """finished, not submitted, a state of Slurm in lower case or of a process of this machine, or what is wrong with its files.

    A pending job that waiting does not start is `held` or `blocked`.
    """
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    """Training loss of the last log line."""
    evaluations: Mapping[str, float] | None = None
    """Evaluation set -> its last loss."""
    tokens_per_s: float | None = None
    restarts: int | None = None
    exit_code: int | None = None
    busy: bool = False
    """Pending or running."""
    problem: str | None = None
    """Why it failed on this machine, or why its job does not start and what a person can do."""

    @property
    def finished(self) -> bool:
        """Whether the last step was reached."""
        return self.state == FINISHED


class FailureRecord(Record):
    """Why a trial failed; further keys are facts for a reader of the file."""

    reason: str


class TrialFiles:
    """The files of the trials in one directory."""

    def __init__(self, root: Path, layout: Layout) -> None:
        self.root, self.layout = root, layout

    def run_dir(self, name: str) -> Path:
        """Return the run directory of a trial."""
        return self.root / self.layout.run.format(name=name)

    def config_file(self, name: str) -> Path:
        """Return the config file of a trial."""
        return self.root / self.layout.config.format(name=name)

    def log_file(self, name: str) -> Path:
        """Return the file for a trial's output, its directory created."""
        return _in_new_directory(self.root / self.layout.log.format(name=name))

    def names(self, pattern: str = "*") -> list[str]:
        """Return the sorted names of the trials that have a config file."""
        before, _, after = self.layout.config.partition("{name}")
        found = (str(path.relative_to(self.root)) for path in self.root.glob(self.layout.config.format(name=pattern)))
        return sorted(path.removeprefix(before).removesuffix(after) for path in found)

    def config(self, name: str) -> Config:
        """Return the config that a trial was trained with. Raises UserError."""
        return from_resolved(self.config_file(name))

    def changes(self, name: str, config: Config) -> dict[str, tuple[Any, Any]]:
        """Return key -> (stored, wanted) of the keys in which a config differs from the stored one."""
        return {key: (stored, wanted) for key, stored, wanted in diff(self.config(name), config)}

    def record_failure(self, name: str, reason: str, **facts: Any) -> None:
        """Store why a trial failed."""
        path = _in_new_directory(self._failure_file(name))
        path.write_text(json.dumps({"trial": name, "reason": reason, **facts}, indent=1) + "\n", encoding="utf-8")

    def failure(self, name: str) -> str | None:
        """Return why a trial failed; None without a stored failure. Raises UserError for an unreadable file."""
        found = read_record(self._failure_file(name), FailureRecord)
        return None if found is None else found.reason

    def forget_failure(self, name: str) -> None:
        """Remove a stored failure, so that the trial runs again."""
        self._failure_file(name).unlink(missing_ok=True)

    def _failure_file(self, name: str) -> Path:
        return self.root / self.layout.failure.format(name=name)

    def jobs(self, name: str) -> list[JobRecord]:
        """Return the jobs that trained a trial, oldest first; empty without any."""
        if not self.layout.array:
            return _recorded_jobs(self.run_dir(name))
        return [record for record in _recorded_jobs(self.root) if int(name) in record.points]

    def last_states(self, names: Iterable[str], query: Query = job_states) -> dict[str, JobState]:
        """Return the newest job state of every trial that was submitted."""
        found: dict[str, JobState] = {}
        if not self.layout.array:
            for name in names:
                for record in self.jobs(name)[-1:]:
                    found[name] = next(iter(query(record.job, record.slurm_cluster)), JobState(record.job, FORGOTTEN))
            return found
        by_index = {int(name): name for name in names}
        for record in _recorded_jobs(self.root):
            for state in query(record.job, record.slurm_cluster):
                indices = record.points if state.task is None else [state.task]
                found |= {by_index[index]: state for index in indices if index in by_index}
        return found

    def status(self, name: str, job: JobState | None) -> Status:
        """Return how far a trial is. Damaged files of the run are reported as its state.

        job: state of its newest job; None: never submitted.
        """
        run_dir = self.run_dir(name)
        try:
            progress = run_progress(run_dir)
            local = run_state(run_dir, progress)
            problem = None if job is not None or local in (FINISHED, RUNNING) else self.failure(name)
            metrics = read_last_jsonl(run_dir / METRICS_FILE)
        except UserError as error:
            return Status(f"unreadable: {error}")
        evaluations: dict[str, float] = {}
        for record in metrics:
            evaluations |= {key.split("/")[1]: value for key, value in record.items() if key.startswith("eval/") and key.endswith("/loss")}
        return Status(
            state=FINISHED if progress.finished else _state_name(job, local, problem),
            step=progress.step,
            steps=progress.steps,
            loss=progress.loss,
            evaluations=evaluations,
            tokens_per_s=progress.tokens_per_s,
            restarts=max(0, progress.starts - 1) if progress.starts else None,
            exit_code=job.exit_code if job is not None else None,
            busy=local == RUNNING or (job is not None and not job.ended),
            problem=f"{job.described}: {job.advice}" if job is not None and job.waiting in STUCK else problem,
        )


def _state_name(job: JobState | None, local: str, problem: str | None) -> str:
    """Return the state of an unfinished trial. `local`: that of its process, which counts where no job is pending or running."""
    if local == RUNNING and (job is None or job.ended):
        return RUNNING
    if job is None:
        return "failed" if problem is not None else MISSING if local == NOT_STARTED else local
    if job.waiting in STUCK:
        return job.waiting
    return "not finished" if job.state == FORGOTTEN else job.state.lower()


def _recorded_jobs(directory: Path) -> list[JobRecord]:
    return job_files.read_jobs(directory) if (job_files.slurm_directory(directory) / job_files.JOBS_FILE).exists() else []


def _in_new_directory(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
