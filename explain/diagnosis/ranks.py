"""Equal work, unequal time: which device the others wait for, and whether it computes longer or comes late for another reason.

In SPMD every device does the same work between collectives, so what a device needs apart from exposed communication is its own time. The
device with the longest own time sets the pace. Figures of single steps scatter; what counts is what three of four steps show at least.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.rundir.noise import percentile

STEADY = 0.25
"""A share counts from the quarter of the steps that show it least: three of four show more."""


@dataclass(frozen=True)
class Slowest:
    """The device that needs most time of its own. Seconds per step."""

    device: str
    step_s: float
    own_s: float
    usual_own_s: float
    """Of the median other device."""
    compute_s: float
    usual_compute_s: float
    late_s: float
    """Own time beyond the usual that is not compute, in three of four steps at least."""
    slow_s: float
    """Compute beyond the usual for equal work, in three of four steps at least."""


def slowest(analysis: Mapping[str, Any] | None) -> Slowest | None:
    """Find the device with the longest own time; None with fewer than two devices."""
    steps = [{d["device"]: d for d in step.get("devices", ())} for step in (analysis or {}).get("steps", ())]
    names = set.intersection(*(set(step) for step in steps)) if steps else set()
    if len(names) < 2:
        return None
    own = {name: _middle([_own_s(step[name]) for step in steps]) for name in names}
    device = max(sorted(own), key=lambda name: own[name])
    others = names - {device}

    def usual(step: Mapping[str, Mapping[str, float]], figure: Callable[[Mapping[str, float]], float]) -> float:
        return _low_middle([figure(step[name]) for name in others])

    slow = [max(0.0, step[device]["compute_s"] - usual(step, _compute_s)) for step in steps]
    late = [_own_s(step[device]) - usual(step, _own_s) - more for step, more in zip(steps, slow, strict=True)]
    return Slowest(
        device=device,
        step_s=_middle([step[device]["total_s"] for step in steps]),
        own_s=own[device],
        usual_own_s=_middle([usual(step, _own_s) for step in steps]),
        compute_s=_middle([step[device]["compute_s"] for step in steps]),
        usual_compute_s=_middle([usual(step, _compute_s) for step in steps]),
        late_s=max(0.0, steady(late)),
        slow_s=steady(slow),
    )


def host_of(device: str) -> str:
    """Return the host in the label of a device: `node7-p00001/gpu:0` (the process is part of it where there are several)."""
    return re.sub(r"-p\d{5}$", "", device.split("/")[0])


def steady(values: Sequence[float]) -> float:
    """Return what three of four values reach at least."""
    return percentile(sorted(values), STEADY)


def _own_s(figures: Mapping[str, float]) -> float:
    return figures["total_s"] - figures["exposed_communication_s"]


def _compute_s(figures: Mapping[str, float]) -> float:
    return figures["compute_s"]


def _middle(values: Sequence[float]) -> float:
    return percentile(sorted(values), 0.5)


def _low_middle(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
