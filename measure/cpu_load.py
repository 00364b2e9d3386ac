"""Measure how much CPU time other programs use on this process's cores while it times something."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of a cpu line of /proc/stat: user, nice, system, irq, softirq, steal (idle and iowait are not busy; guests are in user)."""


def own_cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


class OtherCpuLoad:
    """Counts from its construction on.

    Args:
      stat: the kernel's CPU counters.
      cores: cores of this process; None: its CPU affinity.
      own_s: CPU seconds used by this process.
      clock: seconds.
    """

    def __init__(
        self,
        stat: Path = Path("/proc/stat"),
        cores: set[int] | None = None,
        own_s: Callable[[], float] = own_cpu_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stat, self._own_s, self._clock = stat, own_s, clock
        self._cores = cores if cores is not None else _allowed()
        self._begun = self._read()

    def share(self) -> float | None:
        """Return the share of the cores' time used by other programs and other virtual machines; None without kernel counters."""
        if self._begun is None or (now := self._read()) is None:
            return None
        wall_s, busy_s, own_s = (b - a for a, b in zip(self._begun, now, strict=True))
        if wall_s <= 0:
            return None
        return min(1.0, max(0.0, (busy_s - own_s) / (wall_s * len(self._cores))))

    def _read(self) -> tuple[float, float, float] | None:
        """Return (clock, busy seconds of the cores, own CPU seconds)."""
        try:
            lines = self._stat.read_text().splitlines()
            fields = [line.split() for line in lines if line.startswith("cpu") and line[3:4].isdigit()]
            ticks = sum(int(f[1 + column]) for f in fields if int(f[0][3:]) in self._cores for column in _BUSY)
        except (OSError, ValueError, IndexError):
            return None
        return self._clock(), ticks / os.sysconf("SC_CLK_TCK"), self._own_s()


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
