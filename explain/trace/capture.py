"""Find a capture on disk and what lies around it: its traces, its HLO, the run's config and events."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError, nearest
from ridgeline.configs.load import from_resolved
from ridgeline.configs.schema import Config
from ridgeline.rundir.captures import TRACE_SUFFIX
from ridgeline.rundir.events import Event, event_file, read_events
from ridgeline.rundir.phases import phases

_CAUSES = {"save": "checkpoint", "compile": "compile"}
"""Phase of the event log -> cause of idle devices."""


@dataclass(frozen=True)
class Capture:
    """One captured profile."""

    directory: Path
    traces: tuple[Path, ...]
    """One per process."""
    run_dir: Path | None
    """The run it belongs to, when it lies in one."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """capture.json, where there is one."""
    config: Config | None = None


def find_capture(path: Path, name: str | None = None) -> Capture:
    """Find the capture that a path means: a trace, a capture's directory, a log directory or a run (its newest capture, or the one named).

    Raises:
      UserError: there is nothing of the kind, or the named capture does not exist.
    """
    if path.is_file():
        if not path.name.endswith(TRACE_SUFFIX):
            raise UserError(f"{path} is no profile: its name must end in {TRACE_SUFFIX}")
        return _capture(path.parent, (path,))
    if not path.is_dir():
        raise UserError(f"{path} does not exist: name a run, a capture's directory or an {TRACE_SUFFIX} file")
    own = _traces(path)
    if own:
        return _capture(path, own)
    found = captures(path)
    if not found:
        raise UserError(
            f"{path} holds no profile: set profiler.start_step, or send SIGUSR1 to the running job, or touch {path / 'profile'}"
        )
    if name is None:
        return _capture(found[-1], _traces(found[-1]))
    for directory in found:
        if directory.name == name:
            return _capture(directory, _traces(directory))
    names = [directory.name for directory in found]
    close = nearest(name, names)
    hint = f"; did you mean '{close}'?" if close else ""
    raise UserError(f"{path} has no capture '{name}'{hint} (captures: {', '.join(names)})")


def captures(directory: Path) -> list[Path]:
    """List the captures of a run, a log directory or a profile directory, oldest first."""
    roots = [directory, directory / "plugins" / "profile", directory / "tensorboard" / "plugins" / "profile"]
    found = {d for root in roots if root.is_dir() for d in root.iterdir() if d.is_dir() and _traces(d)}
    return sorted(found, key=lambda d: (max(t.stat().st_mtime for t in _traces(d)), d.name))


def phases_by_cause(capture: Capture, process: int) -> dict[str, list[tuple[float, float]]]:
    """Cause of idleness -> (start, end) in seconds since 1970, from the event log of one process of the run."""
    found: dict[str, list[tuple[float, float]]] = {}
    for phase in phases(events_of(capture, process)):
        if phase.name in _CAUSES and not phase.summed:
            found.setdefault(_CAUSES[phase.name], []).append((phase.start_s, phase.start_s + phase.duration_s))
    return found


def events_of(capture: Capture, process: int) -> list[Event]:
    """Return the event log of one process of the run; [] without one."""
    if capture.run_dir is None or not (file := event_file(capture.run_dir, process)).exists():
        return []
    return read_events(file)


def mesh_sizes(capture: Capture, devices: int) -> dict[str, int] | None:
    """Return axis -> size of the mesh of a run, an axis of size -1 given what the others leave; None where it is not known or cannot be
    that of so many devices."""
    if capture.config is None:
        return None
    sizes = capture.config.mesh.sizes
    known = math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: devices // known if size == -1 else size for axis, size in sizes.items()}
    return sizes if math.prod(sizes.values()) == devices else None


def _traces(directory: Path) -> tuple[Path, ...]:
    return tuple(sorted(directory.glob("*" + TRACE_SUFFIX)))


def _capture(directory: Path, traces: tuple[Path, ...]) -> Capture:
    record: dict[str, Any] = {}
    file = directory / "capture.json"
    if file.is_file():
        try:
            record = json.loads(file.read_bytes())
        except ValueError as error:
            raise UserError(f"{file} cannot be read: {error}") from None
    run_dir = next((parent for parent in directory.resolve().parents if (parent / "run.json").is_file()), None)
    config = from_resolved(run_dir / "config.yaml") if run_dir is not None and (run_dir / "config.yaml").is_file() else None
    return Capture(directory, traces, run_dir, record, config)
