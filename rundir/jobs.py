"""Where things of submitted jobs lie in a run directory, and the record of the jobs.

slurm/jobs.jsonl             one line per job that was submitted
slurm/job-<job id>.log       what the job script and its ranks print (of an array: job-<array id>_<task>.log)
slurm/<n>/                   the n-th submission: job.sh, config.yaml, cluster.yaml, code/, environment-<job id>-<restart>.txt
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.rundir.jsonl import LineFile, read_jsonl

DIRECTORY = "slurm"
JOBS_FILE = "jobs.jsonl"
SCRIPT = "job.sh"
CONFIG = "config.yaml"
CLUSTER = "cluster.yaml"
CODE = "code"


@dataclass(frozen=True)
class JobRecord:
    """One submitted job."""

    job: str
    """Job id."""
    time: str
    """When, in UTC."""
    kind: str
    """train, sweep or data."""
    cluster: str
    slurm_cluster: str | None
    """Name of the Slurm cluster where sbatch gave one (federations)."""
    submission: int
    """Number of the directory of its script."""
    details: Mapping[str, Any] = field(default_factory=dict)


def slurm_directory(run_dir: Path) -> Path:
    """Return the directory of submitted jobs inside a run directory."""
    return run_dir / DIRECTORY


def next_submission(run_dir: Path) -> int:
    """Return the number of the next submission, from 1."""
    directory = slurm_directory(run_dir)
    taken = [int(path.name) for path in directory.iterdir() if path.name.isdecimal()] if directory.is_dir() else []
    return max(taken, default=0) + 1


def record_job(run_dir: Path, record: JobRecord) -> None:
    """Append a job to the record."""
    file = LineFile(slurm_directory(run_dir) / JOBS_FILE)
    try:
        file.append((json.dumps(asdict(record)) + "\n").encode())
    finally:
        file.close()


def log_pattern(run_dir: Path) -> str:
    """Return Slurm's pattern of the log of a job."""
    return str(slurm_directory(run_dir) / "job-%j.log")


def log_name(record: JobRecord) -> str:
    """Return the name of a job's log in the directory of jobs."""
    return f"job-{record.job}.log"


def read_jobs(run_dir: Path) -> list[JobRecord]:
    """Return the jobs submitted from a run directory, oldest first. Raises UserError when there is no such directory or record."""
    path = slurm_directory(run_dir) / JOBS_FILE
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is no directory")
    if not path.exists():
        raise UserError(f"no job was submitted from {run_dir} (looked for {path})")
    records = []
    for number, line in read_jsonl(path):
        try:
            records.append(JobRecord(**line))
        except TypeError:
            raise UserError(f"{path}:{number}: not a record of a job") from None
    return records
