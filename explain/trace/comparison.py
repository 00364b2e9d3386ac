"""Comparison of two captures: the step, its parts, and where the difference is.

Names of instructions differ between two compilations, so work is matched by what it is: component and pass; category, pass and source line;
kind, axes, component and pass of collectives. Differences are per step and device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.rundir.analysis import Analysis
from ridgeline.rundir.noise import compare

LEAST = 3
"""Steps of each capture below which differences have no verdict."""


@dataclass(frozen=True)
class Difference:
    """One kind of work in two captures; None: absent from one."""

    name: str
    base_s: float | None
    time_s: float | None

    @property
    def change_s(self) -> float:
        """How much longer it takes than in the base."""
        return (self.time_s or 0.0) - (self.base_s or 0.0)


@dataclass(frozen=True)
class CaptureComparison:
    """A capture against a base."""

    base: str
    capture: str
    unit: tuple[str, str]
    """What the times are per: step, execution or capture, in the base and in the capture."""
    steps: tuple[int, int]
    verdict: str
    """Of the time of a step, under the noise model (rundir.noise)."""
    parts: Sequence[Difference]
    """Median of the step and of its parts."""
    components: Sequence[Difference]
    """By component and pass; these and the following by the size of the difference."""
    operations: Sequence[Difference]
    """By category, pass and source line."""
    collectives: Sequence[Difference]
    notes: Sequence[str] = field(default_factory=list)


def compare_captures(base: Analysis, capture: Analysis) -> CaptureComparison:
    """Compare two analyses."""
    times = [[step.total_s for step in each.steps] for each in (base, capture)]
    notes = []
    if base.unit != capture.unit:
        notes.append(
            f"the base is divided into units of one {base.unit}, the capture into units of one {capture.unit}: times do not compare"
        )
    if base.device_kind != capture.device_kind:
        notes.append(f"other devices: {base.device_kind} and {capture.device_kind}")
    if len(base.devices) != len(capture.devices):
        notes.append(f"another number of devices: {len(base.devices)} and {len(capture.devices)}")
    few = min(map(len, times)) < LEAST or min(min(each) for each in times) <= 0
    return CaptureComparison(
        base=base.profile,
        capture=capture.profile,
        unit=(base.unit, capture.unit),
        steps=(len(times[0]), len(times[1])),
        verdict=f"cannot tell: fewer than {LEAST} steps" if few else compare(times[0], times[1]).describe(),
        parts=[
            Difference(key.removesuffix("_s").replace("_", " "), base.summary[key].p50, capture.summary[key].p50)
            for key in base.summary
            if key in capture.summary
        ],
        components=_matched(base.components, capture.components, lambda c: f"{c.component}, {c.phase}"),
        operations=_matched(base.operations, capture.operations, lambda o: f"{o.category}, {o.phase}, {o.source or o.kernel_name}"),
        collectives=_matched(
            base.collectives,
            capture.collectives,
            lambda c: f"{c.kind} over {'?' if c.axes is None else '+'.join(c.axes)}, {c.layer} {c.phase}",
        ),
        notes=notes,
    )


def _matched(base: Iterable[Any], capture: Iterable[Any], name: Callable[[Any], str]) -> list[Difference]:
    sums: list[dict[str, float]] = [defaultdict(float), defaultdict(float)]
    for side, rows in zip(sums, (base, capture), strict=True):
        for row in rows:
            side[name(row)] += row.time_s
    found = [Difference(key, sums[0].get(key), sums[1].get(key)) for key in {**sums[0], **sums[1]}]
    return sorted(found, key=lambda d: -abs(d.change_s))
