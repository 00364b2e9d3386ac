"""The part of the report about the plan: memory by component, and planned beside compiled and measured figures, term by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.configs.format import format_seconds
from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.explain.diagnosis.terms import Term, largest, terms
from ridgeline.explain.report.charts import stacked_bars
from ridgeline.explain.report.html import table, text
from ridgeline.rundir.records import PlanRecord, TrafficRow

_NOT_COMPILED = ("runtime_reserve", "reference_parameters", "margin", "fragmentation")
"""Components outside of the compiled step."""


def plan_section(facts: Facts) -> list[str]:
    """Return the HTML; [] for a run without a plan and a compile report."""
    if facts.plan is None and facts.compiled is None:
        return []
    plan = facts.plan or PlanRecord()
    parts = ["<h2>Plan, compiled and measured</h2>"]
    if plan.no_step_s:
        parts.append(f'<p class="soft">No step time was predicted: {text(plan.no_step_s)}.</p>')
    elif plan.cluster:
        parts.append(f'<p class="soft">Predicted for the cluster {text(plan.cluster)}.</p>')
    found = [term for term in terms(facts) if term.unit != "bytes"]
    if found:
        rows = [[t.name, _figure(t, t.planned), _figure(t, t.measured), _change(t.planned, t.measured), t.explanation] for t in found]
        parts += ["<h3>Step time and bandwidth of collectives</h3>", table(["term", "planned", "measured", "difference", "why"], rows)]
        if (worst := largest(found)) is not None:
            parts.append(f"<p>Largest difference: {text(worst.name)}: {text(worst.explanation)}.</p>")
    return parts + _memory(facts, plan) + _communication(plan.communication)


def _figure(term: Term, value: float) -> str:
    return format_seconds(value) if term.unit == "s" else f"{value / 1e9:,.3g} GB/s"


def _memory(facts: Facts, plan: PlanRecord) -> list[str]:
    parts: list[str] = []
    components = {name: float(size) for name, size in plan.components.items() if size}
    compiled = {row.what: row.compiled_bytes for row in plan.memory}
    bars: dict[str, Mapping[str, float]] = {}
    if components:
        bars["planned"] = {name: size for name, size in components.items() if name not in _NOT_COMPILED}
    if compiled:
        bars["compiled"] = {name: compiled[name] for name in ("arguments", "temporaries") if name in compiled}
    if bars:
        parts += ["<h3>Memory of a device</h3>", f'<div class="wide">{stacked_bars("Memory by component", bars, unit="bytes")}</div>']
        parts.append(table(["planned component", "MB"], [[n.replace("_", " "), _mb(b)] for n, b in _largest(components)]))
    peak = next((float(s["peak_bytes"]) for s in reversed(facts.steps) if "peak_bytes" in s), None)
    rows = [
        [r.what, _mb(r.planned_bytes), _mb(r.compiled_bytes), _change(r.planned_bytes, r.compiled_bytes), r.explanation]
        for r in plan.memory
    ]
    if rows:
        parts.append(table(["MB", "planned", "compiled", "difference", "why"], rows))
    total = plan.memory_bytes or (None if facts.compiled is None else facts.compiled.step_bytes)
    if total:
        measured = "not reported by this device" if peak is None else f"{_mb(peak)} MB ({_change(float(total), peak)})"
        parts.append(f"<p>Whole device: {_mb(float(total))} MB predicted; measured peak: {measured}.</p>")
    return parts


def _largest(components: Mapping[str, float]) -> Sequence[tuple[str, float]]:
    return sorted(components.items(), key=lambda item: -item[1])


def _communication(traffic: Sequence[TrafficRow]) -> list[str]:
    rows = [
        [
            f"{row.kind} over {'+'.join(row.axes)}",
            row.where,
            f"{row.planned_bytes / 1e6:,.3g}",
            f"{row.compiled_bytes / 1e6:,.3g}",
            row.explanation,
        ]
        for row in traffic
        if row.planned_bytes or row.compiled_bytes
    ]
    if not rows:
        return []
    return ["<h3>Communication of a step</h3>", table(["collective", "where", "MB planned", "MB compiled", "why"], rows)]


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f}"


def _change(planned: float, measured: float) -> str:
    return f"{measured / planned - 1:+.0%}" if planned else "not planned" if measured else ""
