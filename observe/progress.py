"""Progress of training: a live line on a terminal, plain lines elsewhere, and the same lines in the run's train.log. Process 0 only."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console

from ridgeline.configs.errors import UserError
from ridgeline.configs.format import format_count, format_duration, format_seconds
from ridgeline.rundir.jsonl import LineFile

if TYPE_CHECKING:
    from rich.table import Table

FIGURES: dict[str, tuple[int, str, Callable[[float], str]]] = {
    "loss": (1, "train/loss", lambda v: f"loss {v:.4f}"),
    "grad_norm": (6, "train/grad_norm", lambda v: f"grad {v:.3g}"),
    "learning_rate": (7, "train/learning_rate", lambda v: f"lr {v:.2e}"),
    "tokens_per_s": (3, "train_speed/tokens_per_s", lambda v: f"{format_count(v)} tokens/s"),
    "step_time": (5, "train_speed/step_time_mean_s", lambda v: f"step {format_seconds(v)}"),
    "mfu": (4, "train_speed/mfu", lambda v: f"MFU {v:.1%}"),
    "skipped": (0, "train/skipped_steps", lambda v: f"skipped {v:.0f}" if v else ""),
    "eta": (2, "eta", lambda v: f"eta {format_duration(v)}"),
}
"""Figures of a line, in their order: rank (the highest are left out first where the line is too long), metric, text."""
GAP = "  "
WIDEST_BAR, NARROWEST_BAR = 24, 8


class Progress:
    """What shows progress. This base shows nothing: it serves processes other than 0."""

    def start(self, step: int = 0) -> None:
        """Begin after `step` steps (more than 0 when the run was resumed)."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show `step` finished steps with the metrics of the log step (names: rundir.metrics)."""

    def advance(self, step: int) -> None:
        """Show `step` finished steps without new metrics. Takes microseconds."""

    def note(self, text: str) -> None:
        """Print a line (an evaluation, a save, a warning)."""

    def keep(self, path: Path) -> None:
        """Append all lines to this file, those printed before included. A file that cannot be written does not end the run."""

    def record(self, text: str) -> None:
        """Write a line to that file only."""

    @contextlib.contextmanager
    def phase(self, what: str, *, live_only: bool = False) -> Iterator[None]:
        """Show what is being done before the first step, and for how long. `live_only`: not where lines are printed."""
        yield

    def close(self) -> None:
        """End. Safe to call twice."""


class _Eta:
    """Remaining time, from the wall time per step since the first log step, evaluations and saves included."""

    def __init__(self, total_steps: int, clock: Callable[[], float]) -> None:
        self._total_steps, self._clock = total_steps, clock
        self._first_step: int | None = None
        self._first_s = 0.0

    def at(self, step: int) -> dict[str, float]:
        """Return `eta`, the remaining seconds after `step` steps; nothing at the first call."""
        now_s = self._clock()
        if self._first_step is None:
            self._first_step, self._first_s = step, now_s  # not from the start, to exclude compilation
        done = step - self._first_step
        return {} if done <= 0 else {"eta": (now_s - self._first_s) / done * (self._total_steps - step)}


