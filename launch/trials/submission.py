"""Submit trials to Slurm; their layout decides between one job array over all of them and one job per trial.

All tasks of an array have the same script and code snapshot; their configs are in ROOT/slurm/<n>/points.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.dump import to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.mesh import with_mesh
from ridgeline.configs.schema import Config
from ridgeline.launch.slurm import container, lint
from ridgeline.launch.slurm import submit as slurm
from ridgeline.launch.slurm.filesystems import Mount
from ridgeline.launch.slurm.script import Job, commented, kept_environment
from ridgeline.launch.slurm.shape import JobShape
from ridgeline.launch.trials.engine import DIGITS, TrialFiles
from ridgeline.rundir import jobs as job_files
from ridgeline.rundir.files import refuse_links


@dataclass(frozen=True)
class Submission:
    """Trials to submit."""

    files: TrialFiles
    name: str
    """Name of the sweep or study; that of an array."""
    configs: Mapping[str, Config]
    """Trial -> config with its run directory."""
    cluster: ClusterConfig
    shape: JobShape
    """Size of one trial."""
    by: slurm.Submitter
    preflight: bool = True
    max_running: int | None = None
    """Most tasks of an array that run at the same time; None: no limit."""

    def lint(self, mounts: list[Mount]) -> list[lint.Finding]:
        """Check the job of every trial. A finding of all trials is returned once, one of some trials with the name of the first."""
        found: dict[lint.Finding, list[str]] = {}
        for name, config in self.configs.items():
            same_place = config.model_copy(update={"run_dir": self.files.root})
            for finding in lint.lint(same_place, self.cluster, self.shape, mounts):
                found.setdefault(finding, []).append(name)
            if config.elastic.on and self.files.layout.array:
                reason = "elastic: points of a sweep have fixed nodes; remove elastic.min_nodes and elastic.spares, or use `ridge submit`"
                found.setdefault(lint.Finding(True, reason), []).append(name)
        return [
            finding if len(names) == len(self.configs) else replace(finding, message=f"point {names[0]}: {finding.message}")
            for finding, names in found.items()
        ]

    def jobs(self) -> list[Job]:
        """Describe the jobs, in the order of the trials."""
        if self.files.layout.array:
            return [self._array()]
        return [slurm.training_job(config, self.cluster, self.shape, self.by, preflight=self.preflight) for config in self.configs.values()]

    def submit(self) -> list[str]:
        """Write, submit and record the jobs; return their ids. Raises UserError if a file cannot be written or sbatch refuses a job."""
        if self.files.layout.array:
            return [self._submit_array(job) for job in self.jobs()]
        details = {"nodes": self.shape.nodes}
        return [slurm.submit(job, config, self.by, details) for job, config in zip(self.jobs(), self.configs.values(), strict=True)]

    def _array(self) -> Job:
        """Describe the array that trains the trials, whose names are numbers."""
        root = self.files.root
        number = job_files.next_submission(root)
        limit = "" if self.max_running is None else f"%{self.max_running}"
        directories = {path for config in self.configs.values() for path in container.needed_directories(config, root, self.by.workdir)}
        return Job(
            name=self.name,
            title=f"Trains {len(self.configs)} points of the sweep '{self.name}', one per array task.",
            written=f"{self.by.code}, {self.by.now.isoformat(sep=' ', timespec='seconds')}",
            root=root,
            directory=job_files.slurm_directory(root) / str(number),
            variables=[
                f"SWEEP={shlex.quote(str(root))}",
                commented(f'JOB="$SWEEP/{job_files.DIRECTORY}/{number}"', slurm.SUBMISSION_COMMENT),
                commented(f'POINT=$(printf %0{DIGITS}d "$SLURM_ARRAY_TASK_ID")', "point of this array task"),
                'RUN="$SWEEP/$POINT"',
            ],
            workdir=self.by.workdir,
            cluster=self.cluster,
            shape=self.shape,
            arguments=["train", '"$JOB/points/$POINT.yaml"'],
            python=slurm.interpreter(self.cluster, self.by.python),
            directories=sorted(directories),
            environment=kept_environment(self.by.environment),
            log=str(root / f"%{DIGITS}a" / job_files.DIRECTORY / job_files.LOG.replace("%j", "%A_%a")),
            preflight=self.preflight,
            array=ranges(sorted(int(name) for name in self.configs)) + limit,
        )

    def _submit_array(self, job: Job) -> str:
        directories = [self.files.run_dir(name) for name in self.configs]
        for directory in directories:
            refuse_links(directory, below=self.files.root)
            job_files.refuse_log_links(directory)
        script = slurm.write(job, None)
        try:
            (job.directory / "points").mkdir()
            for directory, (name, config) in zip(directories, self.configs.items(), strict=True):
                log = job_files.slurm_directory(directory)
                log.mkdir(parents=True, exist_ok=True)  # Slurm does not create the directory of a log
                (job.directory / "points" / f"{name}.yaml").write_text(to_yaml(with_mesh(config, self.shape.devices)), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write the sweep into {self.files.root}: {error.strerror or error}") from error
        return slurm.hand_over(script, job, self.by, kind="sweep", details={"points": [int(name) for name in self.configs]})


def ranges(indices: Sequence[int]) -> str:
    """Format ascending indices for --array: 0-3,7."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][-1] == index - 1:
            parts[-1] = [parts[-1][0], index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)
