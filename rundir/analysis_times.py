"""Times of steps in the analysis of a profile, in seconds: of the whole, of each device, of single steps, and their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PARTS = ("compute_s", "exposed_communication_s", "exposed_copy_s", "idle_s")
"""The parts of a step: together with `residual_s` they sum to `total_s`."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Where the time of a step went."""

    total_s: float
    compute_s: float
    communication_s: float
    """Overlapped or exposed."""
    exposed_communication_s: float
    """Communication while no compute runs."""
    exposed_copy_s: float
    """Memory copies while neither compute nor communication runs."""
    idle_s: float
    overlapped_communication_s: float
    idle_by_cause: Mapping[str, float]
    """What the host did while the device was idle (explain.trace.ledger.CAUSES); sums to `idle_s`."""
    residual_s: float
    """Total less the parts: rounding."""


@dataclass(frozen=True, kw_only=True)
class DeviceStep(StepTimes):
    """One step of one device."""

    device: str
    """`host/gpu:0`, or `host-p00001/gpu:0` in a run of several processes."""
    operations: int


@dataclass(frozen=True, kw_only=True)
class DeviceTotal(StepTimes):
    """All analyzed steps of one device, summed."""

    device: str
    steps: int
    assignment: str
    """How its operations were assigned to steps (explain.trace.steps.Method)."""
    span_s: float = 0.0
    """From its first to its last operation in the capture, steps or not."""
    span_idle_s: float = 0.0
    """Of `span_s`, without any operation."""
    capture_s: float = 0.0
    """From the first to the last operation of all devices of its host."""
    capture_idle_s: float = 0.0
    """Of `capture_s`, without any operation of this device."""


@dataclass(frozen=True, kw_only=True)
class Step(StepTimes):
    """One step: means over the devices, and the times of each."""

    step: int | None
    """Its number, which may repeat; None: an execution of a program, or the capture as a whole (Analysis.unit)."""
    devices: Sequence[DeviceStep]
    window: int = 0
    """Position in the capture, from 0: identifies the step."""


@dataclass(frozen=True)
class OddStep:
    """A step that is left out of all figures, or one that took much longer than the median."""

    name: str
    """`step 3`, `execution 12`; with its position where the number repeats."""
    step: int | None
    window: int
    total_s: float
    times_median: float
    """`total_s` over the median of the steps."""
    why: str
    """Why it is left out; of an outlier, the part of the step that grew most."""


@dataclass(frozen=True)
class Assignment:
    """How operations were assigned to steps."""

    method: str
    covered: float
    """Share of the operations that the method assigned directly."""


@dataclass(frozen=True)
class Statistics:
    """A figure over the steps."""

    mean: float
    p50: float
    p95: float
    min: float
    max: float


@dataclass(frozen=True)
class Range:
    """A figure over the devices: the extremes."""

    min: float
    max: float
