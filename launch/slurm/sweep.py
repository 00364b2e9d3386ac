"""A sweep on disk: which point has which run directory, which points are still to do, and what came of each.

SWEEP/sweep.json          the points, in the order they got their numbers
SWEEP/000, SWEEP/001      run directories
SWEEP/slurm/<n>/points/   configs of the n-th submission's points
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.configs.diff import diff
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.launch.slurm.progress import last_records, run_progress
from ridgeline.launch.slurm.state import FORGOTTEN, JobState, job_states
from ridgeline.launch.slurm.sweep_file import Point, Sweep
from ridgeline.rundir import jobs as places
from ridgeline.rundir.jobs import JobRecord

FILE = "sweep.json"
FINISHED = "finished"
MISSING = "not submitted"
FILL = 3
"""Digits of a point's directory."""


@dataclass(frozen=True)
class NumberedPoint:
    """A point of a sweep on disk."""

    index: int
    overrides: Mapping[str, Any]
    directory: Path


@dataclass(frozen=True)
class Result:
    """What came of a point so far."""

    point: NumberedPoint
    state: str
    """finished, not submitted, a state of Slurm, or what is wrong with its files."""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    """Training loss of the last log line."""
    evaluations: Mapping[str, float] | None = None
    """Set to its last loss."""
    tokens_per_s: float | None = None
    restarts: int | None = None
    exit_code: int | None = None
    busy: bool = False
    """Waits in the queue or runs."""


def is_sweep(directory: Path) -> bool:
    """Tell whether a directory holds a sweep."""
    return (directory / FILE).is_file()


def point_name(index: int) -> str:
    """Return the name of a point's run directory."""
    return f"{index:0{FILL}}"


def read_points(directory: Path) -> list[NumberedPoint]:
    """Return the points of a sweep directory. Raises UserError when it is none."""
    path = directory / FILE
    try:
        stored = json.loads(path.read_bytes())["points"]
        return [NumberedPoint(index, overrides, directory / point_name(index)) for index, overrides in enumerate(stored)]
    except FileNotFoundError:
        raise UserError(f"{directory} is not the directory of a sweep: it has no {FILE}") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def numbered(sweep: Sweep) -> list[tuple[NumberedPoint, Point]]:
    """Give every point of a sweep file its number: the one it has on disk, else the next free. Points that left the file keep theirs."""
    known = read_points(sweep.directory) if is_sweep(sweep.directory) else []
    numbers = {json.dumps(point.overrides, sort_keys=True): point.index for point in known}
    for point in sweep.points:
        numbers.setdefault(point.key, len(numbers))
    return [(NumberedPoint(numbers[p.key], p.overrides, sweep.directory / point_name(numbers[p.key])), p) for p in sweep.points]


def write_points(sweep: Sweep) -> None:
    """Store the points of a sweep file beside those that are there already."""
    stored: list[Any] = [point.overrides for point in read_points(sweep.directory)] if is_sweep(sweep.directory) else []
    stored += [point.overrides for number, point in numbered(sweep) if number.index >= len(stored)]
    sweep.directory.mkdir(parents=True, exist_ok=True)
    partial = sweep.directory / f".{FILE}"
    partial.write_text(json.dumps({"name": sweep.config.name, "points": stored}, indent=1) + "\n", encoding="utf-8")
    partial.replace(sweep.directory / FILE)


def results(directory: Path, ask: Callable[[str, str | None], Sequence[JobState]] = job_states) -> list[Result]:
    """Return what came of every point. A point whose files are damaged says so; the others are not affected."""
    states = _task_states(directory, ask)
    return [_result(point, states.get(point.index)) for point in read_points(directory)]


def _task_states(directory: Path, ask: Callable[[str, str | None], Sequence[JobState]]) -> dict[int, JobState]:
    """Return the newest state of every point that was submitted."""
    found: dict[int, JobState] = {}
    if not (places.slurm_directory(directory) / places.JOBS_FILE).exists():
        return found
    for record in places.read_jobs(directory):
        submitted: list[int] = record.details["points"]
        for state in ask(record.job, record.slurm_cluster):
            for index in submitted if state.task is None else [state.task]:
                found[index] = state
    return found


def _result(point: NumberedPoint, state: JobState | None) -> Result:
    try:
        progress = run_progress(point.directory)
        metrics = last_records(point.directory / "metrics.jsonl")
    except UserError as error:
        return Result(point, f"unreadable: {error}")
    evaluations: dict[str, float] = {}
    for record in metrics:
        evaluations |= {key.split("/")[1]: value for key, value in record.items() if key.startswith("eval/") and key.endswith("/loss")}
    return Result(
        point=point,
        state=FINISHED if progress.finished else _words(state),
        step=progress.step,
        steps=progress.steps,
        loss=progress.loss,
        evaluations=evaluations,
        tokens_per_s=progress.tokens_per_s,
        restarts=max(0, progress.starts - 1) if progress.starts else None,
        exit_code=state.exit_code if state is not None else None,
        busy=state is not None and not state.ended,
    )


def _words(state: JobState | None) -> str:
    if state is None:
        return MISSING
    return "not finished" if state.state == FORGOTTEN else state.state.lower()


def to_do(sweep: Sweep, found: Sequence[Result]) -> list[tuple[NumberedPoint, Point]]:
    """Return the points of the file that are neither finished nor waiting or running.

    A finished point is to do again when the file asks for more steps. Raises UserError when the file changed what it was trained with.
    """
    known = {result.point.index: result for result in found}
    chosen = []
    for number, point in numbered(sweep):
        result = known.get(number.index)
        if result is not None and (result.busy or (result.state == FINISHED and not _asks_for_more(number, point))):
            continue
        chosen.append((number, point))
    return chosen


def _asks_for_more(number: NumberedPoint, point: Point) -> bool:
    before = from_resolved(number.directory / "config.yaml")
    own = {"name": before.name, "run_dir": before.run_dir, "mesh": before.mesh}
    changed = {key: (old, new) for key, old, new in diff(before, point.config.model_copy(update=own))}
    steps = changed.pop("trainer.steps", None)
    if changed:
        told = ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in changed.items())
        raise UserError(f"{number.directory} was trained with another config ({told}): give the changed sweep another directory")
    return steps is not None and steps[1] > steps[0]


def jobs_of(run_dir: Path) -> list[JobRecord]:
    """Return the jobs of a run directory; those of a point of a sweep are recorded in the sweep above it. Raises UserError for none."""
    parent = run_dir.absolute().parent
    if (places.slurm_directory(run_dir) / places.JOBS_FILE).exists() or not is_sweep(parent) or not run_dir.is_dir():
        return places.read_jobs(run_dir)
    index = int(run_dir.absolute().name)
    mine = [record for record in places.read_jobs(parent) if index in record.details["points"]]
    return [replace(record, job=f"{record.job}_{index}") for record in mine]
