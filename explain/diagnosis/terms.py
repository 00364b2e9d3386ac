"""Predicted beside measured, term by term: seconds of a step, memory, bytes on each link, bandwidth; the largest disagreement explained."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.explain.diagnosis.facts import Facts

Unit = Literal["s", "bytes", "bytes/s"]
AGREES = 1.25
"""Figures within this factor of each other agree: the planner's own accuracy on published runs."""
ON_DEVICE = ("compute", "hbm", "optimizer")
NOT_LINKS = (*ON_DEVICE, "bubble", "host_input")


@dataclass(frozen=True)
class Term:
    """One planned figure beside what was measured."""

    name: str
    unit: Unit
    planned: float
    measured: float
    explanation: str
    """Why they differ, as far as the other figures tell; `as planned` when they agree."""

    @property
    def ratio(self) -> float:
        """Measured over planned; infinite where nothing was planned."""
        return self.measured / self.planned if self.planned > 0 else (1.0 if self.measured <= 0 else math.inf)


def terms(facts: Facts) -> list[Term]:
    """Return every planned figure that was measured too: times of a step first, then memory, then links."""
    return [*_times(facts), *_memory(facts), *_traffic(facts), *_bandwidths(facts)]


def largest(found: list[Term]) -> Term | None:
    """Return the term that disagrees most: in seconds of the step where times are known, else by ratio; None when all agree."""
    apart = [term for term in found if term.explanation != "as planned"]
    times = [term for term in apart if term.unit == "s" and term.name != "step"]
    if times:
        return max(times, key=lambda term: abs(term.measured - term.planned))
    return max(apart, key=lambda term: abs(math.log(min(max(term.ratio, 1e-9), 1e9))), default=None)


def _term(name: str, unit: Unit, planned: float, measured: float, why: str, least: float = 0.0) -> Term:
    """`least`: differences up to it do not matter."""
    close = abs(measured - planned) <= least or (planned > 0 and 1 / AGREES <= measured / planned <= AGREES)
    return Term(name, unit, planned, measured, "as planned" if close else why)


def _times(facts: Facts) -> list[Term]:
    planned = dict(facts.expected.breakdown_s) if facts.expected is not None else dict((facts.plan or {}).get("breakdown_s") or {})
    if not planned or facts.step_s is None:
        return []
    step_s = math.fsum(planned.values())
    least_s = 0.02 * max(step_s, facts.step_s)
    found = [_term("step", "s", step_s, facts.step_s, "the sum of the terms below", least_s)]
    mean = _mean_step(facts)
    if mean is not None:
        compute_s = math.fsum(planned.get(name, 0.0) for name in ON_DEVICE)
        links_s = math.fsum(seconds for name, seconds in planned.items() if name not in NOT_LINKS)
        other_s = mean["exposed_copy_s"] + mean["idle_s"]
        found += [
            _term("compute", "s", compute_s, mean["compute_s"], _why_compute(facts, compute_s, mean["compute_s"]), least_s),
            _term("exposed communication", "s", links_s, mean["exposed_communication_s"], _why_links(facts), least_s),
            _term("copies and idle", "s", planned.get("bubble", 0.0), other_s, _why_idle(mean), least_s),
        ]
    wait_s = (facts.data_wait_share or 0.0) * facts.step_s
    why = f"the loader delivers a batch of this process in more than a step: data.workers={_workers(facts)}"
    return [*found, _term("data wait", "s", planned.get("host_input", 0.0), wait_s, why, least_s)]


def _mean_step(facts: Facts) -> Mapping[str, Any] | None:
    """Means over devices and steps of the step ledger."""
    steps = [step for step in (facts.analysis or {}).get("steps", ()) if "compute_s" in step]
    if not steps:
        return None
    keys = ("compute_s", "exposed_communication_s", "exposed_copy_s", "idle_s")
    mean: dict[str, Any] = {key: math.fsum(float(step[key]) for step in steps) / len(steps) for key in keys}
    causes = steps[0].get("idle_by_cause", {})
    return mean | {"causes": {cause: math.fsum(float(step["idle_by_cause"][cause]) for step in steps) for cause in causes}}


