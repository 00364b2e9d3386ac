"""The scaling table: the best layout on every number of nodes, parallel efficiency, and where more nodes stop being worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.planner.search import Candidate, Limits, Objective, Scale, within

LEAST_MARGINAL_EFFICIENCY = 0.5
"""For the objective `time`: going on costs more than it brings once added nodes work at less than half the efficiency of the first."""
LEAST_EFFICIENCY = 0.9
"""For the objective `efficiency`: throughput per device against the best number of nodes."""
MOST_EXTRA_COST = 0.05
"""For the objective `cost`: dearer than the cheapest number of nodes by at most this share."""


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
    """Return the largest number of nodes that is worth it for an objective, and the reason in words."""
    working = [row for row in rows if row.best is not None and row.outside is None]
    if not working:
        return None, "no number of nodes works within the limits"
    if objective == "time":
        return _worth_for_time(working)
    if objective == "cost":
        costs = {row.nodes: cost_of(row) for row in working}
        least = min(costs.values())
        good = max(nodes for nodes, cost in costs.items() if cost <= least * (1 + MOST_EXTRA_COST))
        return good, f"up to {good} nodes cost at most {MOST_EXTRA_COST:.0%} more than the cheapest"
    most = max(_rate(row) for row in working)
    good = max(row.nodes for row in working if _rate(row) >= LEAST_EFFICIENCY * most)
    return good, f"up to {good} nodes keep {LEAST_EFFICIENCY:.0%} of the best throughput per device"


def _worth_for_time(working: list[ScalingRow]) -> tuple[int, str]:
    good = working[0].nodes
    for row in working[1:]:
        assert row.marginal_efficiency is not None
        if row.marginal_efficiency < LEAST_MARGINAL_EFFICIENCY:
            return good, (
                f"beyond {good} nodes an added device works at {max(0.0, row.marginal_efficiency):.0%} of the efficiency of the first ones"
                f" ({row.nodes} nodes)"
            )
        good = row.nodes
    return (
        good,
        f"every step up to {good} nodes still pays: added devices work at {LEAST_MARGINAL_EFFICIENCY:.0%} or more of the first ones",
    )


def cost_of(row: ScalingRow) -> float:
    """Money of the run, or its device-hours where there is no price."""
    assert row.best is not None
    run = row.best.run
    return run.wall_device_hours if run.wall_cost_usd is None else run.wall_cost_usd


def _rate(row: ScalingRow) -> float:
    assert row.best is not None
    return row.best.step.tokens_per_s_per_device
