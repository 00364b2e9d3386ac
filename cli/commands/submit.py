"""`ridge submit CONFIG --cluster C --nodes N`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ridgeline.cli.options import config_arguments, json_option
from ridgeline.cli.tables import print_json
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.configs.cluster import ClusterConfig
    from ridgeline.launch.slurm.lint import Finding

Function = TypeVar("Function", bound=Callable[..., Any])


def cluster_options(*, required: bool = True) -> Callable[[Function], Function]:
    """Take what says where and how a job runs."""
    options = (
        click.option("--cluster", "-c", required=required, help="Cluster file: a shipped one by name, or a YAML file."),
        click.option("--time", help="Time limit as Slurm writes it: 90, 12:00:00, 2-00:00:00."),
        click.option("--account", help="Account to charge."),
        click.option("--qos", help="Quality of service."),
        click.option("--partition", help="Partition."),
        click.option(
            "--cluster-set",
            multiple=True,
            metavar="KEY=VALUE",
            help="Override a key of the cluster file, such as slurm.max_restarts=3; repeatable.",
        ),
        click.option("--dry-run", is_flag=True, help="Print the script; write nothing, submit nothing."),
    )

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def read_cluster(name: str, overrides: Iterable[str], **given: str | None) -> ClusterConfig:
    """Load a cluster file with the options of a command line on top, SBATCH_* variables underneath."""
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.launch.slurm.submit import with_environment

    options = [f"slurm.{key}={value}" for key, value in given.items() if value is not None]
    return with_environment(load_cluster(name, [*overrides, *options]).config, os.environ)


def tell_findings(findings: list[Finding]) -> None:
    """Print warnings, and refuse a job with errors."""
    for finding in findings:
        if not finding.error:
            click.echo(f"ridge: {finding}", err=True)
    errors = [finding.message for finding in findings if finding.error]
    if errors:
        raise UserError("\n".join(errors))


@click.command()
@config_arguments
@click.option("--nodes", "-N", type=click.IntRange(min=1), required=True, help="Nodes of the job.")
@cluster_options()
@click.option("--no-preflight", is_flag=True, help="Start training without `ridge doctor` before it.")
@json_option
def submit(
    config: str,
    overrides: tuple[str, ...],
    nodes: int,
    cluster: str,
    time: str | None,
    account: str | None,
    qos: str | None,
    partition: str | None,
    cluster_set: tuple[str, ...],
    dry_run: bool,
    no_preflight: bool,
    as_json: bool,
) -> None:
    """Submit the training of CONFIG as a Slurm job.

    Writes a full job script, a snapshot of the code and the resolved config into the run directory and hands the script to sbatch. The
    job is checked first: what would fail in the queue is refused here.
    """
    from datetime import UTC, datetime
    from pathlib import Path

    from ridgeline.configs.load import load
    from ridgeline.launch.slurm import filesystems, lint, shape
    from ridgeline.launch.slurm import submit as slurm
    from ridgeline.launch.slurm.script import job_script

    site = read_cluster(cluster, cluster_set, account=account, qos=qos, partition=partition)
    resolved = shape.placed(load(config, overrides).config, site)
    size = shape.job_shape(site, nodes, time)
    by = slurm.Submitter.here(datetime.now(UTC))
    findings = lint.lint(resolved, site, size, filesystems.read_mounts(Path("/proc/mounts").read_text()))
    job = slurm.training_job(resolved, site, size, by, preflight=not no_preflight)
    if dry_run:
        click.echo(job_script(job), nl=False)
        tell_findings(findings)
        return
    tell_findings(findings)
    slurm.refuse_second_job(job.root)
    number = slurm.submit(job, resolved, by, {"nodes": nodes})
    if as_json:
        print_json({"job": number, "run_dir": str(job.root), "script": str(job.directory / "job.sh")})
        return
    click.echo(f"job {number}: {shape.describe(site, size)}")
    click.echo(f"script: {job.directory / 'job.sh'}")
    click.echo(f"next: ridge status {_shown(job.root)}, ridge logs -f {_shown(job.root)}")


def _shown(path: Any) -> str:
    from ridgeline.configs.tree import display_path

    return display_path(path)
