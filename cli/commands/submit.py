"""`ridge submit CONFIG --cluster C --nodes N`: submit a training run as a Slurm job."""

from __future__ import annotations

from typing import Any

import click

from ridgeline.cli.options import MEMBERS, config_arguments, job_options, json_option
from ridgeline.cli.slurm import print_findings, read_cluster
from ridgeline.cli.tables import print_json


@click.command()
@config_arguments
@click.option("--nodes", "-N", type=MEMBERS, required=True, help="Number of nodes.")
@job_options()
@click.option("--no-preflight", is_flag=True, help="Do not run `ridge doctor` before training.")
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

    Checks the job first, and rejects one that would fail in the queue. Then writes the complete job script, a snapshot of the code and the
    resolved config into the run directory, and passes the script to sbatch.
    """
    from datetime import UTC, datetime

    from ridgeline.configs.load import load
    from ridgeline.launch.slurm import filesystems, lint, shape
    from ridgeline.launch.slurm import submit as slurm
    from ridgeline.launch.slurm.script import job_script

    site = read_cluster(cluster, cluster_set, account=account, qos=qos, partition=partition)
    resolved = shape.placed(load(config, overrides).config, site)
    size = shape.job_shape(site, nodes, time)
    by = slurm.Submitter.here(datetime.now(UTC))
    findings = lint.lint(resolved, site, size, filesystems.read_mounts())
    job = slurm.training_job(resolved, site, size, by, preflight=not no_preflight)
    if dry_run:
        click.echo(job_script(job), nl=False)
        print_findings(findings)
        return
    print_findings(findings)
    slurm.refuse_second_job(job.root)
    number = slurm.submit(job, resolved, by, {"nodes": nodes})
    if as_json:
        print_json({"job": number, "run_dir": str(job.root), "script": str(job.directory / "job.sh")})
        return
    click.echo(f"job {number}: {shape.describe(site, size)}")
    click.echo(f"script: {job.directory / 'job.sh'}")
    click.echo(f"next: ridge status {_shown(job.root)}, ridge logs -f {_shown(job.root)}")


def _shown(path: Any) -> str:
    from ridgeline.configs.yaml_tree import display_path

    return display_path(path)
