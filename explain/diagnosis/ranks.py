"""The slowest device: which device the others wait for, and whether it computes longer or is late for another reason.

In SPMD every device does the same work between collectives. The own time of a device is its step without exposed communication; the
device with the longest own time determines the time of the step. Single steps scatter, so a difference counts from the value that at least
three of four steps reach.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.rundir.analysis import Analysis, DeviceStep
from ridgeline.rundir.noise import percentile

STEADY = 0.25
"""Percentile over the steps that counts as the steady value: three of four steps show more."""


@dataclass(frozen=True)
class Slowest:
    """The device with the longest own time. Seconds per step."""

    device: str
    step_s: float
    own_s: float
    usual_own_s: float
    """Of the median other device."""
    compute_s: float
    usual_compute_s: float
    late_s: float
    """Own time beyond the usual that is not compute, in at least three of four steps."""
    slow_s: float
    """Compute beyond the usual for equal work, in at least three of four steps."""


def slowest(analysis: Analysis | None) -> Slowest | None:
    """Return the device with the longest own time; None with fewer than two devices."""
    steps = [{device.device: device for device in step.devices} for step in (() if analysis is None else analysis.steps)]
    names = set.intersection(*(set(step) for step in steps)) if steps else set()
    if len(names) < 2:
        return None
    own = {name: _middle([_own_s(step[name]) for step in steps]) for name in names}
    device = max(sorted(own), key=lambda name: own[name])
    others = names - {device}

    def usual(step: Mapping[str, DeviceStep], figure: Callable[[DeviceStep], float]) -> float:
        return _low_middle([figure(step[name]) for name in others])

    slow = [max(0.0, step[device].compute_s - usual(step, _compute_s)) for step in steps]
    late = [_own_s(step[device]) - usual(step, _own_s) - more for step, more in zip(steps, slow, strict=True)]
    return Slowest(
        device=device,
        step_s=_middle([step[device].total_s for step in steps]),
        own_s=own[device],
        usual_own_s=_middle([usual(step, _own_s) for step in steps]),
        compute_s=_middle([step[device].compute_s for step in steps]),
        usual_compute_s=_middle([usual(step, _compute_s) for step in steps]),
        late_s=max(0.0, steady(late)),
        slow_s=steady(slow),
    )


def host_of(device: str) -> str:
    """Return the host in a device label: `node7` of `node7-p00001/gpu:0` or `node7/gpu:0`."""
    return re.sub(r"-p\d{5}$", "", device.split("/")[0])


def steady(values: Sequence[float]) -> float:
    """Return the value that three of four values reach."""
    return percentile(sorted(values), STEADY)


def _own_s(times: DeviceStep) -> float:
    return times.total_s - times.exposed_communication_s


def _compute_s(times: DeviceStep) -> float:
    return times.compute_s


def _middle(values: Sequence[float]) -> float:
    return percentile(sorted(values), 0.5)


def _low_middle(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
