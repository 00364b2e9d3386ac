"""`ridge logs RUN`."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import click

from ridgeline.configs.errors import UserError


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--follow", "-f", is_flag=True, help="Go on printing lines as they come, until the job ends.")
@click.option("--rank", type=click.IntRange(min=0), help="Only the lines of this rank, without its label.")
@click.option("--job", help="A job of this run (default: the newest).")
@click.option("--lines", "-n", type=click.IntRange(min=1), help="Only the last N lines.")
def logs(run: Path, follow: bool, rank: int | None, job: str | None, lines: int | None) -> None:
    """Print the log of RUN's newest job: the job script and all ranks, each line of a rank beginning with its number."""
    from ridgeline.launch.slurm import logs as job_logs
    from ridgeline.launch.slurm.state import job_states

    path, record = job_logs.log_file(run, job)
    if follow:
        if lines is not None:
            raise UserError("--lines shows the end of a log, --follow all of it as it grows: give one of them")
        source = job_logs.follow(path, lambda: all(state.ended for state in job_states(record.job, record.slurm_cluster)))
    elif path.exists():
        source = job_logs.read_lines(path)
    else:
        states = ", ".join(sorted({state.state for state in job_states(record.job, record.slurm_cluster)}))
        raise UserError(f"job {record.job} has written nothing yet ({states}); --follow waits for it")
    shown = job_logs.of_rank(source, rank)
    for line in deque(shown, maxlen=lines) if lines else shown:
        sys.stdout.write(line)
        sys.stdout.flush()
