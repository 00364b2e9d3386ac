"""Job array of a sweep: one task per point, all with the same script and code snapshot."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.launch.slurm import container, lint
from ridgeline.launch.slurm.filesystems import Mount
from ridgeline.launch.slurm.lint import Finding
from ridgeline.launch.slurm.script import Job, commented, kept_environment
from ridgeline.launch.slurm.shape import JobShape, with_mesh
from ridgeline.launch.slurm.submit import SUBMISSION_COMMENT, Submitter, hand_over, interpreter, write
from ridgeline.launch.trials.sweep import FILL, Chosen, point_config, point_name, write_points
from ridgeline.launch.trials.sweep_file import Sweep
from ridgeline.rundir import jobs as job_files


def sweep_job(sweep: Sweep, chosen: Chosen, cluster: ClusterConfig, shape: JobShape, by: Submitter, *, preflight: bool = True) -> Job:
    """Describe the array that trains the chosen points."""
    root = sweep.directory
    number = job_files.next_submission(root)
    configs = [point_config(sweep, *one) for one in chosen]
    indices = sorted(one.index for one, _ in chosen)
    limit = "" if sweep.config.max_running is None else f"%{sweep.config.max_running}"
    return Job(
        name=sweep.config.name,
        title=f"Trains {len(chosen)} points of the sweep '{sweep.config.name}', one per array task.",
        written=f"{by.code}, {by.now.isoformat(sep=' ', timespec='seconds')}",
        root=root,
        directory=job_files.slurm_directory(root) / str(number),
        variables=[
            f"SWEEP={shlex.quote(str(root))}",
            commented(f'JOB="$SWEEP/{job_files.DIRECTORY}/{number}"', SUBMISSION_COMMENT),
            commented(f'POINT=$(printf %0{FILL}d "$SLURM_ARRAY_TASK_ID")', "point of this array task"),
            'RUN="$SWEEP/$POINT"',
        ],
        workdir=by.workdir,
        cluster=cluster,
        shape=shape,
        arguments=["train", '"$JOB/points/$POINT.yaml"'],
        python=interpreter(cluster, by.python),
        directories=sorted({path for config in configs for path in container.needed_directories(config, root, by.workdir)}),
        environment=kept_environment(by.environment),
        log=str(root / f"%{FILL}a" / job_files.DIRECTORY / "job-%A_%a.log"),
        preflight=preflight,
        array=ranges(indices) + limit,
    )


def ranges(indices: Sequence[int]) -> str:
    """Format ascending indices for --array: 0-3,7."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][-1] == index - 1:
            parts[-1] = [parts[-1][0], index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)


def lint_points(sweep: Sweep, chosen: Chosen, cluster: ClusterConfig, shape: JobShape, mounts: list[Mount]) -> list[Finding]:
    """Check the job of every point. A finding of all points is returned once, one of some points with the name of the first."""
    found: dict[Finding, list[str]] = {}
    for number, point in chosen:
        for finding in lint.lint(
            point_config(sweep, number, point).model_copy(update={"run_dir": sweep.directory}), cluster, shape, mounts
        ):
            found.setdefault(finding, []).append(point_name(number.index))
    return [
        finding if len(names) == len(chosen) else replace(finding, message=f"point {names[0]}: {finding.message}")
        for finding, names in found.items()
    ]


def submit_sweep(job: Job, sweep: Sweep, chosen: Chosen, by: Submitter) -> str:
    """Write the points, their configs and the script, submit the array and record it; return its job id."""
    script = write(job, None)
    try:
        write_points(sweep)
        (job.directory / "points").mkdir()
        for number, point in chosen:
            (number.directory / job_files.DIRECTORY).mkdir(parents=True, exist_ok=True)  # Slurm does not create the directory of a log
            config = with_mesh(point_config(sweep, number, point), job.shape)
            (job.directory / "points" / f"{point_name(number.index)}.yaml").write_text(to_yaml(config), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the sweep into {sweep.directory}: {error.strerror or error}") from error
    return hand_over(script, job, by, kind="sweep", details={"points": [number.index for number, _ in chosen]})
