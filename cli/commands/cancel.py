"""`ridge cancel RUN`: stop a run on this machine, or cancel its Slurm jobs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.tables import print_json
from ridgeline.configs.errors import UserError
from ridgeline.rundir.lease import live_holder

if TYPE_CHECKING:
    from ridgeline.launch.slurm.state import JobState
    from ridgeline.rundir.jobs import JobRecord

POLL_S = 0.2


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--now",
    is_flag=True,
    help="Let Slurm kill running jobs, which then have KillWait (often 30 s) to save. On this machine: kill without a save.",
)
@json_option
def cancel(run: Path, now: bool, as_json: bool) -> None:
    """Stop RUN: its process on this machine, or its pending and running Slurm jobs.

    A running job saves, has as much time for it as it needs, and is not requeued. The command waits for a process on this machine.
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
    stopped = [] if saving or cancelled else _stop(run, now, quiet=as_json)
    if as_json:
        print_json({"saving": saving, "cancelled": cancelled, "processes": stopped})
        return
    if saving:
        click.echo(f"saving, then ending: {', '.join(saving)} (see `ridge status`; --now does not wait for the save)")
    if cancelled:
        click.echo(f"canceled: {', '.join(cancelled)}")
    if stopped:
        click.echo(f"process {stopped[0]} ended; the command that started it resumes")
    if not saving and not cancelled and not stopped:
        click.echo(f"{run} has no running process on this machine, and no pending or running job")


def _stop(run: Path, now: bool, quiet: bool) -> list[int]:
    """End the process of a run or sweep on this machine and wait for that; return its number, or nothing when none runs.

    It saves, unless `now`. Raises UserError for a process of another host or user.
    """
    from ridgeline.launch.trials import sweep

    holder = live_holder(run)
    if holder is None:
        return []
    if not holder.here:
        raise UserError(f"{run} is in use by {holder}: run `ridge cancel` on that host")
    points = [point.directory for point in sweep.read_points(run)] if now and sweep.is_sweep(run) else []
    for one in (holder, *(live_holder(point) for point in points)):
        if one is not None:
            try:
                os.kill(one.pid, signal.SIGKILL if now else signal.SIGTERM)
            except PermissionError:
                raise UserError(f"{run} is in use by {holder}, which belongs to another user") from None
    if not quiet and not now:
        click.echo(f"SIGTERM sent to process {holder.pid}; waiting for it to save (Ctrl-C ends the wait, not the save)")
    while live_holder(run) == holder:
        time.sleep(POLL_S)
    return [holder.pid]


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
