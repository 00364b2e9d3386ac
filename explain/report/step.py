"""The part of the report about the inside of a step: what `ridge analyze` found in the newest capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.configs.format import format_count, format_seconds
from ridgeline.explain.report.charts import stacked_bars
from ridgeline.explain.report.html import table, text
from ridgeline.explain.report.roofline import roofline_svg
from ridgeline.rundir.recompilation import Change, Recompilation

MOST_DEVICES, MOST_ROWS = 16, 15
PARTS = {
    "compute": "compute_s",
    "communication": "exposed_communication_s",
    "copies": "exposed_copy_s",
    "idle": "idle_s",
    "unexplained": "residual_s",
}
NAMES = {"communication": "communication, exposed", "copies": "copies, exposed", "unexplained": "residual"}


def step_section(analysis: Mapping[str, Any] | None) -> list[str]:
    """Return the HTML: ledger, components under their ceilings, collectives, host."""
    head = ["<h2>Inside a step</h2>"]
    if not analysis or not analysis.get("devices"):
        return [*head, '<p class="soft">No profile was captured (profiler.start_step, or SIGUSR1 to a running job).</p>']
    parts = [*head, f'<p class="soft">{text(_headline(analysis))}</p>', '<div class="wide">', _bars(analysis), "</div>"]
    if analysis.get("summary"):
        parts.append(_ledger(analysis))
    parts += _components(analysis)
    if svg := roofline_svg(analysis):
        roof = "" if analysis.get("hardware") else f"No datasheet for {analysis.get('device_kind') or 'these devices'}: there is no roof. "
        parts += ["<h3>Operations by intensity and rate (roofline)</h3>", f'<p class="soft">{text(roof)}The area of a dot is its time.</p>']
        parts += [f'<div class="wide">{svg}</div>', _operations(analysis)]
    return parts + _collectives(analysis) + _hosts(analysis)


def _headline(analysis: Mapping[str, Any]) -> str:
    steps, devices = len(analysis.get("steps", [])), len(analysis["devices"])
    usual_s = analysis.get("unprofiled_step_time_s")
    usual = f"; without the profiler a step takes {format_seconds(float(usual_s))}" if usual_s else ""
    methods = ", ".join(sorted({entry["method"] for entry in analysis.get("step_assignment", [])}))
    assigned = f"; work assigned to steps by {methods}" if methods else ""
    return f"{steps} profiled step(s) on {devices} device(s){usual}{assigned}."


def _bars(analysis: Mapping[str, Any]) -> str:
    rows = {}
    for device in analysis["devices"][:MOST_DEVICES]:
        rows[str(device["device"])] = {name: max(0.0, float(device[key])) for name, key in PARTS.items()}
    return stacked_bars("Step ledger", rows)


def _ledger(analysis: Mapping[str, Any]) -> str:
    """The mean step: what sums to it, and what is shown beside."""
    summary, steps = analysis["summary"], analysis["steps"]
    total_s = float(summary["total_s"]["mean"]) or 1.0

    def row(name: str, mean_s: float, more: Mapping[str, float] | None = None) -> list[str]:
        tail = [format_seconds(more["p50"]), format_seconds(more["p95"])] if more else ["", ""]
        return [name, format_seconds(mean_s), f"{mean_s / total_s:.1%}", *tail]

    rows = [row(NAMES.get(n, n), summary[key]["mean"], summary[key]) for n, key in PARTS.items() if key in summary]
    for cause in steps[0]["idle_by_cause"]:
        mean_s = sum(float(step["idle_by_cause"][cause]) for step in steps) / len(steps)
        if mean_s > 0:
            rows.append(row(f"\u2003host then: {cause.replace('_', ' ')}", mean_s))
    rows.append(row("residual", sum(float(step["residual_s"]) for step in steps) / len(steps)))
    rows.append(row("step", total_s, summary["total_s"]))
    hidden_s = summary["communication_s"]["mean"] - summary["exposed_communication_s"]["mean"]
    rows.append(row("(communication hidden by compute)", hidden_s))
    return table(["part", "mean", "share", "p50", "p95"], rows)


def _components(analysis: Mapping[str, Any]) -> list[str]:
    found = sorted(analysis.get("components", []), key=lambda c: -float(c.get("time_s", 0.0)))[:MOST_ROWS]
    if not found:
        return []
    rows = [
        [
            str(c.get("component")),
            str(c.get("phase", "")),
            format_seconds(float(c.get("time_s", 0.0))),
            _share(c.get("share")),
            _giga(c.get("flops")),
            _giga(c.get("bytes")),
            _giga(c.get("flops_per_s")),
            _share(c.get("attained")),
        ]
        for c in found
    ]
    heads = ["component", "pass", "time", "share", "GFLOP", "GB", "GFLOP/s", "of ceiling"]
    return ["<h3>Compute by component, per step and device</h3>", table(heads, rows)]


def _operations(analysis: Mapping[str, Any]) -> str:
    rows = []
    for o in analysis.get("operations", [])[:10]:
        attained = o["ceiling_s"] / o["time_s"] if o.get("ceiling_s") and o.get("time_s") else None
        source = _short(o.get("source"))
        name = str(o.get("op") or o.get("kernel_name", ""))[:50]
        rows.append(
            [name, f"{o['component']}, {o['phase']}", format_seconds(o["time_s"]), _share(attained), str(o.get("bound") or ""), source]
        )
    return table(["longest operations", "part", "time", "of ceiling", "bound", "source"], rows)


def _collectives(analysis: Mapping[str, Any]) -> list[str]:
    rows = []
    for c in analysis.get("collectives", [])[:MOST_ROWS]:
        axes = "?" if c.get("axes") is None else "+".join(c["axes"])
        times = [format_seconds(c[key]) if c.get(key) is not None else "n/a" for key in ("time_s", "exposed_s", "wait_s")]
        figures = [_giga(c.get(key)) for key in ("algorithm_bandwidth", "bus_bandwidth", "planned_bus_bandwidth")]
        rows.append([c["kind"], axes, f"{c['layer']} {c['phase']}", f"{c['count']:g}", _mega(c.get("bytes")), *times, *figures])
    if not rows:
        return []
    heads = ["kind", "axes", "where", "runs", "MB", "time", "exposed", "waiting", "alg GB/s", "bus GB/s", "planned GB/s"]
    parts = ["<h3>Communication, per step and device</h3>", table(heads, rows)]
    late = [
        f"<li>{text(s['device'])} came last to {s['last_share']:.0%} of its collectives and cost the others "
        f"{format_seconds(s['cost_s'])} per step</li>"
        for s in analysis.get("stragglers", [])
    ]
    return parts + (["<ul>", *late, "</ul>"] if late else [])


def _hosts(analysis: Mapping[str, Any]) -> list[str]:
    hosts: Sequence[Mapping[str, Any]] = analysis.get("hosts", [])
    rows = [
        [
            str(h["host"]),
            format_count(float(h["launches_per_s"])),
            "n/a" if h.get("queue_depth_mean") is None else f"{h['queue_depth_mean']:.1f}",
            str(h["gaps"]),
            format_seconds(float(h["longest_gap_s"])),
            str(h["longest_gap_cause"]).replace("_", " "),
            format_seconds(float(h["waits_s"])),
        ]
        for h in hosts[:MOST_DEVICES]
        if "launches_per_s" in h
    ]
    if not rows:
        return []
    heads = ["host", "launches/s", "queue depth", "gaps > 20 us", "longest", "host then", "waits for device"]
    said = [
        f"{sync['what']} at {_short(sync['source'])} left the device idle {sync['count']} time(s), "
        f"{format_seconds(sync['idle_after_s'])} in all"
        for h in hosts
        for sync in h.get("syncs", [])
    ]
    for h in hosts:
        for found in h.get("compilations", []) if isinstance(h.get("compilations"), list) else []:
            changes = tuple(Change(**change) for change in found["arguments"])
            again = Recompilation(found["program"], found["step"], found["duration_s"], changes, found["source"])
            said.append(again.describe() if found["step"] is not None else f"compiled while training: {found['program']}")
    items = [f"<li>{text(line)}</li>" for line in said[:MOST_ROWS]]
    return ["<h3>The host</h3>", table(heads, rows), *(["<ul>", *items, "</ul>"] if items else [])]


def _short(source: str | None) -> str:
    """The last two parts of a path are enough to find a line."""
    return "/".join((source or "").split("/")[-2:])


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def _giga(value: float | None) -> str:
    return "n/a" if value is None else f"{value / 1e9:,.3g}"


def _mega(value: float | None) -> str:
    return "n/a" if value is None else f"{value / 1e6:,.3g}"
