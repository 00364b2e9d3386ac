"""Speed, time and memory of a finished run, for scaling studies, sweeps and comparisons of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import Event
from ridgeline.rundir.goodput import Ledger, queue_waits, run_ledger
from ridgeline.rundir.speed import Line, Speed, log_lines, run_speed, windows

LEAST_STEPS = 2
"""Fewest steps after the warm-up from which a speed is computed."""


@dataclass(frozen=True)
class MeasuredRun:
    """One run, measured."""

    path: Path
    name: str
    config: Config
    devices: int
    processes: int
    device_kind: str
    ledger: Ledger
    speed: Speed
    """After the warm-up, waits for data included."""
    windows_s: tuple[float, ...]
    """Median step time of every log window after the warm-up."""
    warmup_steps: int
    """Steps excluded from the speed of the first start."""
    steps: int
    """Last step."""
    peak_bytes: int | None
    """Peak device memory; on backends that report none, arguments and temporaries of the compiled step."""
    own_flags: Mapping[str, str]
    """XLA flags and environment variables set by the user, by name."""

    @property
    def tokens_per_step(self) -> int:
        """Positions of one step over all devices."""
        return self.config.data.batch_size * self.config.data.seq_len

    @property
    def tokens(self) -> float:
        """Positions of the whole run."""
        return float(self.tokens_per_step * self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Over all devices, after the warm-up."""
        return self.speed.tokens_per_s

    @property
    def step_s(self) -> float:
        """Mean time of a step after the warm-up."""
        return self.speed.step_s

    @property
    def time_s(self) -> float:
        """Time to solution: the whole run with start-up and compilation, without the scheduler's queue."""
        return self.ledger.wall_s - self.ledger.seconds["queue"]

    def solution_s(self, tokens: float | None) -> float:
        """Return the time to solution for another number of tokens: the same overheads and the measured rate; None: of the run itself."""
        if tokens is None:
            return self.time_s
        return max(0.0, self.time_s - self.tokens / self.tokens_per_s) + tokens / self.tokens_per_s


def read_measured(path: Path, *, warmup_steps: int | None = None) -> MeasuredRun:
    """Measure a finished run directory.

    Args:
      path: the run directory.
      warmup_steps: log windows that end at or before this step are excluded; None: the first window of each start.

    Raises:
      UserError: not a run, damaged, not finished, or too few steps after the warm-up.
    """
    run = RunDir.open(path)
    config, start, events = run.require_config(), run.require_start(), run.require_events()
    lines = log_lines(events)
    made = int(lines[-1]["step"]) if lines else 0
    if made < config.trainer.steps:
        raise UserError(f"{path} is not finished: step {made} of {config.trainer.steps}")
    excluded = (int(lines[0]["step"]) if lines else 0) if warmup_steps is None else warmup_steps
    speed, windows_s = _steady(path, lines, warmup_steps, excluded)
    return MeasuredRun(
        path=path,
        name=run.name,
        config=config,
        devices=start.devices.count,
        processes=start.processes,
        device_kind=start.devices.kind or "?",
        ledger=run_ledger(events, queue_waits(run, events)),
        speed=speed,
        windows_s=windows_s,
        warmup_steps=excluded,
        steps=made,
        peak_bytes=_peak_bytes(run, lines),
        own_flags=_own_flags(events),
    )


def _steady(path: Path, lines: Sequence[Line], warmup_steps: int | None, excluded: int) -> tuple[Speed, tuple[float, ...]]:
    """Return the speed after the warm-up, and the median step times of its windows."""
    counted = windows(lines, warmup_steps, only_warmup=False)
    speed = run_speed(counted)
    if speed is None or speed.steps < LEAST_STEPS:
        raise UserError(
            f"{path}: {0 if speed is None else speed.steps} steps were logged after the warm-up of {excluded}, "
            f"{LEAST_STEPS} are needed: raise trainer.steps or lower trainer.log_every"
        )
    return speed, tuple(window.median_s for window in counted)


def _peak_bytes(run: RunDir, lines: Sequence[Line]) -> int | None:
    measured = [int(line["peak_bytes"]) for line in lines if "peak_bytes" in line]
    return max(measured) if measured else run.step_bytes


_NOT_PERFORMANCE = ("--xla_force_host_platform_device_count", "--xla_dump")


def _own_flags(events: Sequence[Event]) -> dict[str, str]:
    """Return the performance settings that the user set in the environment of the newest start."""
    found = [event.fields for event in events if event.kind == "environment" and event.process == 0]
    recorded = found[-1].get("settings") if found else None
    settings = [row for row in recorded if isinstance(row, dict)] if isinstance(recorded, list) else []
    names = {str(row.get("name")): str(row.get("value")) for row in settings if row.get("chosen") == "user"}
    return {name: value for name, value in names.items() if not name.startswith(_NOT_PERFORMANCE)}
