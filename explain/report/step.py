"""The part of the report about the inside of a step: the analysis of the newest profile."""

from __future__ import annotations

from ridgeline.configs.format import format_count, format_seconds, plural
from ridgeline.explain.report.charts import stacked_bars
from ridgeline.explain.report.html import folded, table, text
from ridgeline.explain.report.memory import memory_section
from ridgeline.explain.report.roofline import roofline_svg
from ridgeline.rundir.analysis import Analysis
from ridgeline.rundir.analysis_times import Statistics

MOST_DEVICES, MOST_ROWS, MOST_PLACES = 16, 15, 5
PARTS = {
    "compute": "compute_s",
    "communication": "exposed_communication_s",
    "copies": "exposed_copy_s",
    "idle": "idle_s",
    "unexplained": "residual_s",
}
NAMES = {"communication": "communication, exposed", "copies": "copies, exposed", "unexplained": "residual"}


def step_section(analysis: Analysis | None) -> list[str]:
    """Return the HTML: ledger, components under their ceilings, operations, matmuls, collectives, memory, hosts."""
    head = ["<h2>Inside a step</h2>"]
    if analysis is None or not analysis.devices:
        return [*head, '<p class="soft">No profile was captured (set profiler.start_step, or send SIGUSR1 to a running job).</p>']
    parts = [*head, f'<p class="soft">{text(_headline(analysis))}</p>', '<div class="wide">', _bars(analysis), "</div>"]
    parts += [_ledger(analysis), *_components(analysis)]
    if svg := roofline_svg(analysis):
        roof = "" if analysis.hardware else f"No datasheet for {analysis.device_kind or 'these devices'}: there is no roof. "
        parts += ["<h3>Operations by intensity and rate (roofline)</h3>", f'<p class="soft">{text(roof)}The area of a dot is its time.</p>']
        parts += [f'<div class="wide">{svg}</div>', _operations(analysis)]
    return parts + _matmuls(analysis) + _collectives(analysis) + _sizes(analysis) + memory_section(analysis) + _hosts(analysis)


def _headline(analysis: Analysis) -> str:
    usual_s = analysis.unprofiled_step_time_s
    usual = f"; without the profiler a step takes {format_seconds(usual_s)}" if usual_s else ""
    methods = ", ".join(sorted({each.method for each in analysis.step_assignment}))
    assigned = f"; operations assigned to steps by {methods}" if methods else ""
    what = {"step": "profiled step(s)", "execution": f"execution(s) of {analysis.marker}", "capture": "whole capture"}[analysis.unit]
    median = f", {format_seconds(analysis.summary['total_s'].p50)} per {analysis.per} (median)" if analysis.unit != "capture" else ""
    odd = [f"Left out: {each.name} ({format_seconds(each.total_s)}), which {each.why}" for each in analysis.left_out]
    odd += [f"Outlier: {each.name} ({format_seconds(each.total_s)}); {each.why}" for each in analysis.outliers]
    more = "".join(f" {each}." for each in odd[:MOST_ROWS])
    return f"{len(analysis.steps)} {what} on {plural(len(analysis.devices), 'device')}{median}{usual}{assigned}.{more}"


def _bars(analysis: Analysis) -> str:
    rows = {d.device: {name: max(0.0, float(getattr(d, key))) for name, key in PARTS.items()} for d in analysis.devices[:MOST_DEVICES]}
    return stacked_bars("Step ledger", rows)


def _ledger(analysis: Analysis) -> str:
    """The mean step: the parts that sum to it, and the overlapped communication."""
    summary, steps = analysis.summary, analysis.steps
    total_s = summary["total_s"].mean or 1.0

    def row(name: str, mean_s: float, more: Statistics | None = None) -> list[str]:
        tail = [format_seconds(more.p50), format_seconds(more.p95)] if more else ["", ""]
        return [name, format_seconds(mean_s), f"{mean_s / total_s:.1%}", *tail]

    rows = [row(NAMES.get(n, n), summary[key].mean, summary[key]) for n, key in PARTS.items() if key in summary]
    for cause in steps[0].idle_by_cause:
        mean_s = sum(step.idle_by_cause[cause] for step in steps) / len(steps)
        if mean_s > 0:
            rows.append(row(f"\u2003while the host: {cause.replace('_', ' ')}", mean_s))
    rows.append(row("residual", sum(step.residual_s for step in steps) / len(steps)))
    rows.append(row(analysis.unit, total_s, summary["total_s"]))
    rows.append(row("(communication overlapped by compute)", summary["communication_s"].mean - summary["exposed_communication_s"].mean))
    return table(["part", "mean", "share", "p50", "p95"], rows)


def _components(analysis: Analysis) -> list[str]:
    if not analysis.components:
        return []
    rows = [
        [
            c.component,
            c.phase,
            format_seconds(c.time_s),
            _share(c.share),
            _giga(c.flops),
            _giga(c.bytes),
            _giga(c.flops_per_s),
            _share(c.attained),
        ]
        for c in analysis.components[:MOST_ROWS]
    ]
    heads = ["component", "pass", "time", "share", "GFLOP", "GB", "GFLOP/s", "of ceiling"]
    return [f"<h3>Compute by component, per {text(analysis.per)} and device</h3>", table(heads, rows)]


