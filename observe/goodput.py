"""The run ledger during the run: updated with each event, without reading the log again.

At each log record its seconds equal those of `run_ledger` on the log so far, except for what only a later start records: steps that are
repeated, and the time a killed process ran on after its last event.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.earlier_starts import read_earlier_starts
from ridgeline.rundir.events import Event, EventLog
from ridgeline.rundir.goodput import OF_PHASE, EarlierStarts, Waiting, add_starts, queue_waits, seconds_by_category


@dataclass
class _Open:
    """An open phase."""

    phase: str
    start_s: float
    depth: int


@dataclass
class LiveGoodput:
    """Seconds by category up to the newest event.

    Args:
      seconds: by category, before this start.
      mono_s: time of the newest event on the monotonic clock of this process.
      usd_per_s: price of all devices of the run; None: not known.
    """

    seconds: dict[str, float]
    mono_s: float
    usd_per_s: float | None = None
    _open: dict[int, _Open] = field(default_factory=dict)
    _marks: dict[tuple[str, int | None, str], float] = field(default_factory=dict)
    """(name, parent, category of the parent) of a total -> seconds of the category when the last total was recorded."""
    _before: dict[str, float] = field(default_factory=dict)
    _window: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._before, self._window = dict(self.seconds), dict(self.seconds)

    def observe(self, kind: str, mono_s: float, fields: Mapping[str, Any]) -> None:
        """Add one event of this process (EventLog.observer). Another thread may have written a later one before it."""
        with self._lock:
            late_s, before = max(0.0, self.mono_s - mono_s), self._category()
            self._advance(mono_s)
            self.follow(kind, mono_s, fields)
            if kind == "phase_total":
                self._carve(fields)
            elif kind == "hang" and "silent_s" in fields:
                self._move(float(fields["silent_s"]), self._category(), "hang")
            if kind in ("phase_start", "phase_end"):
                self._move(late_s, before, self._category())

    def follow(self, kind: str, mono_s: float, fields: Mapping[str, Any]) -> None:
        """Open or close the phase of an event that begins or ends one."""
        if kind == "phase_start":
            parent = self._open.get(fields["parent"])
            self._open[fields["id"]] = _Open(fields["phase"], mono_s, 0 if parent is None else parent.depth + 1)
        elif kind == "phase_end":
            self._open.pop(fields["id"], None)

    def _category(self) -> str:
        inner = max(self._open.values(), key=lambda p: (p.start_s, p.depth), default=None)
        return "unexplained" if inner is None else OF_PHASE[inner.phase]

    def _advance(self, mono_s: float) -> None:
        self.seconds[self._category()] += max(0.0, mono_s - self.mono_s)
        self.mono_s = max(self.mono_s, mono_s)

    def _carve(self, fields: Mapping[str, Any]) -> None:
        parent = self._open.get(fields["parent"])
        outside = "unexplained" if parent is None else OF_PHASE[parent.phase]
        key = (fields["phase"], fields["parent"], outside)
        before_s = self._marks.get(key, self._before[outside])
        self._move(min(float(fields["duration_s"]), self.seconds[outside] - before_s), outside, OF_PHASE[fields["phase"]])
        self._marks[key] = self.seconds[outside]

    def _move(self, amount_s: float, source: str, target: str) -> None:
        amount_s = min(max(0.0, amount_s), self.seconds[source])
        self.seconds[source] -= amount_s
        self.seconds[target] += amount_s
        for key, mark_s in self._marks.items():
            if key[2] == source:  # the newest seconds are moved; moving more than there were since a mark lowers the mark
                self._marks[key] = min(mark_s, self.seconds[source])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the run so far, and the goodput since the last call."""
        with self._lock:
            seconds = dict(self.seconds)
        wall_s = sum(seconds.values())
        passed_s = wall_s - sum(self._window.values())
        done_s = seconds["productive"] - self._window["productive"]
        self._window = seconds
        values = {"train_goodput/goodput": seconds["productive"] / wall_s if wall_s > 0 else 0.0, "train_goodput/wall_s": wall_s}
        if passed_s > 0:
            values["train_goodput/goodput_now"] = done_s / passed_s
        values |= {f"train_goodput/{name}_s": value for name, value in seconds.items() if value > 0}
        if self.usd_per_s is not None:
            values["train_goodput/usd"] = wall_s * self.usd_per_s
        return values


def watch(events: EventLog, run_dir: Path, start_step: int, devices: int) -> LiveGoodput:
    """Begin the ledger of a run before it trains from `start_step`.

    Of the log only the start before this one is read (rundir/earlier_starts.py).

    Raises UserError when the log or the record of the jobs is damaged.
    """
    run = RunDir(run_dir)
    earlier, log = read_earlier_starts(run, events, start_step)
    price_usd = run.price
    usd_per_s = None if price_usd is None else price_usd * devices / 3600
    live = begin(log, queue_waits(run, log), start_step, usd_per_s, earlier)
    events.observer = live.observe
    return live


def begin(
    log: Sequence[Event], waits: Iterable[Waiting], start_step: int, usd_per_s: float | None, earlier: EarlierStarts | None = None
) -> LiveGoodput:
    """Return the ledger of a log so far, with the steps marked as lost that a start from `start_step` repeats.

    Args:
      log: events of all starts, or of those after `earlier`.
      waits: of these starts.
      start_step: step that the newest start resumes from.
      usd_per_s: as in LiveGoodput.
      earlier: the starts before those of the log.
    """
    last = max((event for event in log if event.process == 0), key=lambda event: (event.restart, event.mono_s))
    train = {"phase": "train", "id": -1, "parent": None, "start_step": start_step}
    about = Event("phase_start", last.time_s, last.mono_s, last.run, 0, last.restart, train)
    line = add_starts(earlier or EarlierStarts(), [*log, about], waits).stretches
    live = LiveGoodput(seconds_by_category(line), last.mono_s, usd_per_s)
    for event in log:
        if event.process == 0 and event.restart == last.restart:
            live.follow(event.kind, event.mono_s, event.fields)
    return live
