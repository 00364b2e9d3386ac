"""What a finished run says about speed and time: the figures scaling studies, sweeps and comparisons of runs are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import from_resolved
from ridgeline.configs.schema import Config
from ridgeline.rundir.events import Event, event_files, read_events
from ridgeline.rundir.goodput import Ledger, queue_waits, run_ledger

LEAST_STEPS = 2
"""Steps after the warm-up below which nothing is said about the speed of a run."""


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
    step_s: float
    """Mean time of a step after the warm-up, waits for data included."""
    windows_s: tuple[float, ...]
    """Median step time of every log window after the warm-up."""
    warmup_steps: int
    """Steps that were left out."""
    steps: int
    """Last step made."""
    peak_bytes: int | None
    """Peak device memory; on backends that report none, arguments and temporaries of the compiled step."""
    own_flags: Mapping[str, str]
    """XLA flags and variables that the user set, by name."""

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
        return self.tokens_per_step / self.step_s

    @property
    def time_s(self) -> float:
        """Time to solution: the whole run, start-up and compilation included, the scheduler's queue excluded."""
        return self.ledger.wall_s - self.ledger.seconds["queue"]

    def solution_s(self, tokens: float | None) -> float:
        """Time to solution with another number of tokens: the same overheads, then the measured rate; None: the run as it was."""
        if tokens is None:
            return self.time_s
        return max(0.0, self.time_s - self.tokens / self.tokens_per_s) + tokens / self.tokens_per_s


def read_measured(path: Path, *, warmup_steps: int | None = None) -> MeasuredRun:
    """Measure a finished run directory.

    Args:
      path: the run directory.
      warmup_steps: log windows that end at or before this step are left out; None: the first window of the run.

    Raises:
      UserError: no run, damaged, not finished, or too short to say anything about its speed.
    """
    record = _record(path)
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} has no config.yaml: nothing says what was run")
    config = from_resolved(path / "config.yaml")
    files = event_files(path)
    if not files:
        raise UserError(f"{path} has no events.jsonl: the run never started")
    events = read_events(files)
    lines = [event.fields for event in events if event.kind == "step" and event.process == 0]
    made = int(lines[-1]["step"]) if lines else 0
    if made < config.trainer.steps:
        raise UserError(f"{path} is not finished: step {made} of {config.trainer.steps}")
    step_s, windows_s, left_out = _steady(path, lines, warmup_steps)
    start = record["starts"][-1]
    return MeasuredRun(
        path=path,
        name=str(record["name"]),
        config=config,
        devices=int(start["devices"]["count"]),
        processes=int(start.get("processes", 1)),
        device_kind=str(start["devices"].get("kind", "?")),
        ledger=run_ledger(events, queue_waits(path, events)),
        step_s=step_s,
        windows_s=windows_s,
        warmup_steps=left_out,
        steps=made,
        peak_bytes=_peak_bytes(path, lines),
        own_flags=_own_flags(events),
    )


def _steady(path: Path, lines: Sequence[Mapping[str, Any]], warmup_steps: int | None) -> tuple[float, tuple[float, ...], int]:
    """Return the mean step time after the warm-up, the medians of its windows, and the steps left out."""
    left_out = int(lines[0]["step"]) if warmup_steps is None else warmup_steps
    total_s, steps, windows_s, before = 0.0, 0, [], 0
    for line in lines:
        step = int(line["step"])
        if before >= left_out and step > before and "step_time_mean_s" in line:
            total_s += float(line["step_time_mean_s"]) * (step - before)
            steps += step - before
            windows_s.append(float(line["step_time_p50_s"]))
        before = max(before, step)  # a later start does some steps again
    if steps < LEAST_STEPS or not total_s > 0:
        raise UserError(
            f"{path}: {steps} steps were logged after the warm-up of {left_out}, {LEAST_STEPS} are needed: more trainer.steps, or a lower "
            "trainer.log_every"
        )
    return total_s / steps, tuple(windows_s), left_out


def _record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((path / "run.json").read_bytes())
        _ = record["name"], record["starts"][-1]["devices"]["count"]
    except FileNotFoundError:
        raise UserError(f"{path} is not a run directory: it has no run.json") from None
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{path / 'run.json'} cannot be read: {error}") from None
    return record


def _peak_bytes(path: Path, lines: Sequence[Mapping[str, Any]]) -> int | None:
    measured = [int(line["peak_bytes"]) for line in lines if "peak_bytes" in line]
    if measured:
        return max(measured)
    try:
        compiled = json.loads((path / "plan.json").read_bytes())["compiled"]
        return int(compiled["argument_bytes"] + compiled["temp_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a run without a plan beside it


_NO_KNOBS = ("--xla_force_host_platform_device_count", "--xla_dump")


def _own_flags(events: Sequence[Event]) -> dict[str, str]:
    """Return what the user set of the environment's performance settings in the newest start."""
    found = [event.fields for event in events if event.kind == "environment" and event.process == 0]
    settings = found[-1].get("settings", []) if found else []
    return {str(s["name"]): str(s["value"]) for s in settings if s.get("chosen") == "user" and not str(s["name"]).startswith(_NO_KNOBS)}
