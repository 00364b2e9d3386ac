"""A plan in three sentences: whether it fits and how, what it costs, and the change that saves most."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.format import plural
from ridgeline.planner.plan import Plan, planned_and_compiled
from ridgeline.planner.search import Candidate

GB = 1e9
LEAST_SAVING = 0.01
"""Smallest share of the cost that a change must save to be named."""


@dataclass(frozen=True)
class Change:
    """A change of the run that costs less."""

    text: str
    saving: float
    """Share of the cost (device-hours where there is no price)."""


def sentences(plan: Plan) -> list[str]:
    """Return the three sentences."""
    return [_fits(plan), _costs(plan), _change(plan)]


def _fits(plan: Plan) -> str:
    best = plan.best[0]
    layout = best.layout
    microbatches = "1 microbatch" if layout.accumulation == 1 else f"{layout.accumulation} microbatches"
    compiled = plan.compiled[-1].needed_bytes if plan.compiled and plan.compiled[-1].candidate is best else None
    memory = f"{best.memory.total_bytes / GB:.1f} GB planned" if compiled is None else f"{planned_and_compiled(best.memory, compiled)},"
    where = f"{plural(best.nodes, 'node')} of {plan.cluster.name} ({plural(best.step.devices, 'device')})"
    how = f"{layout.text()} with {microbatches} of {plural(best.microbatch, 'row')} and remat {layout.remat.policy}"
    return f"Fits on {where} as {how}: {memory} of {plan.capacity_bytes / GB:.1f} GB per device."


def _costs(plan: Plan) -> str:
    best, around = plan.best[0], plan.range
    run = best.run
    low, high = around.around(run.wall_device_hours)
    hours = f"{_number(run.wall_device_hours)} device-hours ({_number(low)} to {_number(high)})"
    time = f"{run.wall_days:.3g} days at {best.step.step_s:.4g} s per step"
    if run.wall_cost_usd is None:
        return f"Costs {hours}, {time}; {plan.price}."
    low, high = around.around(run.wall_cost_usd)
    return f"Costs ${_number(run.wall_cost_usd)} ({_number(low)} to {_number(high)}) at {plan.price}: {hours}, {time}."


def _change(plan: Plan) -> str:
    found = max(_changes(plan), key=lambda change: change.saving, default=None)
    if found is None or found.saving < LEAST_SAVING:
        return f"No larger loss chunk or other node count saves {LEAST_SAVING:.0%}."
    return f"Cheapest change: {found.text}, which saves {_money(plan, found.saving)} ({found.saving:.1%})."


def _changes(plan: Plan) -> list[Change]:
    best = plan.best[0]
    found = []
    if plan.loss_chunk is not None:
        found.append(Change(f"compute.loss_chunk={plan.loss_chunk.loss_chunk}", 1 - 1 / (1 + plan.loss_chunk.gain)))
    for row in plan.scaling:
        if row.best is not None and row.nodes != best.nodes and row.outside is None:
            days = f"{row.best.run.wall_days:.3g} days instead of {best.run.wall_days:.3g}"
            found.append(Change(f"{plural(row.nodes, 'node')} ({days})", 1 - _cost(row.best) / _cost(best)))
    return found


def _cost(candidate: Candidate) -> float:
    run = candidate.run
    return run.wall_device_hours if run.wall_cost_usd is None else run.wall_cost_usd


def _money(plan: Plan, share: float) -> str:
    run = plan.best[0].run
    if run.wall_cost_usd is None:
        return f"{_number(share * run.wall_device_hours)} device-hours"
    return f"${_number(share * run.wall_cost_usd)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
