"""Write the results of an analysis: analysis.json and figures beside the profile, scalars and images for TensorBoard."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.explain.trace.capture import Capture
from ridgeline.explain.trace.figures import breakdown, roofline
from ridgeline.rundir.analysis import Analysis, write_analysis
from ridgeline.rundir.captures import ANALYSIS_FILE, written_below
from ridgeline.rundir.files import has_entry_ending, refuse_link, refuse_links, write_atomically
from ridgeline.rundir.metrics import metric

TENSORBOARD_RUN = "steps"
"""Directory under the log directory: a run of its own for TensorBoard, which follows one event file per directory."""
OPERATIONS = 60
"""Operations in analysis.json: the report draws them under the roofline."""
_SCALARS = ("total_s", "compute_s", "exposed_communication_s", "overlapped_communication_s", "exposed_copy_s", "idle_s")


def publish(capture: Capture, analysis: Analysis, *, clock: Callable[[], float] = time.time) -> list[Path]:
    """Write the results; return the files.

    Raises:
      UserError: the directory of the capture cannot be written.
    """
    directory = capture.directory
    refuse_links(directory, below=written_below(directory))
    pngs = {"breakdown": breakdown(analysis.devices), "roofline": roofline(analysis)}
    figures = {name: png for name, png in pngs.items() if png is not None}
    written: list[Path] = []
    try:
        for name, png in figures.items():
            write_atomically(directory / f"{name}.png", png)
            written.append(directory / f"{name}.png")
        write_analysis(directory / ANALYSIS_FILE, analysis, top=OPERATIONS)
        written.append(directory / ANALYSIS_FILE)
        if capture.run is not None:
            written.append(_tensorboard(capture.run.path / "tensorboard" / TENSORBOARD_RUN, analysis, figures, clock))
    except OSError as error:
        raise UserError(f"cannot write the analysis to {directory}: {error.strerror}") from None
    return written


def _tensorboard(directory: Path, analysis: Analysis, figures: Mapping[str, bytes], clock: Callable[[], float]) -> Path:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    refuse_link(directory)
    directory.mkdir(parents=True, exist_ok=True)
    last = max((step.step for step in analysis.steps if step.step is not None), default=0)
    number = 0
    while has_entry_ending(directory, suffix := f".{last:07d}.{number:03d}"):  # EventsWriter would follow a link
        number += 1
    writer = EventsWriter(str(directory / "events"), suffix)
    for step in analysis.steps:
        values = []
        for key in _SCALARS:
            metric(f"train_step_ledger/{key}")
            values.append(Summary.Value(tag=f"train_step_ledger/{key}", simple_value=getattr(step, key)))
        writer.write_event(Event(wall_time=clock(), step=step.window if step.step is None else step.step, summary=Summary(value=values)))
    images = [Summary.Value(tag=f"train_step_ledger/{name}", image=_image(png)) for name, png in figures.items()]
    writer.write_event(Event(wall_time=clock(), step=last, summary=Summary(value=images)))
    writer.close()
    return Path(writer._file_name)


def _image(png: bytes) -> Any:
    from tensorboardX.proto.summary_pb2 import Summary

    width, height = struct.unpack(">II", png[16:24])
    return Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
