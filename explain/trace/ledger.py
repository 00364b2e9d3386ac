"""The step-time ledger of a device: compute, exposed communication, exposed copies and idle sum to the step.

By interval union: times when two streams compute at once count once. Communication is exposed where nothing computes, a copy where
nothing computes or communicates. Idle time is split by what the host was doing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.explain.trace import intervals
from ridgeline.explain.trace.classify import COMMUNICATION, COMPUTE, COPY
from ridgeline.explain.trace.read import Ops
from ridgeline.explain.trace.steps import Windows

CAUSES = ("data_wait", "compile", "checkpoint", "launch", "other")
"""What the host was doing while a device idled."""
PARTS = ("compute_s", "exposed_communication_s", "exposed_copy_s", "idle_s")
"""What sums to the total."""
PS = 1e-12


@dataclass(frozen=True)
class Activity:
    """When a device did what: disjoint sorted intervals, picoseconds."""

    compute: np.ndarray
    communication: np.ndarray
    copies: np.ndarray

    @property
    def busy(self) -> np.ndarray:
        """Any of them."""
        return intervals.join(self.compute, self.communication, self.copies)


@dataclass(frozen=True)
class StepLedger:
    """One step of one device, seconds."""

    device: str
    step: int | None
    """None: the whole span of a trace without steps."""
    total_s: float
    compute_s: float
    communication_s: float
    """Overlapped or not."""
    exposed_communication_s: float
    exposed_copy_s: float
    idle_s: float
    idle_by_cause: Mapping[str, float]
    """CAUSES -> seconds; sums to `idle_s`."""
    residual_s: float
    """Total less the parts: rounding."""
    operations: int


def activity(ops: Ops, kinds: np.ndarray) -> Activity:
    """Return when a device did what."""

    def of(kind: int) -> np.ndarray:
        rows = kinds == kind
        return intervals.union(ops.start[rows], ops.end[rows])

    return Activity(of(COMPUTE), of(COMMUNICATION), of(COPY))


def step_ledgers(device: str, windows: Windows, active: Activity, causes: Mapping[str, np.ndarray]) -> list[StepLedger]:
    """Account for every step of a device.

    Args:
      device: its name.
      windows: its steps.
      active: when it did what.
      causes: what the host was doing: disjoint interval sets under CAUSES other than `other`.
    """
    exposed = intervals.subtract(active.communication, active.compute)
    copies = intervals.subtract(active.copies, intervals.join(active.compute, active.communication))
    busy = active.busy
    span = intervals.union(windows.start, windows.end)
    idle = intervals.subtract(span, busy)
    by_cause = {cause: intervals.intersect(idle, causes[cause]) for cause in CAUSES if cause in causes}

    def of(interval_set: np.ndarray) -> np.ndarray:
        return intervals.covered(windows.start, windows.end, interval_set)

    total = windows.end - windows.start
    compute, communication, exposed_n, copies_n, idle_n = (of(s) for s in (active.compute, active.communication, exposed, copies, idle))
    cause_n = {cause: of(found) for cause, found in by_cause.items()}
    cause_n["other"] = idle_n - sum(cause_n.values(), np.zeros_like(idle_n))
    residual = total - compute - exposed_n - copies_n - idle_n
    assert (residual == 0).all() and (cause_n["other"] >= 0).all(), "the parts of a step do not sum to it"
    operations = np.bincount(windows.of_op[windows.of_op >= 0], minlength=len(total))
    return [
        StepLedger(
            device=device,
            step=None if windows.method == "whole span" else int(windows.step[i]),
            total_s=int(total[i]) * PS,
            compute_s=int(compute[i]) * PS,
            communication_s=int(communication[i]) * PS,
            exposed_communication_s=int(exposed_n[i]) * PS,
            exposed_copy_s=int(copies_n[i]) * PS,
            idle_s=int(idle_n[i]) * PS,
            idle_by_cause={cause: int(cause_n[cause][i]) * PS if cause in cause_n else 0.0 for cause in CAUSES},
            residual_s=(int(total[i]) - int(compute[i]) - int(exposed_n[i]) - int(copies_n[i]) - int(idle_n[i])) * PS,
            operations=int(operations[i]),
        )
        for i in range(len(total))
    ]


def mean_ledger(ledgers: Sequence[StepLedger]) -> dict[str, float]:
    """Return the mean of the times of several ledgers."""
    keys = ("total_s", "compute_s", "communication_s", "exposed_communication_s", "exposed_copy_s", "idle_s")
    return {key: float(np.mean([getattr(ledger, key) for ledger in ledgers])) for key in keys}
