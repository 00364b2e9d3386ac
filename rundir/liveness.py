"""The state of a run, from its lease and its progress; and all runs below a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.jobs import JOBS_FILE, slurm_directory
from ridgeline.rundir.lease import live_holder
from ridgeline.rundir.progress import RunProgress, run_progress
from ridgeline.rundir.records import RUN_FILE

RUNNING, FINISHED, STOPPED, NOT_STARTED = "running", "finished", "stopped", "not started"
MAX_DEPTH = 4
"""Directories below the root in which runs are looked for: a study has runs/STUDY/runs/TRIAL."""


def run_state(directory: Path, progress: RunProgress) -> str:
    """Return the state of a run: running, finished, stopped (before its last step) or not started."""
    if live_holder(directory) is not None:
        return RUNNING
    if progress.finished:
        return FINISHED
    return STOPPED if progress.starts else NOT_STARTED


@dataclass(frozen=True)
class ListedRun:
    """A run below some directory."""

    path: Path
    state: str
    """As `run_state`; damaged where its files cannot be read."""
    progress: RunProgress | None
    problem: str | None = None
    """Why it is damaged."""


def runs_below(root: Path) -> Iterator[ListedRun]:
    """Yield the run directories at and below `root`, MAX_DEPTH directories deep, sorted by path. A run is not searched for further runs.

    Raises UserError when `root` is not a directory.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a directory")
    for directory, below, names in os.walk(root):
        below.sort()
        path = Path(directory)
        submitted = (slurm_directory(path) / JOBS_FILE).is_file()
        if RUN_FILE in names or (submitted and "sweep.json" not in names):
            below.clear()
            yield _listed(path)
        elif len(path.relative_to(root).parts) >= MAX_DEPTH:
            below.clear()


def _listed(path: Path) -> ListedRun:
    try:
        if (path / RUN_FILE).exists():
            RunDir.open(path)
        progress = run_progress(path)
        return ListedRun(path, run_state(path, progress), progress)
    except UserError as error:
        return ListedRun(path, "damaged", None, str(error))
