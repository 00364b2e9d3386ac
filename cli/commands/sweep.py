"""`ridge sweep SWEEP.yaml`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.commands.submit import cluster_options, read_cluster, tell_findings
from ridgeline.cli.options import json_option
from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.launch.slurm.sweep import Result


@click.command()
@click.argument("sweep", metavar="SWEEP.yaml", type=click.Path(path_type=Path))
@click.option("--table", is_flag=True, help="Print what came of every point so far; submit nothing.")
@click.option("--nodes", "-N", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes of each point.")
@cluster_options(required=False)
@click.option("--no-preflight", is_flag=True, help="Start training without `ridge doctor` before it.")
@json_option
def sweep(
    sweep: Path,
    table: bool,
    nodes: int,
    cluster: str | None,
    time: str | None,
    account: str | None,
    qos: str | None,
    partition: str | None,
    cluster_set: tuple[str, ...],
    dry_run: bool,
    no_preflight: bool,
    as_json: bool,
) -> None:
    """Train every point of SWEEP.yaml as one Slurm job array.

    SWEEP.yaml names a config and a `grid:` or `list:` of overrides. Given again, only points that failed or are missing are submitted;
    those that are finished, waiting or running are left alone.
    """
    from datetime import UTC, datetime

    from ridgeline.launch.slurm import filesystems, shape, sweep_job
    from ridgeline.launch.slurm import sweep as on_disk
    from ridgeline.launch.slurm.script import job_script
    from ridgeline.launch.slurm.submit import Submitter
    from ridgeline.launch.slurm.sweep_file import load_sweep

    loaded = load_sweep(sweep, os.environ)
    if table:
        print_results(loaded.directory, as_json=as_json)
        return
    if cluster is None:
        raise UserError("--cluster is missing: where shall the sweep run? (--table shows the results)")
    site = read_cluster(cluster, cluster_set, account=account, qos=qos, partition=partition)
    size = shape.job_shape(site, nodes, time)
    known = on_disk.results(loaded.directory) if on_disk.is_sweep(loaded.directory) else []
    chosen = on_disk.to_do(loaded, known)
    if not chosen:
        click.echo(f"nothing to do: all {len(loaded.points)} points are finished, waiting or running")
        return
    by = Submitter.here(datetime.now(UTC))
    findings = sweep_job.lint_points(loaded, chosen, site, size, filesystems.read_mounts(Path("/proc/mounts").read_text()))
    job = sweep_job.sweep_job(loaded, chosen, site, size, by, preflight=not no_preflight)
    if dry_run:
        click.echo(job_script(job), nl=False)
        tell_findings(findings)
        return
    tell_findings(findings)
    number = sweep_job.submit_sweep(job, loaded, chosen, by)
    if as_json:
        print_json({"job": number, "directory": str(loaded.directory), "points": [one.index for one, _ in chosen]})
        return
    click.echo(f"job array {number}: {len(chosen)} of {len(loaded.points)} points, each on {shape.describe(site, size)}")
    click.echo(f"next: ridge sweep {sweep} --table")


def print_results(directory: Path, *, as_json: bool) -> None:
    """Print the table of a sweep."""
    from ridgeline.launch.slurm.sweep import results

    found = results(directory)
    if as_json:
        print_json([_json(result) for result in found])
        return
    keys = list(dict.fromkeys(key for result in found for key in result.point.overrides))
    sets = list(dict.fromkeys(name for result in found for name in result.evaluations or {}))
    columns = [
        Column("point"),
        *(Column(f"override:{key}", key) for key in keys),
        Column("state"),
        Column("step"),
        Column("steps", "of"),
        Column("loss", format="{:.4f}".format),
        *(Column(f"evaluation:{name}", f"{name} loss", "{:.4f}".format) for name in sets),
        Column("tokens_per_s", "tokens/s", "{:,.0f}".format),
        Column("restarts"),
    ]
    print_table(columns, [_row(result) for result in found])
    counts = {state: sum(result.state == state for result in found) for state in dict.fromkeys(result.state for result in found)}
    click.echo(f"{directory}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))


def _row(result: Result) -> dict[str, Any]:
    overrides = {f"override:{key}": value for key, value in result.point.overrides.items()}
    evaluations = {f"evaluation:{name}": loss for name, loss in (result.evaluations or {}).items()}
    state = result.state if result.exit_code in (None, 0) else f"{result.state} ({result.exit_code})"
    return {**_json(result), **overrides, **evaluations, "point": result.point.directory.name, "state": state}


def _json(result: Result) -> dict[str, Any]:
    names = ("state", "step", "steps", "loss", "evaluations", "tokens_per_s", "restarts", "exit_code")
    fields = {name: getattr(result, name) for name in names}
    return {"point": result.point.index, "run_dir": str(result.point.directory), "overrides": dict(result.point.overrides), **fields}
