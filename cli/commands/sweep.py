"""`ridge sweep SWEEP.yaml`: train a grid or list of configs, as a Slurm job array or on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import FAILED_CHECK, MEMBERS, job_options, json_option
from ridgeline.cli.progress import print_progress
from ridgeline.cli.slurm import print_findings, print_sweep, read_cluster
from ridgeline.cli.tables import print_json
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.launch.trials.sweep import Chosen
    from ridgeline.launch.trials.sweep_file import Sweep


@click.command()
@click.argument("sweep", metavar="SWEEP.yaml", type=click.Path(path_type=Path))
@click.option("--table", is_flag=True, help="Print the results so far; submit nothing.")
@click.option("--local", is_flag=True, help="Train the points on this machine, one after another.")
@click.option("--nodes", "-N", type=MEMBERS, default=1, show_default=True, help="Number of nodes per point.")
@job_options(cluster_required=False)
@click.option("--no-preflight", is_flag=True, help="Do not run `ridge doctor` before training.")
@json_option
def sweep(
    sweep: Path,
    table: bool,
    local: bool,
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
) -> int | None:
    """Train every point of SWEEP.yaml: as one Slurm job array (--cluster), or on this machine (--local).

    SWEEP.yaml names a config and a `grid:` or `list:` of overrides. The same command starts only the points that failed or are missing,
    not those that are finished, pending or running. On this machine, Ctrl-C saves the running point, and exit code 1 means that one failed.
    """
    from datetime import UTC, datetime

    from ridgeline.launch.slurm import filesystems, shape
    from ridgeline.launch.slurm.script import job_script
    from ridgeline.launch.slurm.submit import Submitter
    from ridgeline.launch.trials.sweep import submission, write_points
    from ridgeline.launch.trials.sweep_file import load_sweep

    loaded = load_sweep(sweep, os.environ)
    if table:
        print_sweep(loaded.directory, as_json=as_json)
        return None
    if local:
        given = {"cluster": cluster, "time": time, "account": account, "qos": qos, "partition": partition}
        if unused := [name for name, value in given.items() if value is not None]:
            raise UserError(f"--{unused[0]} is for Slurm: it cannot be used with --local")
        return _run_here(loaded, dry_run=dry_run, as_json=as_json)
    if cluster is None:
        raise UserError("--cluster is missing (to train on this machine, use --local; to print results only, --table)")
    site = read_cluster(cluster, cluster_set, account=account, qos=qos, partition=partition)
    size = shape.job_shape(site, nodes, time)
    chosen = _chosen(loaded)
    if not chosen:
        return None
    by = Submitter.here(datetime.now(UTC))
    jobs = submission(loaded, chosen, site, size, by, preflight=not no_preflight)
    findings = jobs.lint(filesystems.read_mounts())
    if dry_run:
        click.echo(job_script(jobs.jobs()[0]), nl=False)
        print_findings(findings)
        return None
    print_findings(findings)
    write_points(loaded)
    (number,) = jobs.submit()
    if as_json:
        print_json({"job": number, "directory": str(loaded.directory), "points": [one.index for one, _ in chosen]})
        return None
    click.echo(f"job array {number}: {len(chosen)} of {len(loaded.points)} points, each on {shape.describe(site, size)}")
    click.echo(f"next: ridge sweep {sweep} --table")
    return None


def _chosen(sweep: Sweep) -> Chosen:
    """Return the points that are to run; prints a line when there are none."""
    from ridgeline.launch.trials import sweep as on_disk

    known = on_disk.results(sweep.directory) if on_disk.is_sweep(sweep.directory) else []
    chosen = on_disk.to_do(sweep, known)
    if not chosen:
        click.echo(f"nothing to do: all {len(sweep.points)} points are finished, pending or running")
    return chosen


def _run_here(sweep: Sweep, *, dry_run: bool, as_json: bool) -> int:
    """Train the points on this machine and print the table. Returns the exit code."""
    from ridgeline.launch.trials.sweep import point_name
    from ridgeline.launch.trials.sweep_local import run_sweep

    chosen = _chosen(sweep)
    if dry_run:
        for number, _ in chosen:
            click.echo(f"{point_name(number.index)}: {' '.join(f'{key}={value}' for key, value in number.overrides.items())}")
        return 0
    failed = run_sweep(sweep, chosen, print_progress) if chosen else []
    print_sweep(sweep.directory, as_json=as_json)
    return FAILED_CHECK if failed else 0
