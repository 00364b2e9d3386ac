"""Leave the results of an analysis where others look: analysis.json and figures beside the profile, scalars and images in TensorBoard."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.explain.trace.analysis import Analysis, to_json
from ridgeline.explain.trace.figures import breakdown, roofline
from ridgeline.rundir.captures import ANALYSIS_FILE
from ridgeline.rundir.jsonl import dump_json
from ridgeline.rundir.metrics import metric

TENSORBOARD_RUN = "steps"
"""Directory under the log directory: a run of its own for TensorBoard, which follows one event file per directory."""
OPERATIONS = 60
"""How many operations analysis.json keeps: the report draws them under the roofline."""
_SCALARS = ("total_s", "compute_s", "exposed_communication_s", "overlapped_communication_s", "exposed_copy_s", "idle_s")


def publish(analysis: Analysis, *, clock: Callable[[], float] = time.time) -> list[Path]:
    """Write the results; return the files.

    Raises:
      UserError: the directory of the capture cannot be written.
    """
    directory = analysis.capture.directory
    report = to_json(analysis, top=OPERATIONS)
    figures = {"breakdown": breakdown(report["devices"]), "roofline": roofline(analysis)}
    written: list[Path] = []
    try:
        for name, png in figures.items():
            if png is not None:
                _replace(directory / f"{name}.png", png)
                written.append(directory / f"{name}.png")
        _replace(directory / ANALYSIS_FILE, (dump_json(report) + "\n").encode())
        written.append(directory / ANALYSIS_FILE)
        if analysis.capture.run_dir is not None:
            written.append(_tensorboard(analysis.capture.run_dir / "tensorboard" / TENSORBOARD_RUN, report, figures, clock))
    except OSError as error:
        raise UserError(f"cannot write the analysis to {directory}: {error.strerror}") from None
    return written


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: others read it while the run goes on."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(content)
    scratch.replace(path)


def _tensorboard(directory: Path, report: dict[str, Any], figures: dict[str, bytes | None], clock: Callable[[], float]) -> Path:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    directory.mkdir(parents=True, exist_ok=True)
    numbers = [s["step"] for s in report["steps"] if s["step"] is not None]
    last = max(numbers, default=0)
    writer = EventsWriter(str(directory / "events"), f".{last:07d}")
    for step in report["steps"]:
        values = []
        for key in _SCALARS:
            metric(f"train_step_ledger/{key}")
            values.append(Summary.Value(tag=f"train_step_ledger/{key}", simple_value=step[key]))
        writer.write_event(Event(wall_time=clock(), step=step["step"] or 0, summary=Summary(value=values)))
    images = [Summary.Value(tag=f"train_step_ledger/{name}", image=_image(png)) for name, png in figures.items() if png is not None]
    writer.write_event(Event(wall_time=clock(), step=last, summary=Summary(value=images)))
    writer.close()
    return Path(writer._file_name)


def _image(png: bytes) -> Any:
    from tensorboardX.proto.summary_pb2 import Summary

    width, height = struct.unpack(">II", png[16:24])
    return Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
