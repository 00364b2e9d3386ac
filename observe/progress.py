"""Progress of training for the terminal: a live bar on a terminal, a line per log step elsewhere, nothing on processes other than 0."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from rich.console import Console

from ridgeline.configs.format import format_count, format_duration, format_seconds


class Progress(Protocol):
    """The interface of all kinds of progress."""

    def start(self, step: int = 0) -> None:
        """Begin after `step` steps (more than 0 when the run was resumed)."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show `step` finished steps with the metrics of the log step (names: rundir.metrics)."""

    def advance(self, step: int) -> None:
        """Show `step` finished steps without new metrics. Takes microseconds."""

    def note(self, text: str) -> None:
        """Print a line (an evaluation, a save, a warning)."""

    def close(self) -> None:
        """End. Safe to call twice."""


class SilentProgress:
    """Shows nothing: processes other than 0."""

    def start(self, step: int = 0) -> None:
        """Nothing."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def advance(self, step: int) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _Eta:
    """Remaining time, from the wall time per step since the first log step, evaluations and saves included."""

    def __init__(self, total_steps: int, clock: Callable[[], float]) -> None:
        self._total_steps, self._clock = total_steps, clock
        self._first_step: int | None = None
        self._first_s = 0.0

    def at(self, step: int) -> float | None:
        """Return the remaining seconds after `step` steps; None at the first call."""
        now_s = self._clock()
        if self._first_step is None:
            self._first_step, self._first_s = step, now_s  # not from the start, to exclude compilation
        done = step - self._first_step
        return None if done <= 0 else (now_s - self._first_s) / done * (self._total_steps - step)


class PlainProgress:
    """One line per log step, for files and batch jobs."""

    def __init__(self, total_steps: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_steps, self._stream = total_steps, stream
        self._eta = _Eta(total_steps, clock)

    def start(self, step: int = 0) -> None:
        """Nothing to show yet."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one line."""
        eta_s = self._eta.at(step)
        parts = [f"step {step}/{self._total_steps}", *describe(metrics)]
        if eta_s is not None:
            parts.append(f"eta {format_duration(eta_s)}")
        self.note("  ".join(parts))

    def advance(self, step: int) -> None:
        """Only log steps are shown."""

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to release."""


class RichProgress:
    """A live bar with loss, tokens per second and time left; notes scroll above it."""

    def __init__(self, total_steps: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichBar

        self._total_steps = total_steps
        self._eta = _Eta(total_steps, clock)
        self._bar = RichBar(
            TextColumn("[bold]train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
            redirect_stdout=True,
            redirect_stderr=True,
        )
        self._task = self._bar.add_task("train", total=total_steps, figures="")

    def start(self, step: int = 0) -> None:
        """Show the bar."""
        self._bar.update(self._task, completed=step)
        self._bar.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar and show the metrics."""
        eta_s = self._eta.at(step)
        figures = "  ".join([*describe(metrics), *([f"eta {format_duration(eta_s)}"] if eta_s is not None else [])])
        self._bar.update(self._task, completed=step, figures=figures)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the bar as it is and release the terminal."""
        self._bar.stop()


def build_progress(total_steps: int, *, process: int = 0, stream: TextIO | None = None) -> Progress:
    """Return silent progress on processes other than 0, the live bar on a terminal, plain lines elsewhere."""
    if process != 0:
        return SilentProgress()
    stream = sys.stdout if stream is None else stream
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return RichProgress(total_steps, console)
    return PlainProgress(total_steps, stream)


def describe(metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics of a progress line, formatted."""
    formats: dict[str, Callable[[float], str]] = {
        "train/loss": lambda v: f"loss {v:.4f}",
        "train/grad_norm": lambda v: f"grad {v:.3g}",
        "train/learning_rate": lambda v: f"lr {v:.2e}",
        "train_speed/tokens_per_s": lambda v: f"{format_count(v)} tokens/s",
        "train_speed/step_time_mean_s": lambda v: f"step {format_seconds(v)}",
        "train_speed/mfu": lambda v: f"MFU {v:.1%}",
        "train/skipped_steps": lambda v: f"skipped {v:.0f}" if v else "",
    }
    return [text for name, show in formats.items() if name in metrics and (text := show(float(metrics[name])))]
