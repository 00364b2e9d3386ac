"""The step-time ledger of a device: compute, exposed communication, exposed copies and idle time sum to the step.

Times are lengths of interval unions: two streams that compute at once count once. Communication is exposed while no compute runs, a copy
while neither compute nor communication runs. Idle time is divided by what the host was doing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.explain.trace import intervals
from ridgeline.explain.trace.classify import COMMUNICATION, COMPUTE, COPY
from ridgeline.explain.trace.read import Ops
from ridgeline.explain.trace.steps import Windows
from ridgeline.rundir.analysis_times import DeviceStep

CAUSES = ("data_wait", "compile", "checkpoint", "launch", "blocked", "other")
"""What the host was doing while a device was idle."""
PS = 1e-12
"""Seconds per picosecond."""


@dataclass(frozen=True)
class Activity:
    """When a device was busy, by kind of work: disjoint sorted intervals, picoseconds."""

    compute: np.ndarray
    communication: np.ndarray
    copies: np.ndarray

    @property
    def busy(self) -> np.ndarray:
        """Work of any kind."""
        return intervals.join(self.compute, self.communication, self.copies)


def activity(ops: Ops, kinds: np.ndarray) -> Activity:
    """Return when a device was busy. `kinds`: of the operations (explain.trace.classify)."""

    def of(kind: int) -> np.ndarray:
        rows = kinds == kind
        return intervals.union(ops.start[rows], ops.end[rows])

    return Activity(of(COMPUTE), of(COMMUNICATION), of(COPY))


def step_ledgers(device: str, windows: Windows, active: Activity, causes: Mapping[str, np.ndarray]) -> list[DeviceStep]:
    """Account for the time of every step of a device, in the order of its windows.

    Args:
      device: its label.
      windows: its steps.
      active: when it was busy.
      causes: what the host was doing: disjoint interval sets under CAUSES other than `other`.
    """
    exposed = intervals.subtract(active.communication, active.compute)
    copies = intervals.subtract(active.copies, intervals.join(active.compute, active.communication))
    span = intervals.union(windows.start, windows.end)
    idle = intervals.subtract(span, active.busy)

    def of(interval_set: np.ndarray) -> np.ndarray:
        return intervals.covered(windows.start, windows.end, interval_set)

    total = windows.end - windows.start
    compute, communication, exposed_n, copies_n, idle_n = (of(s) for s in (active.compute, active.communication, exposed, copies, idle))
    cause_n = {cause: of(intervals.intersect(idle, causes[cause])) for cause in CAUSES if cause in causes}
    cause_n["other"] = idle_n - sum(cause_n.values(), np.zeros_like(idle_n))
    residual = total - compute - exposed_n - copies_n - idle_n
    assert (residual == 0).all() and (cause_n["other"] >= 0).all(), "the parts of a step do not sum to it"
    operations = np.bincount(windows.of_op[windows.of_op >= 0], minlength=len(total))
    return [
        DeviceStep(
            device=device,
            total_s=int(total[i]) * PS,
            compute_s=int(compute[i]) * PS,
            communication_s=int(communication[i]) * PS,
            exposed_communication_s=int(exposed_n[i]) * PS,
            overlapped_communication_s=int(communication[i] - exposed_n[i]) * PS,
            exposed_copy_s=int(copies_n[i]) * PS,
            idle_s=int(idle_n[i]) * PS,
            idle_by_cause={cause: int(cause_n[cause][i]) * PS if cause in cause_n else 0.0 for cause in CAUSES},
            residual_s=int(residual[i]) * PS,
            operations=int(operations[i]),
        )
        for i in range(len(total))
    ]
