"""`ridge runs [DIRECTORY]`: list the runs below a directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.tables import Column, print_json, print_table

if TYPE_CHECKING:
    from ridgeline.rundir.liveness import ListedRun

SORT_KEYS = {"run": "run", "state": "state", "step": "step", "loss": "loss", "speed": "tokens_per_s", "age": "age_s"}


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--sort", type=click.Choice(list(SORT_KEYS)), default="run", show_default=True, help="Column by which to sort.")
@click.option("--reverse", is_flag=True, help="Sort in descending order.")
@json_option
def runs(directory: Path, sort: str, reverse: bool, as_json: bool) -> None:
    """List the runs below DIRECTORY [default: runs], those of sweeps and studies included.

    A run is `running` while the process that holds its lease lives, on this host or another. Slurm is not queried: `ridge status RUN` shows
    pending jobs. Age is the time since the last line of the run's event log.
    """
    from ridgeline.configs.format import format_count, format_duration
    from ridgeline.rundir.liveness import runs_below

    now_s = time.time()
    rows = [_row(listed, now_s) for listed in runs_below(directory)]
    key = SORT_KEYS[sort]
    present = [row for row in rows if row[key] is not None]
    rows = sorted(present, key=lambda row: row[key], reverse=reverse) + [row for row in rows if row[key] is None]
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo(f"no runs below {directory}")
        return
    columns = [
        Column("run"),
        Column("state"),
        Column("step", format="{:,}".format),
        Column("steps", "of", "{:,}".format),
        Column("loss", format="{:.4f}".format),
        Column("tokens_per_s", "tokens/s", format_count),
        Column("age_s", "age", format_duration),
    ]
    print_table(columns, rows)
    for row in rows:
        if row["problem"] is not None:
            click.echo(f"ridge: {row['problem']}", err=True)


def _row(listed: ListedRun, now_s: float) -> dict[str, Any]:
    progress = listed.progress
    logged_at_s = None if progress is None else progress.logged_at_s
    return {
        "run": str(listed.path),
        "state": listed.state,
        "step": None if progress is None else progress.step,
        "steps": None if progress is None else progress.steps,
        "loss": None if progress is None else progress.loss,
        "tokens_per_s": None if progress is None else progress.tokens_per_s,
        "age_s": None if logged_at_s is None else max(0.0, now_s - logged_at_s),
        "problem": listed.problem,
    }
