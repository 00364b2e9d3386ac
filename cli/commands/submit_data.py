"""`ridge submit-data`: `ridge data prepare` as a job array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ridgeline.cli.data_options import corpus_options, text_settings
from ridgeline.cli.options import MEMBERS, Int32Range, job_options, json_option
from ridgeline.cli.slurm import print_findings, read_cluster
from ridgeline.cli.tables import print_json
from ridgeline.configs.errors import UserError


@click.command("submit-data")
@click.option("--slices", type=MEMBERS, required=True, help="Tasks of the job array; each makes a slice of the shards.")
@click.option("--cores", type=Int32Range(min=1), help="Cores per task [default: slurm.cpus_per_task, or all cores of a node].")
@job_options()
@json_option
@corpus_options
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

    Takes the options of `ridge data prepare`. Each task of the array makes a slice of the shards; a last job waits for all tasks and
    merges. The corpus is bitwise identical to one made by a single process. If tasks fail, run the same command again: finished shards are
    kept.
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
        raise UserError(f"--slices {slices}: the input has only {shards} shards; use at most {shards} slices, or more --shards")
    by = Submitter.here(datetime.now(UTC))
    jobs = data_job.data_jobs(output, slices, data_job.to_arguments(submit_data, options, ()), site, size, by)
    findings = lint.lint_job(site, size, jobs.slices.root, filesystems.read_mounts())
    if dry_run:
        click.echo(job_script(jobs.slices) + f"\n# ---- {data_job.MERGE_SCRIPT}\n\n" + job_script(jobs.merge), nl=False)
        print_findings(findings)
        return
    print_findings(findings)
    refuse_second_job(jobs.slices.root)
    array, merge = data_job.submit_data(jobs, by)
    if as_json:
        print_json({"array": array, "merge": merge, "jobs": str(jobs.slices.root)})
        return
    click.echo(f"job array {array}: {slices} slices of {shards} shards, each on {shape.describe(site, size)}; then job {merge} merges")
    click.echo(f"next: ridge status {jobs.slices.root}")


def _count_shards(options: dict[str, Any]) -> int:
    """Return the number of shards the input divides into. Raises UserError for input the jobs could not read."""
    from ridgeline.loaders.inputs import list_inputs
    from ridgeline.loaders.prepare import divide
    from ridgeline.loaders.tokenizers import load_tokenizer

    load_tokenizer(options["tokenizer"])
    text = text_settings(options)
    return len(divide(list_inputs(text["inputs"], text["options"], options["output"]).units(), options["shards"]))
