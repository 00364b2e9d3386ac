"""Planned beside measured figures: seconds of a step by term, memory, bytes and bandwidth of collectives; why they differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.rundir.analysis_times import Step

Unit = Literal["s", "bytes", "bytes/s"]
AGREES = 1.25
"""Figures within this factor of each other agree: the accuracy of the planner on published runs."""
ON_DEVICE = ("compute", "hbm", "optimizer")
NOT_LINKS = (*ON_DEVICE, "bubble", "host_input")


@dataclass(frozen=True)
class Term:
    """One planned figure and its measured value."""

    name: str
    unit: Unit
    planned: float
    measured: float
    explanation: str
    """Why they differ, as far as other figures show it; `as planned` when they agree."""

    @property
    def ratio(self) -> float:
        """Measured over planned; infinite where nothing was planned."""
        return self.measured / self.planned if self.planned > 0 else (1.0 if self.measured <= 0 else math.inf)


def terms(facts: Facts) -> list[Term]:
    """Return every planned figure that was also measured: times of a step, then memory, then links."""
    return [*_times(facts), *_memory(facts), *_traffic(facts), *_bandwidths(facts)]


def largest(found: list[Term]) -> Term | None:
    """Return the term that differs most from the plan: in seconds where times are known, else by ratio; None when all agree."""
    apart = [term for term in found if term.explanation != "as planned"]
    times = [term for term in apart if term.unit == "s" and term.name != "step"]
    if times:
        return max(times, key=lambda term: abs(term.measured - term.planned))
    return max(apart, key=lambda term: abs(math.log(min(max(term.ratio, 1e-9), 1e9))), default=None)


def _term(name: str, unit: Unit, planned: float, measured: float, why: str, least: float = 0.0) -> Term:
    """`least`: a difference up to this counts as agreement."""
    close = abs(measured - planned) <= least or (planned > 0 and 1 / AGREES <= measured / planned <= AGREES)
    return Term(name, unit, planned, measured, "as planned" if close else why)


def _times(facts: Facts) -> list[Term]:
    planned: Mapping[str, float] = {}
    if facts.expected is not None:
        planned = facts.expected.breakdown_s
    elif facts.plan is not None:
        planned = facts.plan.breakdown_s
    if not planned or facts.step_s is None:
        return []
    step_s = math.fsum(planned.values())
    least_s = 0.02 * max(step_s, facts.step_s)
    found = [_term("step", "s", step_s, facts.step_s, "sum of the terms below", least_s)]
    if facts.analysis is not None and facts.analysis.steps:
        mean = _mean_step(facts.analysis.steps)
        compute_s = math.fsum(planned.get(name, 0.0) for name in ON_DEVICE)
        links_s = math.fsum(seconds for name, seconds in planned.items() if name not in NOT_LINKS)
        found += [
            _term("compute", "s", compute_s, mean.compute_s, _why_compute(facts, compute_s, mean.compute_s), least_s),
            _term("exposed communication", "s", links_s, mean.exposed_s, _why_links(facts), least_s),
            _term("copies and idle", "s", planned.get("bubble", 0.0), mean.other_s, _why_idle(mean), least_s),
        ]
    wait_s = (facts.data_wait_share or 0.0) * facts.step_s
    workers = facts.config.data.workers if facts.config is not None else 0
    why = f"the loader needs more than a step for a batch of this process (data.workers={workers})"
    return [*found, _term("data wait", "s", planned.get("host_input", 0.0), wait_s, why, least_s)]


@dataclass(frozen=True)
class _Mean:
    """Means over devices and steps of the step ledger."""

    compute_s: float
    exposed_s: float
    other_s: float
    """Copies and idle."""
    idle_by_cause: Mapping[str, float]


def _mean_step(steps: Sequence[Step]) -> _Mean:
    def mean(values: Iterable[float]) -> float:
        return math.fsum(values) / len(steps)

    return _Mean(
        mean(step.compute_s for step in steps),
        mean(step.exposed_communication_s for step in steps),
        mean(step.exposed_copy_s for step in steps) + mean(step.idle_s for step in steps),
        {cause: mean(step.idle_by_cause[cause] for step in steps) for cause in steps[0].idle_by_cause},
    )


def _why_compute(facts: Facts, planned_s: float, measured_s: float) -> str:
    components = () if facts.analysis is None else facts.analysis.components
    total_s = math.fsum(c.time_s for c in components)
    again_s = math.fsum(c.time_s for c in components if c.phase == "recompute")
    most = max(components, key=lambda c: c.time_s, default=None)
    slower = measured_s > planned_s
    parts = [f"the device reaches {planned_s / measured_s:.0%} of the calibrated rate" if slower else "faster than calibrated"]
    if most is not None and total_s > 0:
        parts.append(f"the largest component is {most.component} {most.phase} ({most.time_s / total_s:.0%})")
    if total_s > 0 and again_s / total_s > 0.1:
        parts.append(f"{again_s / total_s:.0%} is rematerialization")
    alone = {name: statistics.median(facts.bench[name]) for name in ("matmul", "memory") if facts.bench.get(name)}
    if alone:
        layers = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in alone.items())
        parts.append(f"measured alone by ridge bench: {layers}")
    return "; ".join(parts)


def _why_links(facts: Facts) -> str:
    if not facts.collectives:
        return "the profile contains no collective"
    row = facts.collectives[0]
    text = f"the longest is {row.kind} over {'unknown axes' if row.axes is None else ', '.join(row.axes)} in {row.layer}"
    if row.wait_share:
        text += f", {row.wait_share:.0%} of it waiting for the last member"
    if row.bus_bandwidth and row.planned_bus_bandwidth:
        text += f", at {row.bus_bandwidth / 1e9:.3g} GB/s, planned {row.planned_bus_bandwidth / 1e9:.3g} GB/s"
    return text


def _why_idle(mean: _Mean) -> str:
    causes = mean.idle_by_cause
    most = max(causes, key=lambda cause: causes[cause], default=None)
    cause = "" if most is None or not causes[most] else f"; main cause of idle time: {most.replace('_', ' ')}"
    return f"the plan has no copies and no idle devices{cause}"


def _memory(facts: Facts) -> list[Term]:
    rows = () if facts.plan is None else facts.plan.memory
    return [Term(f"memory: {r.what}", "bytes", r.planned_bytes, r.compiled_bytes, r.explanation) for r in rows if r.planned_bytes > 0]


def _traffic(facts: Facts) -> list[Term]:
    return [
        Term(f"bytes: {row.kind} over {', '.join(row.axes)}", "bytes", row.planned_bytes, row.compiled_bytes, row.explanation)
        for row in facts.traffic
    ]


def _bandwidths(facts: Facts) -> list[Term]:
    """Of the collectives of each kind and axes, the one that moves the most bytes."""
    found: dict[tuple[str, tuple[str, ...]], Term] = {}
    for row in sorted(facts.analysis.collectives if facts.analysis is not None else (), key=lambda row: -(row.bytes or 0.0)):
        if row.bus_bandwidth and row.planned_bus_bandwidth and row.bytes:
            axes = row.axes or ()
            why = f"of {row.bytes / 1e6:.3g} MB per step in {row.layer}; ridge doctor measures the link alone"
            name = f"bus bandwidth: {row.kind} over {', '.join(axes)}"
            term = _term(name, "bytes/s", row.planned_bus_bandwidth, row.bus_bandwidth, why)
            found.setdefault((row.kind, axes), term)
    return list(found.values())
