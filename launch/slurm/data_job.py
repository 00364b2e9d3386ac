"""Prepare a corpus with a job array: every task writes a slice of the shards, and a final job merges them.

The division into shards depends only on the input (loaders/prepare.py), so the corpus is bitwise equal to that of one process. A task that
was killed keeps its finished shards; to continue after failures, run the same `ridge submit-data` command again.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.launch.slurm.script import Job, commented, job_script, kept_environment
from ridgeline.launch.slurm.shape import JobShape, job_shape
from ridgeline.launch.slurm.submit import Submitter, hand_over, interpreter, write
from ridgeline.rundir import jobs as places

MERGE_SCRIPT = "merge.sh"


@dataclass(frozen=True)
class DataJobs:
    """The array of slices and the merge."""

    slices: Job
    merge: Job


def jobs_directory(output: Path) -> Path:
    """Return the directory for the jobs of a corpus, beside the corpus directory, which holds only the corpus."""
    return output.with_name(f"{output.name}.jobs").absolute()


def data_shape(cluster: ClusterConfig, time: str | None, cores: int | None) -> JobShape:
    """Return the shape of one task: one process on one node without accelerators; cores: None for all of the node."""
    size = job_shape(cluster, 1, time)
    cores = cores or cluster.slurm.cpus_per_task or cluster.cores_per_node
    return replace(size, tasks_per_node=1, cpus_per_task=cores, devices_per_node=0, exclusive=bool(cluster.slurm.exclusive))


def to_arguments(command: click.Command, values: Mapping[str, Any], leave_out: Sequence[str]) -> list[str]:
    """Return the command-line options for parameter values; options at their default are omitted."""
    arguments: list[str] = []
    for parameter in command.params:
        value = values.get(parameter.name or "")
        if not isinstance(parameter, click.Option) or parameter.name in leave_out:
            continue
        name = max(parameter.opts, key=len)
        if parameter.is_flag:
            arguments += [name] if value else []
        elif value not in (None, (), parameter.default):
            for one in value if parameter.multiple else (value,):
                arguments += [name, str(one)]
    return arguments


def data_jobs(output: Path, slices: int, options: Sequence[str], cluster: ClusterConfig, shape: JobShape, by: Submitter) -> DataJobs:
    """Return the array job and the merge job of a corpus. `options`: arguments of `ridge data prepare`."""
    root = jobs_directory(output)
    number = places.next_submission(root)
    arguments = ["data", "prepare", *map(shlex.quote, options), f"--workers {shape.cpus_per_task}"]
    inputs = [by.workdir, root, output.absolute().parent]
    array = Job(
        name=f"{output.name}-prepare",
        title=f"Prepares {slices} slices of the corpus {output}, one per array task; merge.sh then merges them.",
        written=f"{by.code}, {by.now.isoformat(sep=' ', timespec='seconds')}",
        root=root,
        directory=places.slurm_directory(root) / str(number),
        variables=[commented(f"JOB={shlex.quote(str(places.slurm_directory(root) / str(number)))}", "this submission: cluster file, code")],
        workdir=by.workdir,
        cluster=cluster,
        shape=shape,
        arguments=[*arguments, f'--slice "$SLURM_ARRAY_TASK_ID/{slices}"'],
        python=interpreter(cluster, by.python),
        directories=inputs,
        environment=kept_environment(by.environment),
        log=str(places.slurm_directory(root) / "job-%A_%a.log"),
        preflight=False,
        trains=False,
        array=f"0-{slices - 1}",
    )
    merge = replace(
        array,
        name=f"{output.name}-merge",
        title=f"Merges the slices of the corpus {output}; runs after all of them are finished.",
        arguments=arguments,
        log=places.log_pattern(root),
        array=None,
    )
    return DataJobs(array, merge)


def submit_data(jobs: DataJobs, by: Submitter) -> tuple[str, str]:
    """Write and submit the array job and the merge job, which depends on it; return their ids."""
    script = write(jobs.slices, None)
    merge_script = script.with_name(MERGE_SCRIPT)
    merge_script.write_text(job_script(jobs.merge), encoding="utf-8")
    merge_script.chmod(0o755)
    array = hand_over(script, jobs.slices, by, kind="data", details={"array": jobs.slices.array})
    after = [f"--dependency=afterok:{array}", "--kill-on-invalid-dep=yes"]
    return array, hand_over(merge_script, jobs.merge, by, kind="data", details={"after": array}, options=after)
