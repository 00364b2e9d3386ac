"""The time of a start, from the start of the process to the end of its first step: recorded in the event log, and divided into parts.

The parts are those of TensorBoard's `train_startup`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.rundir.events import COMPILE_PARTS, Event, EventLog
from ridgeline.rundir.phases import Phase, phases

PARTS = {
    "launch": "starting the interpreter and the command, reading config and data manifests, describing mesh and model.",
    "import": "loading JAX and the packages of training.",
    "rendezvous": "the processes finding each other.",
    "restore": "reading the checkpoint.",
    "init": "creating the first state; compiling its program counts in the next parts.",
    "trace": "tracing programs.",
    "lower": "lowering programs.",
    "compile": "compiling programs with XLA, or reading them from JAX's cache.",
    "load": "loading programs that an earlier start compiled.",
    "setup": "waiting for the other processes to compile, opening checkpoints, data, metrics and the records of earlier starts.",
    "first_step": "the first step.",
    "other": "none of the above: agreeing with other processes, waiting for the first batch.",
}
"""Part of a start -> its meaning."""


def record_start(events: EventLog, before: Sequence[tuple[str, float, float]], facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Record in the event log what happened before it was open: launch, imports, rendezvous.

    Args:
      events: the log.
      before: (phase, begin, end) on the monotonic clock, s, in order; the remaining time since the start of the process is `launch`.
      facts: kind -> fields of further events.
    """
    now_s = time.monotonic()
    covered_s = now_s - process_age_s()
    for name, begin_s, end_s in before:
        if begin_s > covered_s:
            events.total("launch", begin_s - covered_s, ago_s=now_s - begin_s)
        events.total(name, end_s - begin_s, ago_s=now_s - end_s)
        covered_s = end_s
    events.total("launch", max(0.0, now_s - covered_s))
    for kind, fields in facts.items():
        events.emit(kind, **fields)


def process_age_s() -> float:
    """Return the seconds since this process was started (Linux; 0 elsewhere)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def startup_parts(events: Sequence[Event], restart: int) -> dict[str, float] | None:
    """Return the seconds of each part of one start of process 0, in the order of PARTS, without parts that did not happen. They sum to the
    time from the start of the process to the end of the first step. None before that end.

    Args:
      events: of the run (rundir.events.read_events).
      restart: which start.
    """
    found = phases(event for event in events if event.process == 0 and event.restart == restart)
    first = next((phase for phase in found if phase.name == "first_step"), None)
    if first is None:
        return None
    end_s = _end_s(first)
    seconds = dict.fromkeys(PARTS, 0.0)
    for phase in found:
        if _end_s(phase) > end_s:
            continue
        if phase.name == "compile":
            found_parts = {part: phase.fields.get(part, 0.0) for part in COMPILE_PARTS}
            parts = {part: float(value) for part, value in found_parts.items() if isinstance(value, int | float)}
            for part, value_s in parts.items():
                seconds[part.removesuffix("_s")] += value_s
        elif phase.name in seconds:
            seconds[phase.name] += phase.own_s
    total_s = end_s - min(phase.start_mono_s for phase in found)
    seconds["other"] = max(0.0, total_s - sum(value_s for name, value_s in seconds.items() if name != "other"))
    return {name: value_s for name, value_s in seconds.items() if value_s > 0}


def startup_metrics(events: Sequence[Event], restart: int) -> dict[str, float]:
    """Return the metrics of one start; none before the end of its first step."""
    parts = startup_parts(events, restart) or {}
    metrics = {f"train_startup/{name}_s": value_s for name, value_s in parts.items()}
    return metrics | {"train_startup/total_s": sum(parts.values())} if parts else {}


def _end_s(phase: Phase) -> float:
    return phase.start_mono_s + phase.duration_s
