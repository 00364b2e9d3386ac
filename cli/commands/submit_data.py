"""`ridge submit-data`: `ridge data prepare` as a job array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ridgeline.cli.commands.data_prepare import prepare
from ridgeline.cli.commands.submit import cluster_options, read_cluster, tell_findings
from ridgeline.cli.options import json_option
from ridgeline.cli.tables import print_json
from ridgeline.configs.errors import UserError

OWN = ("workers", "slice_text", "as_json", "overwrite")
"""Options of `ridge data prepare` that mean nothing here: the jobs decide them, or (--overwrite) a user does before."""


def _prepare_options(function: Any) -> Any:
    """Take the options of `ridge data prepare`."""
    function.__click_params__ = [option for option in reversed(prepare.params) if option.name not in OWN] + getattr(
        function, "__click_params__", []
    )
    return function


@click.command("submit-data")
@click.option("--slices", type=click.IntRange(min=1), required=True, help="Tasks of the array; each makes its part of the shards.")
@click.option("--cores", type=click.IntRange(min=1), help="Cores of a task (default: slurm.cpus_per_task, or all of a node).")
@cluster_options()
@json_option
@_prepare_options
def submit_data(
    slices: int,
    cores: int | None,
    cluster: str,
    time: str | None,
    account: str | None,
    qos: str | None,
    partition: str | None,
    cluster_set: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Prepare a corpus as a Slurm job array.

    Takes the options of `ridge data prepare`. Each task makes a slice of the shards, and a last job, which waits for them, merges. The
    corpus is byte for byte that of one process. If tasks fail, give the same command again: finished shards are kept.
    """
    from datetime import UTC, datetime

    from ridgeline.launch.slurm import data_job, filesystems, lint, shape
    from ridgeline.launch.slurm.script import job_script
    from ridgeline.launch.slurm.submit import Submitter, refuse_second_job

    output: Path = options["output"]
    site = read_cluster(cluster, cluster_set, account=account, qos=qos, partition=partition)
    size = data_job.data_shape(site, time, cores)
    shards = _count_shards(options)
    if slices > shards:
        raise UserError(f"--slices {slices}: the input divides into {shards} shards, so at most {shards} tasks have work (see --shards)")
    by = Submitter.here(datetime.now(UTC))
    jobs = data_job.data_jobs(output, slices, data_job.to_arguments(prepare, options, OWN), site, size, by)
    findings = lint.lint_job(site, size, jobs.slices.root, filesystems.read_mounts(Path("/proc/mounts").read_text()))
    if dry_run:
        click.echo(job_script(jobs.slices) + f"\n# ---- {data_job.MERGE_SCRIPT}\n\n" + job_script(jobs.merge), nl=False)
        tell_findings(findings)
        return
    tell_findings(findings)
    refuse_second_job(jobs.slices.root)
    array, merge = data_job.submit_data(jobs, by)
    if as_json:
        print_json({"array": array, "merge": merge, "jobs": str(jobs.slices.root)})
        return
    click.echo(f"job array {array}: {slices} slices of {shards} shards, each on {shape.describe(site, size)}; then job {merge} merges")
    click.echo(f"next: ridge status {jobs.slices.root}")


def _count_shards(options: dict[str, Any]) -> int:
    """Look at the input as the tasks will, so that its mistakes are found now. Raises UserError."""
    from ridgeline.loaders.holdout import parse_holdouts
    from ridgeline.loaders.inputs import InputOptions, list_inputs
    from ridgeline.loaders.prepare import divide
    from ridgeline.loaders.tokenizers import load_tokenizer

    load_tokenizer(options["tokenizer"])
    parse_holdouts(options["holdouts"])
    names = ("split", "include", "exclude")
    listing = list_inputs(options["inputs"], InputOptions(format=options["input_format"], **{name: options[name] for name in names}))
    return len(divide(listing.units(), options["shards"]))