class PlainProgress(Progress):
    """One line per log step, for files and batch jobs."""

    def __init__(self, total_steps: int, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._total_steps, self._write, self._clock = total_steps, write, clock
        self._eta = _Eta(total_steps, clock)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one line."""
        self._write(log_line(step, self._total_steps, {**metrics, **self._eta.at(step)}))

    def note(self, text: str) -> None:
        """Print a line."""
        self._write(text)

    @contextlib.contextmanager
    def phase(self, what: str, *, live_only: bool = False) -> Iterator[None]:
        """Print a line before and one after."""
        if live_only:
            yield
            return
        begin_s = self._clock()
        self._write(f"{what} ...")
        yield
        self._write(_done(what, self._clock() - begin_s))


class TerminalProgress(Progress):
    """A live line: what is done and for how long, later a bar with step, loss and time left. Lines scroll above it, one per log step."""

    def __init__(self, total_steps: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.live import Live

        self._total_steps, self._console, self._clock = total_steps, console, clock
        self._eta = _Eta(total_steps, clock)
        self._step: int | None = None
        self._metrics: Mapping[str, float] = {}
        self._phases: list[tuple[str, float]] = []
        self._start_s = clock()
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4)

    def _draw(self) -> Table:
        """Return the live line, in the width that the terminal has now."""
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table

        line, width = Table.grid(padding=(0, len(GAP), 0, 0)), self._console.width
        if self._step is None:
            what, begin_s = self._phases[-1] if self._phases else ("starting", self._start_s)
            line.add_row(Spinner("line"), what, format_duration(self._clock() - begin_s))
            return line
        count = f"{self._step:>{len(str(self._total_steps))}}/{self._total_steps}"
        bar = max(NARROWEST_BAR, min(WIDEST_BAR, width // 6))
        elapsed = format_duration(self._clock() - self._start_s)
        figures = fitted(self._metrics, width - bar - len(count) - 2 * len(GAP) - len(elapsed) - len(GAP))
        line.add_row(ProgressBar(self._total_steps, self._step, width=bar), count, *([figures] if figures else []), elapsed)
        return line

    def start(self, step: int = 0) -> None:
        """Show the bar."""
        self._step, self._start_s = step, self._clock()
        self._live.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar, and print the metrics above it."""
        self._step, self._metrics = step, {**metrics, **self._eta.at(step)}
        self.note(log_line(step, self._total_steps, self._metrics, self._console.width))

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._step = step

    def note(self, text: str) -> None:
        """Print a line above the bar, wrapped between words; a longer word (a path) stays whole."""
        self._console.print(text, markup=False, highlight=False, overflow="ignore", crop=False)

    @contextlib.contextmanager
    def phase(self, what: str, *, live_only: bool = False) -> Iterator[None]:
        """Show a spinner with the time since the begin, and print a line at the end."""
        begin_s = self._clock()
        self._phases.append((what, begin_s))
        self._live.start()
        try:
            yield
        finally:
            self._phases.pop()
        if not live_only:
            self.note(_done(what, self._clock() - begin_s))

    def close(self) -> None:
        """Leave the bar as it is and release the terminal."""
        self._live.transient = self._step is None
        self._live.stop()


class LoggedProgress(Progress):
    """Passes everything to another progress, and keeps its lines in a file."""

    def __init__(self, shown: Progress, total_steps: int, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._shown, self._now = shown, now
        self._lines = PlainProgress(total_steps, self.record)
        self._waiting: list[str] | None = []
        """Lines before the file is open; None when there is none."""
        self._file: LineFile | None = None

    def keep(self, path: Path) -> None:
        """Open the file and write the lines that waited for it."""
        try:
            self._file = LineFile(path)
        except UserError as error:
            self._shown.note(f"no {path.name}: {error}")
        waiting, self._waiting = self._waiting or [], None
        if self._file is not None and waiting:
            self._file.append("".join(waiting).encode(errors="replace"))

    def record(self, text: str) -> None:
        """Append a line with its time."""
        line = f"{self._now().astimezone():%Y-%m-%d %H:%M:%S}  {text}\n"
        if self._file is not None:
            self._file.append(line.encode(errors="replace"))
        elif self._waiting is not None:
            self._waiting.append(line)

    def start(self, step: int = 0) -> None:
        """Begin."""
        self._shown.start(step)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show and keep a log step."""
        self._shown.update(step, metrics)
        self._lines.update(step, metrics)

    def advance(self, step: int) -> None:
        """Show a step."""
        self._shown.advance(step)

    def note(self, text: str) -> None:
        """Show and keep a line."""
        self._shown.note(text)
        self.record(text)

    @contextlib.contextmanager
    def phase(self, what: str, *, live_only: bool = False) -> Iterator[None]:
        """Show and keep a phase."""
        with self._shown.phase(what, live_only=live_only), self._lines.phase(what, live_only=live_only):
            yield

    def close(self) -> None:
        """Release the terminal and the file."""
        self._shown.close()
        if self._file is not None:
            self._file.close()


class _Lossy:
    """A stream whose loss does not end training: of a reader that has ended, a terminal that is closed, a disk that is full.

    Slurm's step daemon reads what a rank prints; when it is killed, the rank lives on. The lines are kept in train.log.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        self._attempt(self._stream.flush)

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # for good: what other code prints must not fail either
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def build_progress(total_steps: int, *, process: int = 0, stream: TextIO | None = None) -> Progress:
    """Return progress that shows nothing on processes other than 0, a live line on a terminal, plain lines elsewhere.

    A stream that can no longer be written does not end the run.
    """
    if process != 0:
        return Progress()
    stream = cast(TextIO, _Lossy(sys.stdout if stream is None else stream))
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LoggedProgress(TerminalProgress(total_steps, console), total_steps)
    # One write: print() would write the newline apart where Python is unbuffered, and a line of another thread between the two.
    return LoggedProgress(PlainProgress(total_steps, lambda line: print(f"{line}\n", end="", file=stream, flush=True)), total_steps)


def _done(what: str, took_s: float) -> str:
    return f"{what}: done in {format_seconds(took_s)}"


def log_line(step: int, total_steps: int, metrics: Mapping[str, float], width: int | None = None) -> str:
    """Return the line of a log step. `width`: figures that do not fit are left out; None: all are shown."""
    head = f"step {step}/{total_steps}"
    figures = fitted(metrics, None if width is None else width - len(head) - len(GAP))
    return GAP.join(part for part in (head, figures) if part)


def fitted(metrics: Mapping[str, float], width: int | None) -> str:
    """Return the figures of a line, the most important ones that fit into `width` (None: all)."""
    texts = {name: show(float(metrics[metric])) for name, (_, metric, show) in FIGURES.items() if metric in metrics}
    kept: set[str] = set()
    for name in sorted((name for name, text in texts.items() if text), key=lambda name: FIGURES[name][0]):
        if width is None or len(GAP.join(texts[other] for other in (*kept, name))) <= width:
            kept.add(name)
    return GAP.join(text for name, text in texts.items() if name in kept)
