"""`ridge status RUN`: state of a run's process or of its Slurm jobs, and its progress."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.tables import Column, print_json, print_table

if TYPE_CHECKING:
    from ridgeline.launch.slurm.state import JobState
    from ridgeline.rundir.allocations import Allocation
    from ridgeline.rundir.jobs import JobRecord
    from ridgeline.rundir.progress import RunProgress


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option
def status(run: Path, as_json: bool) -> None:
    """Show the Slurm jobs of the run directory RUN, or its process on this machine, and the training progress.

    For the directory of a sweep, shows the table of its points.
    """
    from ridgeline.launch.trials import sweep
    from ridgeline.rundir.allocations import read_allocations
    from ridgeline.rundir.liveness import RUNNING
    from ridgeline.rundir.progress import run_progress

    if sweep.is_sweep(run):
        from ridgeline.cli.slurm import print_sweep

        print_sweep(run, as_json=as_json)
        return
    records = sweep.jobs_of(run)
    states = [(record, state) for record in records for state in _states(run, record)]
    progress = None if records and records[-1].kind == "data" else run_progress(run)
    local = None if progress is None or any(not state.ended for _, state in states) else _process(run, progress)
    nodes = None if progress is None else read_allocations(run)
    if as_json:
        jobs = [_row(record, state) for record, state in states]
        found = {"process": local, "progress": progress and dataclasses.asdict(progress)}
        print_json({"run": str(run), "jobs": jobs, **found, "nodes": [dataclasses.asdict(one) for one in nodes or []]})
        return
    if local is not None and (not states or local["state"] == RUNNING):
        print_table(["state", "host", Column("pid", "process"), Column("time", "started")], [local])
    if states:
        _print_jobs([_row(record, state) for record, state in states])
        for line in describe_waits([state for _, state in states]):
            click.echo(line)
    if nodes:
        click.echo(describe_nodes(nodes))
    if progress is not None:
        click.echo(describe_progress(progress, time.time()))


def _process(run: Path, progress: RunProgress) -> dict[str, Any] | None:
    """Return the state and process 0 of the newest start; None before the first."""
    from ridgeline.rundir.directory import RunDir
    from ridgeline.rundir.liveness import run_state

    start = RunDir(run).record.last_start if RunDir(run).exists else None
    if start is None:
        return None
    return {"state": run_state(run, progress), "host": start.host, "pid": start.pid, "time": start.time}


def _print_jobs(rows: list[dict[str, Any]]) -> None:
    columns = [
        Column("job"),
        Column("state"),
        Column("nodes"),
        Column("elapsed_s", "elapsed", _duration),
        Column("limit_s", "limit", _duration),
        Column("restarts"),
        Column("exit_code", "exit"),
        Column("reason"),
        Column("submitted"),
    ]
    print_table(columns, rows)


def _states(run: Path, record: JobRecord) -> list[JobState]:
    """Query Slurm. For a job that it no longer lists, take the exit code from the run's own record."""
    from ridgeline.launch.slurm.state import FORGOTTEN, job_states
    from ridgeline.rundir.progress import job_exit_code

    states = job_states(record.job, record.slurm_cluster)
    if [state.state for state in states] == [FORGOTTEN]:
        return [dataclasses.replace(states[0], exit_code=job_exit_code(run, record.job))]
    return states


def _row(record: JobRecord, state: JobState) -> dict[str, Any]:
    return {**dataclasses.asdict(state), "advice": state.advice, "submitted": record.time, "kind": record.kind}


def _duration(seconds: float) -> str:
    from ridgeline.configs.format import format_duration

    return format_duration(seconds)


def describe_waits(states: Sequence[JobState]) -> list[str]:
    """Return a line per pending job: Slurm's reason, and what a person can do. Tasks of an array with one reason share a line."""
    from ridgeline.launch.slurm.pending import QUEUED

    alike: dict[tuple[str, str | None, str | None], list[JobState]] = {}
    for state in states:
        if state.waiting is not None:
            alike.setdefault((state.job.partition("_")[0], state.waiting, state.reason), []).append(state)
    lines = []
    for (array, waiting, reason), waits in alike.items():
        one = waits[0] if len(waits) == 1 else dataclasses.replace(waits[0], job=array)
        tasks = "" if len(waits) == 1 else f", {len(waits)} tasks"
        then = one.advice or ("it starts by itself" if waiting == QUEUED else None)
        lines.append(f"job {one.job}{tasks}: pending ({reason or 'no reason given'}): {then}")
    return lines


def describe_nodes(starts: Sequence[Allocation]) -> str:
    """Return the nodes of the newest start of an elastic job, and how many each start had, in one line."""
    last = starts[-1]
    spares = f", spare: {last.spare_names}" if last.spares else ""
    before = f"; starts on {' -> '.join(str(one.nodes) for one in starts)} nodes" if len(starts) > 1 else ""
    return f"{last.nodes} of {last.of} nodes: {last.names}{spares}{before}"


def describe_progress(progress: RunProgress, now_s: float) -> str:
    """Return the progress of a run in one line."""
    from ridgeline.configs.format import format_count, format_duration

    if progress.logged_at_s is None:
        return "training has not started"
    ago = format_duration(max(0.0, now_s - progress.logged_at_s))
    starts = f", start {progress.starts}" if progress.starts > 1 else ""
    if progress.step is None:
        return f"no step yet{starts} (last log line {ago} ago)"
    parts = [f"step {progress.step:,}" + ("" if progress.steps is None else f"/{progress.steps:,}")]
    parts += [f"loss {progress.loss:.4f}"] if progress.loss is not None else []
    parts += [f"{format_count(progress.tokens_per_s)} tokens/s"] if progress.tokens_per_s is not None else []
    if progress.finished:
        return f"{', '.join(parts)}{starts}: finished"
    parts += [f"eta {format_duration(progress.eta_s)}"] if progress.eta_s is not None else []
    return f"{', '.join(parts)}{starts} (last log line {ago} ago)"
