"""`ridge cancel RUN`: cancel a run's Slurm jobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.tables import print_json
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.launch.slurm.state import JobState
    from ridgeline.rundir.jobs import JobRecord


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--now", is_flag=True, help="Let Slurm kill running jobs, which then have KillWait (often 30 s) to save.")
@json_option
def cancel(run: Path, now: bool, as_json: bool) -> None:
    """Cancel the pending and running jobs of RUN.

    A running job is asked to save, has as much time for it as it needs, and is not requeued.
    """
    from ridgeline.launch.slurm.state import job_states
    from ridgeline.launch.trials import sweep

    saving, cancelled = [], []
    for record in sweep.jobs_of(run):
        for state in job_states(record.job, record.slurm_cluster):
            if state.ended:
                continue
            if state.state == "RUNNING" and record.kind != "data" and not now and _request_save(record, state):
                saving.append(state.job)
            else:
                _call(record, "scancel", state.job)
                cancelled.append(state.job)
    if as_json:
        print_json({"saving": saving, "cancelled": cancelled})
        return
    if saving:
        click.echo(f"saving, then ending: {', '.join(saving)} (see `ridge status`; --now does not wait for the save)")
    if cancelled:
        click.echo(f"canceled: {', '.join(cancelled)}")
    if not saving and not cancelled:
        click.echo("this run has no pending or running job")


def _request_save(record: JobRecord, state: JobState) -> bool:
    """Send SIGTERM to the ranks only, and disable the requeue that the job script requests; return False if no rank runs.

    Slurm has no time limit for a job after this signal. The signal goes to each step by name, because `scancel --signal` on an array task
    mistakes a delivered signal for a rejected one and repeats it (Slurm 22.05).
    """
    _call(record, "scontrol", "update", f"JobId={state.job}", "Requeue=0")
    shown = _call(record, "squeue", "--steps", "--noheader", f"--jobs={state.job}", "--format=%i")
    steps = [step for step in shown.split() if step.rpartition(".")[2].isdecimal()]
    for step in steps:
        _call(record, "scancel", "--signal=TERM", step)
    return bool(steps)


def _call(record: JobRecord, program: str, *arguments: str) -> str:
    from ridgeline.launch.slurm.state import run_command

    clusters = [f"--clusters={record.slurm_cluster}"] if record.slurm_cluster else []
    done = run_command([program, *clusters, *arguments])
    if done.returncode:
        raise UserError(f"{program} rejected job {record.job}: {' '.join(done.stderr.split())}")
    return done.stdout