def _why_compute(facts: Facts, planned_s: float, measured_s: float) -> str:
    components = (facts.analysis or {}).get("components", [])
    again_s = math.fsum(float(c["time_s"]) for c in components if c.get("phase") == "recompute")
    total_s = math.fsum(float(c["time_s"]) for c in components)
    most = max(components, key=lambda c: float(c["time_s"]), default=None)
    parts = [
        f"the device reaches {planned_s / measured_s:.0%} of the calibrated rate" if measured_s > planned_s else "faster than calibrated"
    ]
    if most is not None and total_s > 0:
        parts.append(f"most of it is {most['component']} {most['phase']} ({float(most['time_s']) / total_s:.0%})")
    if total_s > 0 and again_s / total_s > 0.1:
        parts.append(f"{again_s / total_s:.0%} is recomputation")
    alone = {name: statistics.median(facts.bench[name]) for name in ("matmul", "memory") if facts.bench.get(name)}
    if alone:
        layers = " and ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in alone.items())
        parts.append(f"alone take {layers} (ridge bench)")
    return "; ".join(parts)


def _why_links(facts: Facts) -> str:
    rows = sorted((facts.analysis or {}).get("collectives", []), key=lambda row: -float(row.get("exposed_s", 0.0)))
    if not rows:
        return "no collective was found in the profile"
    row = rows[0]
    text = f"most of it {row['kind']} over {row.get('axes')} in {row.get('layer', '?')}"
    if row.get("wait_s") and row.get("time_s"):
        text += f", {row['wait_s'] / row['time_s']:.0%} of its time waiting for the last member"
    if row.get("bus_bandwidth") and row.get("planned_bus_bandwidth"):
        text += f", at {row['bus_bandwidth'] / 1e9:.3g} GB/s where {row['planned_bus_bandwidth'] / 1e9:.3g} are planned"
    return text


def _why_idle(mean: Mapping[str, Any]) -> str:
    causes = mean["causes"]
    most = max(causes, key=lambda cause: causes[cause], default=None)
    told = "" if most is None or not causes[most] else f"; while devices idle the host does: {most.replace('_', ' ')}"
    return f"the plan knows no copies and no idle devices{told}"


def _workers(facts: Facts) -> int:
    return facts.config.data.workers if facts.config is not None else 0


def _memory(facts: Facts) -> list[Term]:
    rows = (facts.plan or {}).get("memory", [])
    return [
        Term(f"memory: {row['what']}", "bytes", row["planned_bytes"], row["compiled_bytes"], str(row["explanation"]))
        for row in rows
        if row["planned_bytes"] > 0
    ]


def _traffic(facts: Facts) -> list[Term]:
    return [
        Term(
            f"bytes: {row['kind']} over {', '.join(row['axes'])}",
            "bytes",
            float(row["planned_bytes"]),
            float(row["compiled_bytes"]),
            str(row["explanation"]),
        )
        for row in facts.traffic
    ]


def _bandwidths(facts: Facts) -> list[Term]:
    found: dict[tuple[str, tuple[str, ...]], Mapping[str, Any]] = {}
    for row in (facts.analysis or {}).get("collectives", []):
        if row.get("bus_bandwidth") and row.get("planned_bus_bandwidth"):
            key = row["kind"], tuple(row.get("axes") or ())
            if key not in found or row["bytes"] > found[key]["bytes"]:
                found[key] = row
    return [
        _term(
            f"bus bandwidth: {kind} over {', '.join(axes)}",
            "bytes/s",
            float(row["planned_bus_bandwidth"]),
            float(row["bus_bandwidth"]),
            f"of {row['bytes'] / 1e6:.3g} MB per step in {row.get('layer', '?')}; ridge doctor measures the link alone",
        )
        for (kind, axes), row in found.items()
    ]
