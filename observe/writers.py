"""Writers of metrics: metrics.jsonl always, TensorBoard by default, Weights & Biases when configured. Only process 0 writes.

A run that was killed at step 120 and resumes from its checkpoint of step 100 computes steps 101 to 120 again. Every writer gets
`resume_step=100` and ensures that a reader finds each step once: TensorBoard through a purge mark, metrics.jsonl through a `resume` line
that `rundir.directory.read_metrics` applies.
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

from ridgeline.configs import plugins
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import LoggingConfig
from ridgeline.rundir.directory import METRICS_FILE
from ridgeline.rundir.files import has_entry_ending
from ridgeline.rundir.jsonl import LineFile, dump_json
from ridgeline.rundir.metrics import DerivedMetric, derived_metric, metric

_log = logging.getLogger("ridgeline")


class MetricWriter(Protocol):
    """Writes the metrics of steps and texts about the run."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`; their names are in `rundir.metrics.METRICS`."""

    def text(self, tag: str, markdown: str, step: int | None = None) -> None:
        """Record a Markdown text about the run, or about `step`."""

    def flush(self) -> None:
        """Flush everything written so far to disk."""

    def close(self) -> None:
        """Flush and release. Safe to call twice."""


class JsonlWriter:
    """One JSON object per line: `step`, `time` (s since 1970) and the metrics. Texts are not written.

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

    def text(self, tag: str, markdown: str, step: int | None = None) -> None:
        """Nothing: texts are other files of the run directory."""

    def flush(self) -> None:
        """Nothing: each line is written at once."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter:
    """TensorBoard event files: all metrics of a step in one record, texts for the text page.

    tensorboardX imports slowly (it loads cloud storage clients), so the file is opened at the first metrics, not while a run starts.
    tensorboardX syncs the disk at each flush: every `flush_s` seconds, and on `flush()`. A kill loses at most that much of the event file;
    metrics.jsonl is complete.

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
        self._texts: list[tuple[str, str, int | None]] = []
        self._events: Any = None
        self._files = 0
        self._flushed_s = clock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write TensorBoard files to {directory}: {error.strerror}") from error
        if not os.access(directory, os.W_OK):
            raise UserError(f"cannot write TensorBoard files to {directory}: permission denied")

    @property
    def _suffix(self) -> str:
        """The end of a file's name. It keeps files begun within one second apart, and in order."""
        return f".{self._restart:04d}.{self._files:03d}"

    def _open(self) -> None:
        load_tensorboardx()
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        first = self._files == 0
        # Nothing may have the name of the file, not even a link, which EventsWriter would follow.
        while has_entry_ending(self._directory, self._suffix):
            self._files += 1
        self._events = EventsWriter(str(self._directory / "events"), self._suffix)
        self._files += 1
        if self._resume_step is not None and first:  # readers discard what they have from this step on
            self._add(self._resume_step and self._resume_step + 1, session_log=SessionLog(status=SessionLog.START))
        for tag, markdown, step in self._texts:
            self._add_text(tag, markdown, step)
        self._texts.clear()

    @contextlib.contextmanager
    def _new_file_on_failure(self) -> Iterator[None]:
        """Begin a new file with the next metrics after a failure: a full disk may cut a record, and readers stop there."""
        try:
            yield
        except OSError:
            abandoned, self._events = self._events, None
            if abandoned is not None:
                # Closing it here keeps its finalizer from printing the same failure to the terminal (Python 3.13 and later);
                # EventsWriter.close would flush first, and leave the file open when that fails.
                with contextlib.suppress(OSError):
                    abandoned._py_recordio_writer.close()
            raise

    def _add(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._events.write_event(Event(wall_time=self._clock(), step=step, **content))

    def _add_text(self, tag: str, markdown: str, step: int | None = None) -> None:
        from tensorboardX.summary import text

        self._add(self._resume_step or 0 if step is None else step, summary=text(tag, markdown))

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

    def text(self, tag: str, markdown: str, step: int | None = None) -> None:
        """Write a text for the text page of TensorBoard."""
        if self._events is None:
            self._texts.append((tag, markdown, step))
        else:
            with self._new_file_on_failure():
                self._add_text(tag, markdown, step)

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
    """Import tensorboardX without PyTorch: importing that takes 1.4 s and serves tensors that are never written here."""
    if "tensorboardX" in sys.modules or "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it now raises ImportError, which tensorboardX expects
    try:
        import tensorboardX  # noqa: F401
    finally:
        del sys.modules["torch"]


def check_writers(logging_config: LoggingConfig) -> None:
    """Raise UserError where Weights & Biases is configured and cannot be used. Call it before the compile."""
    if logging_config.wandb_project is None:
        return
    wandb, off = _import_wandb(), "set logging.wandb_project=null"
    try:
        offline = wandb.setup().settings.mode in ("offline", "disabled", "dryrun")
        logged_in = offline or wandb.login(verify=False)
    except Exception as error:  # wandb.Error, or another by version
        raise UserError(f"logging.wandb_project is set, but wandb has no login ({_first_line(error)}); or {off}") from error
    if not logged_in:
        raise UserError(f"logging.wandb_project is set, but wandb has no login: run `wandb login`, set WANDB_MODE=offline, or {off}")


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "logging.wandb_project is set, but wandb is not installed: pip install 'ridgeline[wandb]' or set logging.wandb_project=null"
        ) from error
    return wandb


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class WandbWriter:
    """Weights & Biases. The id is the run's, so that a resume continues the same curves.

    wandb keeps the first value of a step: the steps that are computed again after a resume are dropped; their values are equal.

    Raises:
      UserError: the `wandb` package is not installed, or cannot start a run.
    """

    def __init__(self, project: str, *, name: str, run: str, directory: Path, config: Mapping[str, Any]) -> None:
        wandb = _import_wandb()
        try:
            self._run = wandb.init(project=project, name=name, id=run or None, resume="allow", dir=directory, config=dict(config))
        except Exception as error:  # wandb.Error, or another by version
            raise UserError(f"logging.wandb_project={project}: wandb cannot start a run ({_first_line(error)})") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def text(self, tag: str, markdown: str, step: int | None = None) -> None:
        """Log the text of a step; append one about the run to its notes. The config is given at the start."""
        if step is not None:
            self._run.log({tag: markdown}, step=step)
        elif tag != "config":
            self._run.notes = f"{self._run.notes or ''}\n\n## {tag}\n{markdown}".strip()

    def flush(self) -> None:
        """Nothing: wandb sends in its own process."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MultiWriter:
    """Writes to several writers, after checking the metric names.

    `guard` is called before each of their calls. An OSError of a writer (full disk) is logged once until a flush of that writer succeeds;
    the run goes on, and each write is tried again.
    """

    def __init__(
        self,
        writers: Sequence[MetricWriter],
        derived: Mapping[str, DerivedMetric] | None = None,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._writers, self._guard = list(writers), guard
        self._derived = dict(derived or {})
        self._failing: set[int] = set()

    def _each(self, what: str, *args: Any) -> None:
        self._guard()
        for index, writer in enumerate(self._writers):
            try:
                getattr(writer, what)(*args)
            except OSError as error:
                if index not in self._failing:
                    _log.warning("metrics are not written: %s: %s", type(writer).__name__, error)
                self._failing.add(index)
            else:
                if what == "flush":  # a write may only reach a buffer
                    self._failing.discard(index)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write to all."""
        for name in metrics:
            metric(name)
        values = {name: float(value) for name, value in metrics.items()}
        derived = {name: one.value(values) for name, one in self._derived.items()}
        self._each("write", step, values | {name: float(value) for name, value in derived.items() if value is not None})

    def text(self, tag: str, markdown: str, step: int | None = None) -> None:
        """Write to all."""
        self._each("text", tag, markdown, step)

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
    guard: Callable[[], None] = lambda: None,
) -> MultiWriter:
    """Build the writers of a config; none on processes other than 0.

    Args:
      run_dir: directory of metrics.jsonl and tensorboard/.
      name, run: the run's name and its id (the same over restarts).
      config: the resolved config as plain data; written as a text table.
      restart: restart number of the process (see EventLog).
      resume_step: step of the restored checkpoint; None when training starts at step 0.
      guard: called before each write (Lease.check_log).
    """
    derived = {name: derived_metric(name) for name in logging_config.metrics}
    plugin_writers = [plugins.load_callable("writers", name) for name in logging_config.writers]
    if process != 0:
        return MultiWriter([])
    if resume_step is None and restart > 0:  # an earlier start ended before its first checkpoint
        resume_step = 0
    writers: list[MetricWriter] = [JsonlWriter(run_dir / METRICS_FILE, resume_step=resume_step)]
    if logging_config.tensorboard:
        writers.append(TensorBoardWriter(run_dir / "tensorboard", resume_step=resume_step, restart=restart))
    if logging_config.wandb_project is not None:
        writers.append(WandbWriter(logging_config.wandb_project, name=name, run=run, directory=run_dir, config=config))
    for make in plugin_writers:
        writers.append(make(run_dir, name=name, run=run, config=config, resume_step=resume_step))
    writer = MultiWriter(writers, derived, guard)
    writer.text("config", config_table(config))
    return writer


def config_table(config: Mapping[str, Any]) -> str:
    """Return a nested config as a Markdown table of dotted keys and values."""
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
