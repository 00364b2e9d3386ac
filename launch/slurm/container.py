"""Containers of a job's tasks: options of srun (pyxis) and the prefix of the command (apptainer)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ridgeline.configs.cluster import ContainerConfig
from ridgeline.configs.schema import Config

GPU_FLAG = "--nv"


def mounts(container: ContainerConfig, directories: Sequence[Path]) -> list[str]:
    """Return the mounts HOST:CONTAINER: every needed directory at its own path, then those of the cluster file."""
    needed: list[Path] = []
    for path in sorted(set(directories)):
        if not any(path.is_relative_to(held) for held in needed):
            needed.append(path)
    return [*(f"{path}:{path}" for path in needed), *container.mounts]


def needed_directories(config: Config, run_dir: Path, workdir: Path) -> list[Path]:
    """Return the directories a training run reads or writes: working and run directory, data, initial parameters, compilation cache."""
    named = [source.path for source in config.data.train] + list(config.evaluation.sets.values())
    named += [source.teacher for source in config.data.train if source.teacher is not None]
    evaluation = config.evaluation
    samples = None if evaluation.samples.file is None else evaluation.samples.file.parent
    optional = (config.init_from, config.runtime.compilation_cache, evaluation.tasks.directory, samples)
    return [run_dir, workdir, *((workdir / path).absolute() for path in (*named, *(path for path in optional if path is not None)))]


def srun_options(container: ContainerConfig | None, directories: Sequence[Path], workdir: Path) -> list[str]:
    """Return the srun options that start the container (pyxis); empty for other runtimes."""
    if container is None or container.runtime != "pyxis":
        return []
    return [
        f"--container-image={shlex.quote(container.image)}",
        f"--container-mounts={shlex.quote(','.join(mounts(container, directories)))}",
        f"--container-workdir={shlex.quote(str(workdir))}",
        *container.arguments,
    ]


def command_prefix(container: ContainerConfig | None, directories: Sequence[Path], workdir: Path, *, gpus: bool) -> list[str]:
    """Return the lines before the command that start the container (apptainer); empty for other runtimes."""
    if container is None or container.runtime != "apptainer":
        return []
    binds = ",".join(mounts(container, directories))
    return [
        "apptainer exec",
        *([GPU_FLAG] if gpus else []),
        f"--bind {shlex.quote(binds)}",
        f"--pwd {shlex.quote(str(workdir))}",
        *container.arguments,
        shlex.quote(container.image),
    ]
