"""`ridge logs RUN`: print the log of a run's Slurm job, or its train.log."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click

from ridgeline.cli.options import Int32Range
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.rundir.jobs import JobRecord

Log: TypeAlias = "tuple[Path, Callable[[], bool], Callable[[], str]]"
"""The file, whether its writer has ended, and the error for a file that does not exist yet."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--follow", "-f", is_flag=True, help="Print new lines as they arrive, until the job or process ends.")
@click.option("--rank", type=Int32Range(min=0), help="Print only the lines of this rank, without its label.")
@click.option("--job", help="Job id [default: the newest job of the run].")
@click.option("--lines", "-n", type=Int32Range(min=1), help="Print only the last N lines.")
def logs(run: Path, follow: bool, rank: int | None, job: str | None, lines: int | None) -> None:
    """Print the log of RUN's newest job: the output of the job script and of all ranks. Lines of a rank begin with its number.

    Of a run without jobs, prints train.log: what process 0 printed, over all starts.
    """
    from ridgeline.launch.slurm import logs as job_logs
    from ridgeline.launch.trials.sweep import jobs_of

    if follow and lines is not None:
        raise UserError("--lines and --follow exclude each other")
    records = jobs_of(run)
    path, ended, missing = _job_log(run, records, job) if records else _train_log(run, rank, job)
    if follow:
        source = job_logs.follow(path, ended)
    elif path.exists():
        source = job_logs.read_lines(path)
    else:
        raise UserError(missing())
    shown = job_logs.of_rank(source, rank if records else None)
    for line in deque(shown, maxlen=lines) if lines else shown:
        sys.stdout.write(line)
        sys.stdout.flush()


def _job_log(run: Path, records: Sequence[JobRecord], job: str | None) -> Log:
    from ridgeline.launch.slurm import logs as job_logs
    from ridgeline.launch.slurm.pending import STUCK
    from ridgeline.launch.slurm.state import job_states

    path, record = job_logs.log_file(run, records, job)

    def missing() -> str:
        found = job_states(record.job, record.slurm_cluster)
        states = ", ".join(sorted({state.state if state.waiting not in STUCK else state.described for state in found}))
        advice = next((f": {state.advice}" for state in found if state.waiting in STUCK), "; use --follow to wait for it")
        return f"job {record.job} has no log yet ({states}){advice}"

    told: set[str] = set()

    def ended() -> bool:
        found = job_states(record.job, record.slurm_cluster)
        for state in found:
            if state.waiting in STUCK and (line := f"ridge: job {state.job} is {state.described}: {state.advice}") not in told:
                told.add(line)
                click.echo(line, err=True)
        return all(state.ended for state in found)

    return path, ended, missing


def _train_log(run: Path, rank: int | None, job: str | None) -> Log:
    from ridgeline.rundir.directory import TRAIN_LOG
    from ridgeline.rundir.lease import live_holder

    path = run / TRAIN_LOG
    if job is not None:
        raise UserError(f"--job {job}: no job was submitted from {run}")
    if rank:
        raise UserError(f"--rank {rank}: {path} has the lines of process 0 only")

    return path, lambda: live_holder(run) is None, lambda: f"{run} has no {TRAIN_LOG}: no start has written one"