def _operations(analysis: Analysis) -> str:
    rows = [
        [
            (o.op or o.kernel_name)[:50],
            f"{o.component}, {o.phase}",
            format_seconds(o.time_s),
            _share(o.attained or None),
            o.bound or "",
            _short(o.source),
        ]
        for o in analysis.operations[:10]
    ]
    return table(["longest operations", "part", "time", "of ceiling", "bound", "source"], rows)


def _collectives(analysis: Analysis) -> list[str]:
    rows = []
    for c in analysis.collectives[:MOST_ROWS]:
        axes = "?" if c.axes is None else "+".join(c.axes)
        times = ["n/a" if value is None else format_seconds(value) for value in (c.time_s, c.exposed_s, c.wait_s)]
        figures = [_giga(value) for value in (c.algorithm_bandwidth, c.bus_bandwidth, c.planned_bus_bandwidth)]
        rows.append([c.kind, axes, f"{c.layer} {c.phase}", f"{c.count:g}", _mega(c.bytes), *times, *figures])
    if not rows:
        return []
    heads = ["kind", "axes", "where", "runs", "MB", "time", "exposed", "waiting", "alg GB/s", "bus GB/s", "planned GB/s"]
    late = [
        f"<li>straggler: {text(s.device)} was the last at {s.last_share:.0%} of its collectives; the others waited "
        f"{format_seconds(s.cost_s)} per {text(analysis.per)} for it</li>"
        for s in analysis.stragglers
    ]
    return [f"<h3>Communication, per {text(analysis.per)} and device</h3>", table(heads, rows), *(["<ul>", *late, "</ul>"] if late else [])]


def _matmuls(analysis: Analysis) -> list[str]:
    if not analysis.matmuls:
        return []
    rows = [
        [
            m.dtype,
            *(str(size) for size in (m.batch, m.m, m.n, m.k)),
            f"{m.runs:g}",
            format_seconds(m.time_s),
            "n/a" if m.flops_per_s is None else f"{m.flops_per_s / 1e12:,.3g}",
            _share(m.of_peak),
            _share(m.attained),
            m.bound or "",
        ]
        for m in analysis.matmuls[:MOST_ROWS]
    ]
    heads = ["dtype", "batch", "m", "n", "k", "runs", "time", "TFLOP/s", "of peak", "of ceiling", "bound"]
    count = plural(len(analysis.matmuls), "shape")
    return folded(f"Matmuls by shape, per {analysis.per} and device ({count})", [table(heads, rows)])


def _sizes(analysis: Analysis) -> list[str]:
    """Bandwidth of collectives by message size, where there is more than one size."""
    if len(analysis.message_sizes) < 2:
        return []
    rows = [
        [
            s.kind,
            "?" if s.axes is None else "+".join(s.axes),
            "n/a" if s.group_size is None else str(s.group_size),
            _mega(s.size_bytes),
            f"{s.count:g}",
            format_seconds(s.time_s),
            *(_giga(value) for value in (s.algorithm_bandwidth, s.bus_bandwidth, s.planned_bus_bandwidth)),
        ]
        for s in analysis.message_sizes[: 2 * MOST_ROWS]
    ]
    heads = ["kind", "axes", "devices", "MB", "runs", "time of one", "alg GB/s", "bus GB/s", "planned GB/s"]
    return folded(f"Collectives by message size, per {analysis.per} and device", [table(heads, rows)])


def _hosts(analysis: Analysis) -> list[str]:
    rows = [
        [
            h.host,
            format_count(h.launches_per_s),
            "n/a" if h.queue_depth_mean is None else f"{h.queue_depth_mean:.1f}",
            str(h.gaps),
            format_seconds(h.longest_gap_s),
            h.longest_gap_cause.replace("_", " "),
            format_seconds(h.waits_s),
        ]
        for h in analysis.hosts[:MOST_DEVICES]
    ]
    if not rows:
        return []
    heads = ["host", "launches/s", "queue depth", "gaps > 20 us", "longest gap", "its cause", "waits for device"]
    lines = [
        f"{h.host}: idle for {format_seconds(place.idle_s)} while the host was at {_short(place.source)} ({place.cause.replace('_', ' ')})"
        for h in analysis.hosts
        for place in h.idle_sources[:MOST_PLACES]
    ]
    lines += [
        f"{sync.what} at {_short(sync.source)} left the device idle {plural(sync.count, 'time')}, "
        f"{format_seconds(sync.idle_after_s)} in total"
        for h in analysis.hosts
        for sync in h.syncs
    ]
    lines += [compiled.describe() for h in analysis.hosts for compiled in h.compilations]
    items = [f"<li>{text(line)}</li>" for line in lines[:MOST_ROWS]]
    return ["<h3>Hosts</h3>", table(heads, rows), *(["<ul>", *items, "</ul>"] if items else [])]


def _short(source: str | None) -> str:
    """Return the last two parts of a path."""
    return "/".join((source or "").split("/")[-2:])


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def _giga(value: float | None) -> str:
    return "n/a" if value is None else f"{value / 1e9:,.3g}"


def _mega(value: float | None) -> str:
    return "n/a" if value is None else f"{value / 1e6:,.3g}"
