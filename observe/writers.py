"""Where metrics go: metrics.jsonl always, TensorBoard by default, Weights & Biases when asked. Only process 0 writes.

A run that was killed at step 120 and resumes from its checkpoint of step 100 computes steps 101 to 120 again. Every writer is told
`resume_step=100` and sees to it that a reader finds each step once: TensorBoard gets a purge mark, metrics.jsonl a `resume` line that
`read_metrics` obeys.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import LoggingConfig
from ridgeline.rundir.jsonl import LineFile, dump_json, read_jsonl
from ridgeline.rundir.metrics import metric

_log = logging.getLogger("ridgeline")


class MetricWriter(Protocol):
    """Takes metrics of a step and texts about the run."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`; their names are in `rundir.metrics.METRICS`."""

    def text(self, tag: str, markdown: str) -> None:
        """Record a Markdown text about the run."""

    def flush(self) -> None:
        """Hand everything written so far to the disk."""

    def close(self) -> None:
        """Flush and release. Safe to call twice."""


class JsonlWriter:
    """One JSON object per line: `step`, `time` (s since 1970) and the metrics. Texts are not kept here.

    Raises:
      UserError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = LineFile(path)
        if resume_step is not None:
            self._line({"resume": resume_step})

    def _line(self, record: dict[str, Any]) -> None:
        self._file.append((dump_json({**record, "time": round(self._clock(), 3)}) + "\n").encode())

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        self._line({"step": step, **metrics})

    def text(self, tag: str, markdown: str) -> None:
        """Texts have files of their own in the run directory."""

    def flush(self) -> None:
        """Lines are handed over as they are written."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl: one dict per line in the order written, without the lines a later resume has superseded.

    Non-finite values come back as floats.

    Raises:
      UserError: the file cannot be read or is damaged before its last line.
    """
    records: list[dict[str, Any]] = []
    special = {"NaN", "Infinity", "-Infinity"}
    for _, line in read_jsonl(path):
        if "resume" in line:
            records = [r for r in records if r["step"] <= line["resume"]]
        else:
            records.append({k: float(v) if isinstance(v, str) and v in special else v for k, v in line.items()})
    return records


class TensorBoardWriter:
    """TensorBoard event files: all metrics of a step in one record, texts for the text page.

    tensorboardX imports slowly (it pulls in cloud storage clients; PyTorch is kept from it), so the file is opened at the first
    metrics, not while a run starts. tensorboardX syncs the disk at each flush: that happens when `flush_s` have passed since the last,
    and on `flush()`. A kill loses at most that much of TensorBoard's view; metrics.jsonl has it all.

    Raises:
      UserError: the directory cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        resume_step: int | None = None,
        restart: int = 0,
        flush_s: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._resume_step, self._restart = directory, resume_step, restart
        self._flush_s, self._clock = flush_s, clock
        self._texts: list[tuple[str, str]] = []
        self._events: Any = None
        self._files = 0
        self._flushed_s = clock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write TensorBoard files to {directory}: {error.strerror}") from error
        if not os.access(directory, os.W_OK):
            raise UserError(f"cannot write TensorBoard files to {directory}: permission denied")

    def _open(self) -> None:
        load_tensorboardx()
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        # The suffix keeps files begun within one second apart, and in order.
        self._events = EventsWriter(str(self._directory / "events"), f".{self._restart:04d}.{self._files:03d}")
        self._files += 1
        if self._resume_step is not None and self._files == 1:  # readers forget what they have from this step on
            self._add(self._resume_step and self._resume_step + 1, session_log=SessionLog(status=SessionLog.START))
        for tag, markdown in self._texts:
            self._add_text(tag, markdown)
        self._texts.clear()

    @contextlib.contextmanager
    def _new_file_on_failure(self) -> Iterator[None]:
        """A full disk may have cut a record, and readers stop there: let the next metrics begin a new file."""
        try:
            yield
        except OSError:
            abandoned, self._events = self._events, None
            if abandoned is not None:
                # Closing it here keeps its finaliser from printing the same failure to the terminal (Python 3.13 and later);
                # EventsWriter.close would flush first, and leave the file open when that fails.
                with contextlib.suppress(OSError):
                    abandoned._py_recordio_writer.close()
            raise

    def _add(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._events.write_event(Event(wall_time=self._clock(), step=step, **content))

    def _add_text(self, tag: str, markdown: str) -> None:
        from tensorboardX.summary import text

        self._add(self._resume_step or 0, summary=text(tag, markdown))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step as one record."""
        load_tensorboardx()
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        with self._new_file_on_failure():
            if self._events is None:
                self._open()
            self._add(step, summary=Summary(value=values))
        if self._clock() - self._flushed_s >= self._flush_s:
            self.flush()

    def text(self, tag: str, markdown: str) -> None:
        """Write a text for TensorBoard's text page."""
        if self._events is None:
            self._texts.append((tag, markdown))
        else:
            self._add_text(tag, markdown)

    def flush(self) -> None:
        """Write and sync the file."""
        self._flushed_s = self._clock()
        if self._events is not None:
            with self._new_file_on_failure():
                self._events.flush()

    def close(self) -> None:
        """Write what is pending and close the file."""
        if self._events is None and self._texts:
            self._open()
        if self._events is not None:
            with self._new_file_on_failure():
                self._events.close()
        self._events = None


def load_tensorboardx() -> None:
    """Load tensorboardX without PyTorch, which it loads where it is installed (1.4 s) for tensors that we never write."""
    if "tensorboardX" in sys.modules or "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it now raises ImportError, which tensorboardX expects
    try:
        import tensorboardX  # noqa: F401
    finally:
        del sys.modules["torch"]


class WandbWriter:
    """Weights & Biases. The id is the run's, so that a resume continues the same curves.

    wandb keeps the first value of a step: after a resume the steps computed again are dropped, which loses nothing, as they are equal.

    Raises:
      UserError: the `wandb` package is not installed.
    """

    def __init__(self, project: str, *, name: str, run: str, directory: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "logging.wandb_project is set but wandb is not installed: pip install 'ridgeline[wandb]' or set logging.wandb_project=null"
            ) from error
        self._run = wandb.init(project=project, name=name, id=run or None, resume="allow", dir=directory, config=dict(config))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def text(self, tag: str, markdown: str) -> None:
        """The config is given at the start; other texts are kept as run notes."""
        if tag != "config":
            self._run.notes = f"{self._run.notes or ''}\n\n## {tag}\n{markdown}".strip()

    def flush(self) -> None:
        """wandb sends in its own process."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MultiWriter:
    """Hands everything to several writers, after checking the names.

    A writer that raises OSError (full disk) is reported once, until a flush of it succeeds, and tried again each time: a plot must not
    end a run.
    """

    def __init__(self, writers: Sequence[MetricWriter]) -> None:
        self._writers = list(writers)
        self._failing: set[int] = set()

    def _each(self, what: str, *args: Any) -> None:
        for index, writer in enumerate(self._writers):
            try:
                getattr(writer, what)(*args)
            except OSError as error:
                if index not in self._failing:
                    _log.warning("metrics are being lost: %s: %s", type(writer).__name__, error)
                self._failing.add(index)
            else:
                if what == "flush":  # a write may only have reached a buffer
                    self._failing.discard(index)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write to all."""
        for name in metrics:
            metric(name)
        self._each("write", step, {name: float(value) for name, value in metrics.items()})

    def text(self, tag: str, markdown: str) -> None:
        """Write to all."""
        self._each("text", tag, markdown)

    def flush(self) -> None:
        """Flush all."""
        self._each("flush")

    def close(self) -> None:
        """Close all."""
        self._each("close")


def build_writers(
    logging_config: LoggingConfig,
    run_dir: Path,
    *,
    name: str,
    run: str,
    config: Mapping[str, Any],
    process: int = 0,
    restart: int = 0,
    resume_step: int | None = None,
) -> MultiWriter:
    """Build the writers a config asks for; none on processes other than 0.

    Args:
      run_dir: gets metrics.jsonl and tensorboard/.
      name, run: the run's name and its id (the same over restarts).
      config: the resolved config as plain data; written as a text table.
      restart: restart number of the process (see EventLog).
      resume_step: the step restored from, None when training starts at step 0.
    """
    if process != 0:
        return MultiWriter([])
    if resume_step is None and restart > 0:  # an earlier start died before its first checkpoint
        resume_step = 0
    writers: list[MetricWriter] = [JsonlWriter(run_dir / "metrics.jsonl", resume_step=resume_step)]
    if logging_config.tensorboard:
        writers.append(TensorBoardWriter(run_dir / "tensorboard", resume_step=resume_step, restart=restart))
    if logging_config.wandb_project is not None:
        writers.append(WandbWriter(logging_config.wandb_project, name=name, run=run, directory=run_dir, config=config))
    writer = MultiWriter(writers)
    writer.text("config", config_table(config))
    return writer


def config_table(config: Mapping[str, Any]) -> str:
    """Render a nested config as a Markdown table of dotted keys and values."""
    lines = ["| key | value |", "|---|---|"]
    for key, value in _flat(config, ""):
        shown = str(value).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| `{key}` | `{shown}` |")
    return "\n".join(lines)


def _flat(config: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in config.items():
        dotted = f"{prefix}{key}"
        rows += _flat(value, dotted + ".") if isinstance(value, Mapping) and value else [(dotted, value)]
    return rows
