"""The files of submitted jobs in a run directory: submissions, the record of the jobs, and the attempts to run them.

slurm/jobs.jsonl             one line per submitted job
slurm/job-<job id>.log       output of the job script and its ranks (of an array: job-<array id>_<task>.log)
slurm/<n>/                   the n-th submission: job.sh, config.yaml, cluster.yaml, code/, environment-<job id>-<restart>.txt
attempts.jsonl               one line per run of the job script, which writes it
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.rundir.files import refuse_link
from ridgeline.rundir.jsonl import LineFile, read_typed_jsonl

DIRECTORY = "slurm"
JOBS_FILE = "jobs.jsonl"
LOG = "job-%j.log"
"""Slurm's pattern of the name of a log; that of a task of an array has `%A_%a` for `%j`."""
ATTEMPTS_FILE = "attempts.jsonl"
SCRIPT = "job.sh"
CONFIG = "config.yaml"
CLUSTER = "cluster.yaml"
CODE = "code"
_JOB_ID, _CLUSTER_NAME = re.compile(r"\w{1,64}"), re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class JobRecord:
    """One submitted job."""

    job: str
    """Job id."""
    time: str
    """When it was submitted, ISO 8601."""
    kind: str = "train"
    """train, sweep or data."""
    cluster: str = ""
    slurm_cluster: str | None = None
    """Name of the Slurm cluster, in a federation."""
    submission: int = 0
    """Number of the directory of its script."""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def points(self) -> list[int]:
        """Points of a sweep that the job trains."""
        points: list[int] = self.details["points"]
        return points

    @property
    def problem(self) -> str | None:
        """What a damaged or altered record has that `ridge submit` does not write; None when nothing. The values go to Slurm's commands."""
        points = self.details.get("points")
        if self.kind == "sweep" and not (isinstance(points, list) and all(type(point) is int for point in points)):
            return "details.points must be a list of numbers"
        if not _JOB_ID.fullmatch(self.job):
            return f"job must be the id of a job, got {self.job!r}"
        if self.slurm_cluster is not None and not _CLUSTER_NAME.fullmatch(self.slurm_cluster):
            return f"slurm_cluster must be the name of a cluster, got {self.slurm_cluster!r}"
        return None

    @property
    def time_s(self) -> float:
        """When it was submitted, seconds since 1970. Raises UserError when the record holds no such time."""
        try:
            return datetime.fromisoformat(self.time).timestamp()
        except ValueError:
            raise UserError(f"job {self.job} in {JOBS_FILE}: time '{self.time}' is not an ISO 8601 time") from None


@dataclass(frozen=True)
class Attempt:
    """One run of the job script."""

    job: int
    """Job id."""
    begin: float
    """Wall clock, seconds since 1970; whole seconds."""
    end: float
    exit_code: int
    restart: int = 0
    """Slurm's restart count of the job."""
    checkpoint: str = ""
    """Name of the newest checkpoint at the end."""


def slurm_directory(run_dir: Path) -> Path:
    """Return the directory of submitted jobs inside a run directory."""
    return run_dir / DIRECTORY


def next_submission(run_dir: Path) -> int:
    """Return the number of the next submission, from 1.

    Raises UserError where the directory of submissions or a log in it is a symbolic link.
    """
    directory = slurm_directory(run_dir)
    refuse_log_links(run_dir)
    entries = directory.iterdir() if directory.is_dir() else []
    return max((int(entry.name) for entry in entries if entry.name.isdecimal()), default=0) + 1


def refuse_log_links(run_dir: Path) -> None:
    """Raise UserError where the directory of submissions or a log in it, which Slurm would write through, is a symbolic link."""
    directory = slurm_directory(run_dir)
    refuse_link(directory)
    for log in directory.glob(LOG.replace("%j", "*")):
        refuse_link(log)


def record_job(run_dir: Path, record: JobRecord) -> None:
    """Append a job to the record."""
    refuse_link(slurm_directory(run_dir))
    file = LineFile(slurm_directory(run_dir) / JOBS_FILE)
    try:
        file.append((json.dumps(asdict(record)) + "\n").encode())
    finally:
        file.close()


def log_pattern(run_dir: Path) -> str:
    """Return Slurm's pattern of the log of a job."""
    return str(slurm_directory(run_dir) / LOG)


def log_name(record: JobRecord) -> str:
    """Return the name of a job's log in the directory of jobs."""
    return LOG.replace("%j", record.job)


def read_jobs(run_dir: Path) -> list[JobRecord]:
    """Return the jobs submitted from a run directory, oldest first. Raises UserError when there is no such directory or job."""
    path = slurm_directory(run_dir) / JOBS_FILE
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a directory")
    records = read_typed_jsonl(path, JobRecord) if path.exists() else []
    for record in records:
        if record.problem is not None:
            raise UserError(f"{path} is damaged: {record.problem}")
    if not records:
        raise UserError(f"no job was submitted from {run_dir} (looked for {path})")
    return records


def read_attempts(run_dir: Path) -> list[Attempt]:
    """Return the runs of the job script in order of their begin; [] when there was none. Raises UserError when damaged."""
    path = run_dir / ATTEMPTS_FILE
    return sorted(read_typed_jsonl(path, Attempt), key=lambda attempt: attempt.begin) if path.is_file() else []


def newest_cluster_file(run_dir: Path) -> Path | None:
    """Return the cluster file of the newest submission; None when there is none."""
    files = [path for path in slurm_directory(run_dir).glob(f"*/{CLUSTER}") if path.parent.name.isdecimal()]
    return max(files, key=lambda path: int(path.parent.name), default=None)
