"""Phases as intervals, built from the events of a run: start, duration, process, parent and outcome."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ridgeline.rundir.events import PHASES, Event


@dataclass
class Phase:
    """One interval of the time of one process."""

    name: str
    process: int
    restart: int
    start_s: float
    """Wall clock at the start. Of a total: as if it were one interval that ended when it was recorded."""
    start_mono_s: float
    """Start on the monotonic clock of this process and restart."""
    duration_s: float
    """On the monotonic clock."""
    outcome: str
    """ok, error, interrupted, or cut: the process was killed in the phase, which then ends at the last event of the process."""
    count: int = 1
    """Number of intervals in a total."""
    summed: bool = False
    """Recorded as a total (`phase_total`)."""
    written: int = 0
    """Index of its first event in the log."""
    parent: Phase | None = None
    children_s: float = 0.0
    """Time of the phases directly inside it."""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def own_s(self) -> float:
        """Time in the phase and in none of its children."""
        return max(0.0, self.duration_s - self.children_s)


def phases(events: Iterable[Event]) -> list[Phase]:
    """Build the phases of one or more processes and restarts, in order of their start. Those of unknown names are left out.

    A phase whose end is missing (the process was killed) ends at the last event of its process and restart.
    """
    logs: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        logs[event.process, event.restart].append(event)
    return sorted((phase for log in logs.values() for phase in _of_one_log(log)), key=lambda phase: phase.start_s)


def _of_one_log(log: list[Event]) -> list[Phase]:
    found: list[Phase] = []
    started: dict[int, Phase] = {}
    for line, event in enumerate(log):
        values = dict(event.fields)
        if values.get("phase") not in PHASES:
            continue
        if event.kind == "phase_start":
            phase = Phase(values.pop("phase"), event.process, event.restart, event.time_s, event.mono_s, math.nan, "cut")
            key, parent = values.pop("id"), values.pop("parent")
            phase.parent, phase.written = started.get(parent), line
            phase.fields = values
            started[key] = phase
            found.append(phase)
        elif event.kind == "phase_end":
            ended = started.get(values["id"])
            if ended is None:  # the line of its start was lost (full disk)
                start_s, start_mono_s = event.time_s - values["duration_s"], event.mono_s - values["duration_s"]
                ended = Phase(values["phase"], event.process, event.restart, start_s, start_mono_s, math.nan, "cut", written=line)
                ended.parent = started.get(values.get("parent", -1))
                found.append(ended)
            phase = ended
            phase.duration_s, phase.outcome = values["duration_s"], values["outcome"]
            phase.fields.update({k: v for k, v in values.items() if k not in ("phase", "id", "parent", "duration_s", "outcome")})
        elif event.kind == "phase_total":
            duration_s, parent, ago_s = values.pop("duration_s"), values.pop("parent"), values.pop("ago_s", 0.0)
            ago_s = ago_s if isinstance(ago_s, int | float) else 0.0
            start_s, start_mono_s = event.time_s - duration_s - ago_s, event.mono_s - duration_s - ago_s
            phase = Phase(
                values.pop("phase"), event.process, event.restart, start_s, start_mono_s, duration_s, "ok", values.pop("count"), True
            )
            phase.fields = values
            phase.parent, phase.written = started.get(parent), line
            found.append(phase)
    for phase in found:
        if math.isnan(phase.duration_s):
            phase.duration_s = log[-1].mono_s - phase.start_mono_s
    for phase in found:
        if phase.parent is not None:
            phase.parent.children_s += phase.duration_s
    return found
