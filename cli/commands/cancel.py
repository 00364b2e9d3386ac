"""`ridge cancel RUN`."""

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
@click.option("--now", is_flag=True, help="Let Slurm end running jobs: they have its KillWait (often 30 s) to save.")
@json_option
def cancel(run: Path, now: bool, as_json: bool) -> None:
    """Cancel the jobs of RUN that wait or run. A running one is told to save, has all the time it needs, and is not requeued."""
    from ridgeline.launch.slurm import sweep
    from ridgeline.launch.slurm.state import job_states

    saving, cancelled = [], []
    for record in sweep.jobs_of(run):
        for state in job_states(record.job, record.slurm_cluster):
            if state.ended:
                continue
            if state.state == "RUNNING" and record.kind != "data" and not now and _tell_to_save(record, state):
                saving.append(state.job)
            else:
                _call(record, "scancel", state.job)
                cancelled.append(state.job)
    if as_json:
        print_json({"saving": saving, "cancelled": cancelled})
        return
    if saving:
        click.echo(f"told to save and end: {', '.join(saving)} (`ridge status` shows when; --now does not wait for it)")
    if cancelled:
        click.echo(f"cancelled: {', '.join(cancelled)}")
    if not saving and not cancelled:
        click.echo("no job of this run waits or runs")


def _tell_to_save(record: JobRecord, state: JobState) -> bool:
    """Send SIGTERM to the ranks and only to them; Slurm starts no clock for that, and refuses the requeue that the script asks for.

    False: no rank runs, so there is nothing to save. Steps are named, since `scancel --signal` on the task of an array takes a delivered
    signal for refused and sends it again and again (22.05).
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
        raise UserError(f"{program} refused job {record.job}: {' '.join(done.stderr.split())}")
    return done.stdout
