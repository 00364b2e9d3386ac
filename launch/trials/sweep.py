"""Sweeps: the points of a SWEEP.yaml on disk, their state, and which of them are to be submitted.

SWEEP/sweep.json          the points, in the order of their numbers
SWEEP/000, SWEEP/001      run directories
SWEEP/slurm/<n>/points/   configs of the n-th submission's points
SWEEP/configs/000.yaml    config of a point that ran on this machine; its output is in SWEEP/logs/000.log
SWEEP/failures/000.json   why a point failed on this machine
SWEEP/lease/              held by the process that runs the points on this machine

A point that was interrupted or failed continues its run; a finished one continues if the file sets more steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.launch.slurm.shape import JobShape
from ridgeline.launch.slurm.state import job_states
from ridgeline.launch.slurm.submit import Submitter
from ridgeline.launch.trials.engine import DIGITS, SWEEP, Query, Status, TrialFiles
from ridgeline.launch.trials.submission import Submission
from ridgeline.launch.trials.sweep_file import Point, Sweep
from ridgeline.rundir import jobs as job_files
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.files import Record, read_record
from ridgeline.rundir.jobs import JobRecord

FILE = "sweep.json"


class StoredPoints(Record):
    """sweep.json."""

    points: tuple[dict[str, Any], ...]
    """Overrides of each point, in the order of their numbers."""


@dataclass(frozen=True)
class NumberedPoint:
    """A point of a sweep on disk."""

    index: int
    overrides: Mapping[str, Any]
    directory: Path


Chosen = Sequence[tuple[NumberedPoint, Point]]
"""Points of a sweep file that are to run."""


@dataclass(frozen=True, kw_only=True)
class Result(Status):
    """State and results of a point so far."""

    point: NumberedPoint


def is_sweep(directory: Path) -> bool:
    """Return whether a directory holds a sweep, readable or not."""
    return os.path.lexists(directory / FILE)


def point_name(index: int) -> str:
    """Return the name of a point, which is that of its run directory."""
    return f"{index:0{DIGITS}}"


def read_points(directory: Path) -> list[NumberedPoint]:
    """Return the points of a sweep directory. Raises UserError for any other directory."""
    stored = read_record(directory / FILE, StoredPoints)
    if stored is None:
        raise UserError(f"{directory} is not a sweep directory: {FILE} is missing")
    return [NumberedPoint(index, overrides, directory / point_name(index)) for index, overrides in enumerate(stored.points)]


def numbered(sweep: Sweep) -> list[tuple[NumberedPoint, Point]]:
    """Number the points of a sweep file: a point on disk keeps its number, a new one gets the next. Numbers are never reused."""
    known = read_points(sweep.directory) if is_sweep(sweep.directory) else []
    numbers = {json.dumps(point.overrides, sort_keys=True): point.index for point in known}
    for point in sweep.points:
        numbers.setdefault(point.key, len(numbers))
    return [(NumberedPoint(numbers[p.key], p.overrides, sweep.directory / point_name(numbers[p.key])), p) for p in sweep.points]


def write_points(sweep: Sweep) -> None:
    """Store the new points of a sweep file after those already stored. Raises UserError."""
    stored: list[Any] = [point.overrides for point in read_points(sweep.directory)] if is_sweep(sweep.directory) else []
    stored += [point.overrides for number, point in numbered(sweep) if number.index >= len(stored)]
    try:
        sweep.directory.mkdir(parents=True, exist_ok=True)
        partial = sweep.directory / f".{FILE}"
        partial.write_text(json.dumps({"name": sweep.config.name, "points": stored}, indent=1) + "\n", encoding="utf-8")
        partial.replace(sweep.directory / FILE)
    except OSError as error:
        raise UserError(f"cannot write the sweep into {sweep.directory}: {error.strerror or error}") from error


def point_config(sweep: Sweep, number: NumberedPoint, point: Point) -> Config:
    """Return the config of a point with its name and run directory."""
    name = f"{sweep.config.name}-{point_name(number.index)}"
    return point.config.model_copy(update={"name": name, "run_dir": number.directory})


def submission(sweep: Sweep, chosen: Chosen, cluster: ClusterConfig, shape: JobShape, by: Submitter, *, preflight: bool) -> Submission:
    """Return what submits the chosen points."""
    configs = {point_name(number.index): point_config(sweep, number, point) for number, point in chosen}
    files = TrialFiles(sweep.directory, SWEEP)
    return Submission(files, sweep.config.name, configs, cluster, shape, by, preflight, sweep.config.max_running)


def results(directory: Path, query: Query = job_states) -> list[Result]:
    """Return the state of every point. Damaged files of one point do not affect the others."""
    files, points = TrialFiles(directory, SWEEP), read_points(directory)
    states = files.last_states([point_name(point.index) for point in points], query)
    found = []
    for point in points:
        name = point_name(point.index)
        found.append(Result(**vars(files.status(name, states.get(name))), point=point))
    return found


def to_do(sweep: Sweep, found: Sequence[Result]) -> list[tuple[NumberedPoint, Point]]:
    """Return the points of the file that are neither finished nor pending or running.

    A finished point is included if the file sets more steps. Raises UserError if the file changed any other key of it.
    """
    known = {result.point.index: result for result in found}
    chosen = []
    for number, point in numbered(sweep):
        result = known.get(number.index)
        if result is not None and (result.busy or (result.finished and not _has_more_steps(sweep, number, point))):
            continue
        chosen.append((number, point))
    return chosen


def _has_more_steps(sweep: Sweep, number: NumberedPoint, point: Point) -> bool:
    files, name = TrialFiles(sweep.directory, SWEEP), point_name(number.index)
    stored = files.config(name)
    own = {"name": stored.name, "run_dir": stored.run_dir, "mesh": stored.mesh}  # the mesh was resolved when it was submitted
    changed = files.changes(name, point.config.model_copy(update=own))
    steps = changed.pop("trainer.steps", None)
    if changed:
        shown = ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in changed.items())
        raise UserError(f"{number.directory} was trained with another config ({shown}): set another `directory` in the sweep file")
    return steps is not None and steps[1] > steps[0]


def jobs_of(run_dir: Path) -> list[JobRecord]:
    """Return the jobs of a run directory; those of a sweep's point are recorded in the sweep directory. Empty for a run without Slurm.

    Raises UserError for a directory that is neither a run nor was submitted.
    """
    parent = run_dir.absolute().parent
    if (job_files.slurm_directory(run_dir) / job_files.JOBS_FILE).exists() or not run_dir.is_dir():
        return job_files.read_jobs(run_dir)
    if is_sweep(parent):
        name = run_dir.absolute().name
        return [replace(record, job=f"{record.job}_{int(name)}") for record in TrialFiles(parent, SWEEP).jobs(name)]
    return [] if is_sweep(run_dir) or RunDir(run_dir).exists else job_files.read_jobs(run_dir)
