"""The slowest device: which device the others wait for, and whether it computes longer or is late for another reason.

In SPMD every device does the same work between collectives. The own time of a device is its step without exposed communication; the
device with the longest own time determines the time of the step. Single steps scatter, so a difference is its median over the steps, and
counts only where it is beyond its noise (`lasting`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.rundir.analysis import Analysis
from ridgeline.rundir.analysis_times import DeviceStep
from ridgeline.rundir.noise import median, percentile

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
    """Own time beyond the usual that is not compute."""
    slow_s: float
    """Compute beyond the usual for equal work."""
    shares_cores: bool = False
    """A CPU device on a host with others: they share its cores, so longer compute is not its own."""

    @property
    def speed(self) -> float:
        """Compute speed over that of the median other device; 1 where it is not slower."""
        return self.usual_compute_s / (self.usual_compute_s + self.slow_s) if self.slow_s and self.step_s else 1.0


def slowest(analysis: Analysis | None) -> Slowest | None:
    """Return the device with the longest own time; None with fewer than two devices."""
    steps = [{device.device: device for device in step.devices} for step in (() if analysis is None else analysis.steps)]
    names = set.intersection(*(set(step) for step in steps)) if steps else set()
    if len(names) < 2:
        return None
    own = {name: median([_own_s(step[name]) for step in steps]) for name in names}
    device = max(sorted(own), key=lambda name: own[name])
    others = names - {device}

    def usual(step: Mapping[str, DeviceStep], figure: Callable[[DeviceStep], float]) -> float:
        return _low_middle([figure(step[name]) for name in others])

    slow_s = lasting([step[device].compute_s - usual(step, _compute_s) for step in steps])
    more_s = lasting([_own_s(step[device]) - usual(step, _own_s) for step in steps])
    return Slowest(
        device=device,
        step_s=median([step[device].total_s for step in steps]),
        own_s=own[device],
        usual_own_s=median([usual(step, _own_s) for step in steps]),
        compute_s=median([step[device].compute_s for step in steps]),
        usual_compute_s=median([usual(step, _compute_s) for step in steps]),
        late_s=max(0.0, more_s - slow_s),
        slow_s=min(slow_s, more_s),
        shares_cores="/cpu" in device and any(host_of(other) == host_of(device) for other in others),
    )


def host_of(device: str) -> str:
    """Return the host in a device label: `node7` of `node7-p00001/gpu:0` or `node7/gpu:0`."""
    return re.sub(r"-p\d{5}$", "", device.split("/")[0])


def steady(values: Sequence[float]) -> float:
    """Return the value that three of four values reach."""
    return percentile(sorted(values), STEADY)


def lasting(values: Sequence[float]) -> float:
    """Return the median of a difference over the steps if it is beyond its noise, else 0.

    It is when three of four values are positive, and when the median is twice its standard error: 1.2533 (of the median of normal values)
    times 1.4826 MAD / sqrt(n).
    """
    if not values or steady(values) <= 0:
        return 0.0
    middle = median(values)
    error = 1.2533 * 1.4826 * median([abs(value - middle) for value in values]) / math.sqrt(len(values))
    return middle if middle > 2 * error else 0.0


def _own_s(times: DeviceStep) -> float:
    return times.total_s - times.exposed_communication_s


def _compute_s(times: DeviceStep) -> float:
    return times.compute_s


def _low_middle(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
