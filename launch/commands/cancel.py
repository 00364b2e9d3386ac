"""`ridge cancel RUN`."""

from __future__ import annotations

from pathlib import Path

import click

from configs.errors import UserError
from launch.options import json_option
from launch.tables import print_json


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option
def cancel(run: Path, as_json: bool) -> None:
    """Cancel the jobs of RUN that wait or run. A running one saves first, and is not requeued."""
    from launch.slurm import sweep
    from launch.slurm.state import job_states, run_command

    cancelled = []
    for record in sweep.jobs_of(run):
        if all(state.ended for state in job_states(record.job, record.slurm_cluster)):
            continue
        clusters = [f"--clusters={record.slurm_cluster}"] if record.slurm_cluster else []
        done = run_command(["scancel", *clusters, record.job])
        if done.returncode:
            raise UserError(f"scancel refused job {record.job}: {' '.join(done.stderr.split())}")
        cancelled.append(record.job)
    if as_json:
        print_json({"cancelled": cancelled})
    elif cancelled:
        click.echo(f"cancelled: {', '.join(cancelled)}")
    else:
        click.echo("no job of this run waits or runs")
