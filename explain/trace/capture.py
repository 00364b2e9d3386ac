"""Find a captured profile on disk, and the run it belongs to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ridgeline.configs.errors import UserError, nearest
from ridgeline.configs.schema import Config
from ridgeline.rundir.captures import CAPTURE_FILE, TRACE_SUFFIX, captures, trace_files
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.files import Record, read_record


class CaptureRecord(Record):
    """capture.json, as observe.profiler writes it; all keys are absent in captures of other tools."""

    num_devices: int | None = None
    """Over all processes."""
    device_kind: str | None = None
    unprofiled_step_time_s: float | None = None
    """Usual step time of the run without the profiler."""


@dataclass(frozen=True)
class Capture:
    """One captured profile."""

    directory: Path
    traces: tuple[Path, ...]
    """One per process."""
    run: RunDir | None
    """The run it belongs to; None outside of a run directory."""
    record: CaptureRecord
    config: Config | None = None
    """Of the run."""


def find_capture(path: Path, name: str | None = None) -> Capture:
    """Find the capture at a path: a trace file, the directory of a capture, a log directory or a run directory.

    Args:
      path: where to look.
      name: of the capture, for a directory with several; None: the newest.

    Raises:
      UserError: there is no profile, or no capture of that name.
    """
    if path.is_file():
        if not path.name.endswith(TRACE_SUFFIX):
            raise UserError(f"{path} is not a profile: the name must end in {TRACE_SUFFIX}")
        return _capture(path.parent, (path,))
    if not path.is_dir():
        raise UserError(f"{path} does not exist; give a run directory, a capture directory or an {TRACE_SUFFIX} file")
    own = trace_files(path)
    if own:
        return _capture(path, own)
    found = captures(path)
    if not found:
        raise UserError(
            f"{path} contains no profile; set profiler.start_step, send SIGUSR1 to the running job, or touch {path / 'profile'}"
        )
    if name is None:
        return _capture(found[-1], trace_files(found[-1]))
    for directory in found:
        if directory.name == name:
            return _capture(directory, trace_files(directory))
    names = [directory.name for directory in found]
    close = nearest(name, names)
    hint = f"; did you mean '{close}'?" if close else ""
    raise UserError(f"{path} has no capture '{name}'{hint} (captures: {', '.join(names)})")


def mesh_sizes(capture: Capture, devices: int) -> dict[str, int] | None:
    """Return axis -> size of the mesh of a run, with an axis of size -1 resolved; None where it is unknown or does not fit the number of
    devices."""
    if capture.config is None:
        return None
    sizes = capture.config.mesh.sizes
    known = math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: devices // known if size == -1 else size for axis, size in sizes.items()}
    return sizes if math.prod(sizes.values()) == devices else None


def _capture(directory: Path, traces: tuple[Path, ...]) -> Capture:
    run = RunDir.find_above(directory)
    record = read_record(directory / CAPTURE_FILE, CaptureRecord) or CaptureRecord()
    return Capture(directory, traces, run, record, None if run is None else run.config)
