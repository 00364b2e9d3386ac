"""Submit a job: write the script with a snapshot of code and config, call sbatch, and record the job."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.mesh import with_mesh
from ridgeline.configs.schema import Config
from ridgeline.launch.slurm import container, snapshot
from ridgeline.launch.slurm.elastic import elastic_job
from ridgeline.launch.slurm.script import Job, commented, job_script, kept_environment
from ridgeline.launch.slurm.shape import JobShape
from ridgeline.launch.slurm.state import JobState, job_states
from ridgeline.rundir import jobs as places

SBATCH_TIMEOUT_S = 120
SUBMISSION_COMMENT = "this submission: config, cluster file, code"
_FALLBACK = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"}


@dataclass(frozen=True)
class Submitter:
    """The submitting process; tests pass in their own."""

    environment: Mapping[str, str]
    workdir: Path
    now: datetime
    code: str
    """Version of the code, as text."""
    python: str

    @staticmethod
    def here(now: datetime) -> Submitter:
        """Return the values of this process."""
        return Submitter(os.environ, Path.cwd(), now, str(snapshot.code_state()), sys.executable)


def with_environment(cluster: ClusterConfig, environment: Mapping[str, str]) -> ClusterConfig:
    """Return the cluster with account, partition and QOS from SBATCH_* variables where its file leaves them unset.

    For sbatch these variables override the script, so they are written into the script and removed from its environment (see `sbatch`).
    """
    found = {
        name: environment[variable]
        for name, variable in _FALLBACK.items()
        if getattr(cluster.slurm, name) is None and environment.get(variable)
    }
    return cluster.model_copy(update={"slurm": cluster.slurm.model_copy(update=found)})


def training_job(config: Config, cluster: ClusterConfig, shape: JobShape, by: Submitter, *, preflight: bool = True) -> Job:
    """Return the job that trains a config (whose run directory is absolute)."""
    run_dir = config.directory
    number = places.next_submission(run_dir)
    return Job(
        name=config.name,
        title=f"Trains '{config.name}'.",
        written=f"{by.code}, {by.now.isoformat(sep=' ', timespec='seconds')}",
        root=run_dir,
        directory=places.slurm_directory(run_dir) / str(number),
        variables=[f"RUN={shlex.quote(str(run_dir))}", commented(f'JOB="$RUN/{places.DIRECTORY}/{number}"', SUBMISSION_COMMENT)],
        workdir=by.workdir,
        cluster=cluster,
        shape=shape,
        arguments=["train", f'"$JOB/{places.CONFIG}"'],
        python=interpreter(cluster, by.python),
        directories=container.needed_directories(config, run_dir, by.workdir),
        environment=kept_environment(by.environment),
        log=places.log_pattern(run_dir),
        preflight=preflight,
        elastic=elastic_job(config, cluster, shape),
    )


def interpreter(cluster: ClusterConfig, own: str) -> str:
    """Return the Python interpreter of a job's tasks."""
    software = cluster.software
    return software.python or ("python3" if software.container else own)


def write(job: Job, config: Config | None) -> Path:
    """Write a submission: script, code, cluster file, and the config with its mesh resolved; return the script. Raises UserError."""
    try:
        job.directory.mkdir(parents=True)
        snapshot.take_snapshot(job.directory / places.CODE)
        (job.directory / places.CLUSTER).write_text(to_yaml(job.cluster), encoding="utf-8")
        if config is not None:  # with sizes: with fewer devices it fails instead of training on a smaller mesh
            (job.directory / places.CONFIG).write_text(to_yaml(with_mesh(config, job.shape.devices)), encoding="utf-8")
        script = job.directory / places.SCRIPT
        script.write_text(job_script(job), encoding="utf-8")
        script.chmod(0o755)
    except OSError as error:
        raise UserError(f"cannot write the job into {job.directory}: {error.strerror or error}") from error
    return script


def sbatch(script: Path, environment: Mapping[str, str], options: Sequence[str] = ()) -> tuple[str, str | None]:
    """Submit a script; return job id and, in a federation, the Slurm cluster. Raises UserError with sbatch's message."""
    if shutil.which("sbatch", path=environment.get("PATH")) is None:
        raise UserError(f"sbatch is not on PATH: submit on a login node of the cluster; the script is {script}")
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    env = {name: value for name, value in environment.items() if not name.startswith(("SLURM_", "SBATCH_")) or name in kept}
    command = ["sbatch", "--parsable", *options, str(script)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SBATCH_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch did not return within {SBATCH_TIMEOUT_S} s; `squeue --me` shows whether the job was submitted") from None
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"sbatch refused the job: {reason}; the script is {script}")
    job, _, slurm_cluster = done.stdout.strip().splitlines()[-1].partition(";")
    return job, slurm_cluster or None


def refuse_second_job(run_dir: Path, query: Callable[[str, str | None], Sequence[JobState]] = job_states) -> None:
    """Raise UserError if a job of this run is pending or running: two jobs must not write into one run directory."""
    if not (places.slurm_directory(run_dir) / places.JOBS_FILE).exists():
        return
    for record in places.read_jobs(run_dir):
        for state in query(record.job, record.slurm_cluster):
            if not state.ended:
                raise UserError(f"job {state.job} of {run_dir} is {state.described}: `ridge cancel` it first, or choose another run_dir")


def submit(job: Job, config: Config, by: Submitter, details: Mapping[str, Any]) -> str:
    """Write, submit and record a training job; return its id."""
    return hand_over(write(job, config), job, by, kind="train", details=details)


def hand_over(script: Path, job: Job, by: Submitter, *, kind: str, details: Mapping[str, Any], options: Sequence[str] = ()) -> str:
    """Submit a written script and record the job; return its id."""
    number, slurm_cluster = sbatch(script, by.environment, options)
    record = places.JobRecord(
        job=number,
        time=by.now.isoformat(timespec="seconds"),
        kind=kind,
        cluster=job.cluster.name,
        slurm_cluster=slurm_cluster,
        submission=int(job.directory.name),
        details=details,
    )
    places.record_job(job.root, record)
    return number
