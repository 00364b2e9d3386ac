"""`ridge logs RUN`: print the log of a run's Slurm job."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import click

from ridgeline.configs.errors import UserError


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--follow", "-f", is_flag=True, help="Print new lines as they arrive, until the job ends.")
@click.option("--rank", type=click.IntRange(min=0), help="Print only the lines of this rank, without its label.")
@click.option("--job", help="Job id [default: the newest job of the run].")
@click.option("--lines", "-n", type=click.IntRange(min=1), help="Print only the last N lines.")
def logs(run: Path, follow: bool, rank: int | None, job: str | None, lines: int | None) -> None:
    """Print the log of RUN's newest job: the output of the job script and of all ranks. Lines of a rank begin with its number."""
    from ridgeline.launch.slurm import logs as job_logs
    from ridgeline.launch.slurm.state import job_states
    from ridgeline.launch.trials.sweep import jobs_of

    path, record = job_logs.log_file(run, jobs_of(run), job)
    if follow:
        if lines is not None:
            raise UserError("--lines and --follow exclude each other")
        source = job_logs.follow(path, lambda: all(state.ended for state in job_states(record.job, record.slurm_cluster)))
    elif path.exists():
        source = job_logs.read_lines(path)
    else:
        states = ", ".join(sorted({state.state for state in job_states(record.job, record.slurm_cluster)}))
        raise UserError(f"job {record.job} has no log yet ({states}); use --follow to wait for it")
    shown = job_logs.of_rank(source, rank)
    for line in deque(shown, maxlen=lines) if lines else shown:
        sys.stdout.write(line)
        sys.stdout.flush()
