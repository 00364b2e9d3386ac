"""`ridge sweep SWEEP.yaml`: train a grid or list of configs as a Slurm job array."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import job_options, json_option
from ridgeline.cli.slurm import print_findings, print_sweep, read_cluster
from ridgeline.cli.tables import print_json
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    pass


@click.command()
@click.argument("sweep", metavar="SWEEP.yaml", type=click.Path(path_type=Path))
@click.option("--table", is_flag=True, help="Print the results so far; submit nothing.")
@click.option("--nodes", "-N", type=click.IntRange(min=1), default=1, show_default=True, help="Number of nodes per point.")
@job_options(cluster_required=False)
@click.option("--no-preflight", is_flag=True, help="Do not run `ridge doctor` before training.")
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

    SWEEP.yaml names a config and a `grid:` or `list:` of overrides. The same command submits only the points that failed or are missing,
    not those that are finished, pending or running.
    """
    from datetime import UTC, datetime

    from ridgeline.launch.slurm import filesystems, shape
    from ridgeline.launch.slurm.script import job_script
    from ridgeline.launch.slurm.submit import Submitter
    from ridgeline.launch.trials import sweep as on_disk
    from ridgeline.launch.trials import sweep_job
    from ridgeline.launch.trials.sweep_file import load_sweep

    loaded = load_sweep(sweep, os.environ)
    if table:
        print_sweep(loaded.directory, as_json=as_json)
        return
    if cluster is None:
        raise UserError("--cluster is missing (to print results only, use --table)")
    site = read_cluster(cluster, cluster_set, account=account, qos=qos, partition=partition)
    size = shape.job_shape(site, nodes, time)
    known = on_disk.results(loaded.directory) if on_disk.is_sweep(loaded.directory) else []
    chosen = on_disk.to_do(loaded, known)
    if not chosen:
        click.echo(f"nothing to do: all {len(loaded.points)} points are finished, pending or running")
        return
    by = Submitter.here(datetime.now(UTC))
    findings = sweep_job.lint_points(loaded, chosen, site, size, filesystems.read_mounts(Path("/proc/mounts").read_text()))
    job = sweep_job.sweep_job(loaded, chosen, site, size, by, preflight=not no_preflight)
    if dry_run:
        click.echo(job_script(job), nl=False)
        print_findings(findings)
        return
    print_findings(findings)
    number = sweep_job.submit_sweep(job, loaded, chosen, by)
    if as_json:
        print_json({"job": number, "directory": str(loaded.directory), "points": [one.index for one, _ in chosen]})
        return
    click.echo(f"job array {number}: {len(chosen)} of {len(loaded.points)} points, each on {shape.describe(site, size)}")
    click.echo(f"next: ridge sweep {sweep} --table")
