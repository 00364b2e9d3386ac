"""The scaling table: the best layout on every number of nodes, parallel efficiency, and the scale at which to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.planner.search import Candidate, Limits, Objective, Scale, within

WORTHWHILE = 0.10
"""Objective `time`: relative gain in time per doubling of the scale below which a larger scale is not worth it."""
MOST_EXTRA_COST = 0.10
"""Objective `cost`: largest cost above that of the cheapest scale, as a share of it."""
LEAST_EFFICIENCY = 0.80
"""Objective `efficiency`: least parallel efficiency, against the smallest scale."""


@dataclass(frozen=True)
class ScalePoint:
    """A planned or measured scale, as the stopping policy needs it. Times and costs are compared with each other, so any unit will do."""

    scale: int
    """Devices or nodes."""
    time: float
    """Time to solution, or per unit of work where the work grows with the scale."""
    cost: float
    efficiency: float | None
    """Parallel efficiency against the smallest scale; None: not known."""


def stopping_scale(
    points: Sequence[ScalePoint],
    objective: Objective,
    *,
    worthwhile: float = WORTHWHILE,
    most_extra_cost: float = MOST_EXTRA_COST,
    least_efficiency: float = LEAST_EFFICIENCY,
    subject: str = "the run",
) -> tuple[int, str]:
    """Return the scale at which to stop for an objective, and the reason. The one policy of plans and of measured studies.

    Args:
      points: at least one, smallest scale first.
      objective: `time`: the largest scale that is reached by steps that each gain at least `worthwhile` per doubling, where a scale that
        gains too little may be skipped (its devices may not divide the batch well); `efficiency`: the largest scale with at least
        `least_efficiency`; `cost`: the largest scale that costs at most `most_extra_cost` more than the cheapest one.
      subject: what becomes shorter, for the reason.
    """
    if objective == "time":
        return _stop_for_time(points, worthwhile, subject)
    if objective == "efficiency":
        return _stop_for_efficiency(points, least_efficiency)
    cheapest = min(points, key=lambda point: point.cost)
    largest = [point for point in points if point.cost <= cheapest.cost * (1 + most_extra_cost)][-1]
    return largest.scale, f"its cost is within {most_extra_cost:.0%} of the cheapest scale ({cheapest.scale})"


def _stop_for_time(points: Sequence[ScalePoint], worthwhile: float, subject: str) -> tuple[int, str]:
    if len(points) == 1:
        return points[0].scale, "there is no larger scale"
    at = 0
    while at + 1 < len(points):
        reached = next((i for i in range(at + 1, len(points)) if _gains(points[at], points[i], worthwhile)), None)
        if reached is None:
            stop, best = points[at], min(points[at + 1 :], key=lambda point: point.time)
            gain = 1 - best.time / stop.time
            change = f"shorten {subject} by {gain:.1%} only" if gain >= 0 else f"lengthen {subject} by {-gain:.1%}"
            return stop.scale, f"going on to {best.scale} would {change}"
        at = reached
    return points[-1].scale, f"each doubling up to here shortens {subject} by at least {worthwhile:.0%}; there is no larger scale"


def _gains(before: ScalePoint, point: ScalePoint, worthwhile: float) -> bool:
    """Whether a step up gains at least `worthwhile` per doubling."""
    return 1 - point.time / before.time >= 1 - (1 - worthwhile) ** math.log2(point.scale / before.scale)


def _stop_for_efficiency(points: Sequence[ScalePoint], least_efficiency: float) -> tuple[int, str]:
    kept = [i for i, point in enumerate(points) if i == 0 or point.efficiency is None or point.efficiency >= least_efficiency]
    last, chosen = kept[-1], points[kept[-1]]
    if last + 1 < len(points):
        after = points[last + 1]
        return chosen.scale, f"at {after.scale} the parallel efficiency falls to {after.efficiency:.1%}"
    if chosen.efficiency is None:
        return chosen.scale, "there is no larger scale"
    return chosen.scale, f"the parallel efficiency is still {chosen.efficiency:.1%}"


@dataclass(frozen=True)
class ScalingRow:
    """One number of nodes."""

    nodes: int
    devices: int
    best: Candidate | None
    """None: nothing fits or divides."""
    efficiency: float | None = None
    """Throughput per device against that of the smallest number of nodes that works."""
    marginal_efficiency: float | None = None
    """Throughput gained per device added since the row before, against the smallest that works; None for that one."""
    outside: str | None = None
    """The limit it breaks, and by how much; or why nothing works."""


def scaling_table(scales: Sequence[Scale], limits: Limits) -> list[ScalingRow]:
    """Return a row for each number of nodes, fewest first."""
    rows: list[ScalingRow] = []
    first = previous = None
    for scale in sorted(scales, key=lambda s: s.nodes):
        best = scale.best
        if best is None:
            rows.append(ScalingRow(scale.nodes, scale.devices, None, outside=_why_none(scale)))
            continue
        first = first or best
        efficiency = best.step.tokens_per_s_per_device / first.step.tokens_per_s_per_device
        marginal = None
        if previous is not None:
            gained = best.step.tokens_per_s - previous.step.tokens_per_s
            marginal = gained / (best.step.devices - previous.step.devices) / first.step.tokens_per_s_per_device
        rows.append(ScalingRow(scale.nodes, scale.devices, best, efficiency, marginal, within(best, limits)))
        previous = best
    return rows


def _why_none(scale: Scale) -> str:
    """The nearest miss: the smallest lack of memory, else what keeps the rows from dividing, else the first rule broken."""
    short = [r for r in scale.rejections if r.short_bytes]
    if short:
        nearest = min(short, key=lambda r: r.short_bytes)
        mesh = " x ".join(f"{axis}={size}" for axis, size in nearest.mesh.items()) or "one device"
        return f"nothing fits; nearest is {mesh} with remat {nearest.remat}: {nearest.reason}"
    rows = [r for r in scale.rejections if "data.batch_size" in r.reason]
    return f"no mesh divides: {(rows or scale.rejections)[-1].reason}"


def worth_until(rows: Sequence[ScalingRow], objective: Objective) -> tuple[int | None, str]:
    """Return the largest number of nodes that is worth it for an objective (`stopping_scale`), and the reason."""
    points = [
        ScalePoint(row.nodes, row.best.run.wall_days, cost_of(row), row.efficiency)
        for row in rows
        if row.best is not None and row.outside is None
    ]
    if not points:
        return None, "no number of nodes works within the limits"
    nodes, why = stopping_scale(points, objective)
    return nodes, f"{nodes} node{'s' if nodes != 1 else ''}: {why}"


def cost_of(row: ScalingRow) -> float:
    """Money of the run, or its device-hours where there is no price."""
    assert row.best is not None
    run = row.best.run
    return run.wall_device_hours if run.wall_cost_usd is None else run.wall_cost_usd
