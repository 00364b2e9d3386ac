"""Record in the event log what happened before the log was open: launch, imports, rendezvous."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.rundir.events import EventLog


def record_start(events: EventLog, before: Sequence[tuple[str, float, float]], facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Put what was before the log was open into it.

    Args:
      events: the log.
      before: (phase, begin, end) by the monotonic clock, s, one after another; the rest since the process was started is `launch`.
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
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
