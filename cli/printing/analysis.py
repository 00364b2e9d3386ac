"""Print the analysis of a profile: where a step's time went, by device, component, operation, collective and host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ridgeline.cli.tables import Column, print_table
from ridgeline.configs.format import format_count, format_seconds
from ridgeline.rundir.recompilation import Change, Recompilation

_SECONDS = format_seconds
_SHARE = "{:.1%}".format


def _giga(value: float) -> str:
    return f"{value / 1e9:.3g}"


def print_analysis(report: dict[str, Any], top: int) -> None:
    """Print the tables."""
    print(_headline(report))
    print()
    _print_ledger(report)
    _print_devices(report)
    _print_components(report)
    if top:
        _print_operations(report["operations"][:top])
    _print_collectives(report)
    _print_hosts(report)
    for note in report["notes"]:
        print(f"note: {note}")


def _headline(report: dict[str, Any]) -> str:
    steps, devices = len(report["steps"]), len(report["devices"])
    mean_s = report["summary"]["total_s"]["mean"]
    usual_s = report["unprofiled_step_time_s"]
    methods = ", ".join(sorted({entry["method"] for entry in report["step_assignment"]}))
    what = f"{steps} step(s)" if report["steps"][0]["step"] is not None else "whole profile (no step markers)"
    usual = "" if usual_s is None else f"; without the profiler: {format_seconds(usual_s)}"
    return (
        f"{report['profile']}: {what} on {devices} {report['device_kind'] or 'unknown'} device(s), "
        f"{format_seconds(mean_s)} per step{usual}; steps assigned by {methods}"
    )


def _print_ledger(report: dict[str, Any]) -> None:
    """Print the parts of the mean step, and the overlapped communication, which is not one of them."""
    summary, steps = report["summary"], report["steps"]
    total_s = summary["total_s"]["mean"]
    rows = [_part(name, summary[key], total_s) for name, key in _PARTS.items()]
    causes = steps[0]["idle_by_cause"]
    for cause in causes:
        values = [step["idle_by_cause"][cause] for step in steps]
        mean_s = sum(values) / len(values)
        if mean_s > 0:
            rows.append({"part": f"  host: {cause.replace('_', ' ')}", "mean": mean_s, "share": mean_s / total_s})
    rows.append({"part": "residual", "mean": sum(step["residual_s"] for step in steps) / len(steps), "share": 0.0})
    rows.append(_part("step", summary["total_s"], total_s))
    hidden_s = summary["communication_s"]["mean"] - summary["exposed_communication_s"]["mean"]
    rows.append({"part": "(communication overlapped with compute)", "mean": hidden_s, "share": hidden_s / total_s})
    print_table(
        [
            "part",
            Column("mean", format=_SECONDS),
            Column("share", format=_SHARE),
            Column("p50", format=_SECONDS),
            Column("p95", format=_SECONDS),
        ],
        rows,
    )
    print()


_PARTS = {
    "compute": "compute_s",
    "communication, exposed": "exposed_communication_s",
    "copies, exposed": "exposed_copy_s",
    "idle": "idle_s",
}


def _part(name: str, values: dict[str, float], total_s: float) -> dict[str, Any]:
    return {"part": name, "mean": values["mean"], "share": values["mean"] / total_s, "p50": values["p50"], "p95": values["p95"]}


def _print_devices(report: dict[str, Any], most: int = 16) -> None:
    if len(report["devices"]) < 2:
        return
    rows = sorted(report["devices"], key=lambda d: -d["idle_s"])[:most] if len(report["devices"]) > most else report["devices"]
    title = f"devices ({most} of {len(report['devices'])}, those with most idle time)" if len(report["devices"]) > most else "devices"
    shown = [
        {"device": d["device"]}
        | {name: d[key] / d["total_s"] if d["total_s"] else None for name, key in _PARTS.items()}
        | {"total": d["total_s"]}
        for d in rows
    ]
    print_table(["device", *(Column(name, format=_SHARE) for name in _PARTS), Column("total", format=_SECONDS)], shown, title=title)
    print()


def _print_components(report: dict[str, Any]) -> None:
    rows = [c for c in report["components"] if c["share"] >= 0.001]
    if not rows:
        return
    columns: list[Column | str] = [
        "component",
        Column("phase", "pass"),
        Column("time_s", "time", _SECONDS),
        Column("share", format=_SHARE),
        Column("flops", "GFLOP", _giga),
        Column("bytes", "GB", _giga),
        Column("flops_per_s", "GFLOP/s", _giga),
        Column("bytes_per_s", "GB/s", _giga),
        Column("attained", "of ceiling", _SHARE),
        Column("headroom_s", "headroom", _SECONDS),
    ]
    print_table(columns, rows, title="compute by component, per step and device")
    print()


def _print_operations(operations: Sequence[dict[str, Any]]) -> None:
    if not operations:
        return
    columns: list[Column | str] = [
        Column("op", "operation"),
        "component",
        Column("phase", "pass"),
        Column("runs", format="{:g}".format),
        Column("time_s", "time", _SECONDS),
        Column("attained", "of ceiling", _SHARE),
        "bound",
        "source",
    ]
    rows = [
        o
        | {
            "op": o["op"] or o["kernel_name"][:60],
            "attained": o["ceiling_s"] / o["time_s"] if o["ceiling_s"] is not None and o["time_s"] else None,
            "source": None if o["source"] is None else _short(o["source"]),
        }
        for o in operations
    ]
    print_table(columns, rows, title="longest operations, per step and device")
    print()


def _print_collectives(report: dict[str, Any]) -> None:
    rows = [
        c | {"axes": "?" if c["axes"] is None else "+".join(c["axes"]), "where": f"{c['layer']} {c['phase']}"}
        for c in report["collectives"]
    ]
    if not rows:
        return
    columns: list[Column | str] = [
        "kind",
        "axes",
        "where",
        Column("count", format="{:g}".format),
        Column("bytes", "MB", lambda value: f"{value / 1e6:.3g}"),
        Column("time_s", "time", _SECONDS),
        Column("exposed_s", "exposed", _SECONDS),
        Column("wait_s", "waiting", _SECONDS),
        Column("algorithm_bandwidth", "alg GB/s", _giga),
        Column("bus_bandwidth", "bus GB/s", _giga),
        *([Column("planned_bus_bandwidth", "planned GB/s", _giga)] if any(c["planned_bus_bandwidth"] for c in rows) else []),
    ]
    print_table(columns, rows, title="communication, per step and device")
    for s in report["stragglers"]:
        print(
            f"straggler: {s['device']} arrived last at {s['last_share']:.0%} of its collectives, which cost the others "
            f"{format_seconds(s['cost_s'])} per step"
        )
    print()


def _print_hosts(report: dict[str, Any]) -> None:
    rows = [h | {"devices": len(h["devices"])} for h in report["hosts"]]
    columns: list[Column | str] = [
        "host",
        "devices",
        Column("launches_per_s", "launches/s", format_count),
        Column("queue_depth_mean", "queue depth", "{:.1f}".format),
        Column("launch_to_start_s", "launch to start", _SECONDS),
        Column("gaps", "gaps > 20 us"),
        Column("longest_gap_s", "longest", _SECONDS),
        Column("longest_gap_cause", "host activity"),
        Column("waits_s", "waits for device", _SECONDS),
    ]
    print_table(columns, rows, title="hosts")
    for host in report["hosts"]:
        for sync in host["syncs"]:
            print(
                f"{host['host']}: {sync['what']} at {sync['source']} left the device idle {sync['count']} time(s), "
                f"{format_seconds(sync['idle_after_s'])} in all"
            )
        for compiled in host["compilations"]:
            print(f"{host['host']}: {_compiled(compiled)}")


def _compiled(found: dict[str, Any]) -> str:
    if found["step"] is None:
        return f"compiled while training: {found['program']} ({found['count']} time(s), {format_seconds(found['duration_s'])})"
    changes = tuple(Change(**change) for change in found["arguments"])
    return Recompilation(found["program"], found["step"], found["duration_s"], changes, found["source"]).describe()


def _short(source: str) -> str:
    """Return the last two parts of a path."""
    return "/".join(Path(source).parts[-2:])
