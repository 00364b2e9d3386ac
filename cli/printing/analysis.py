"""Print the analysis of a profile: where a step's time went, by device, component, operation, collective and host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ridgeline.cli.tables import Column, print_table
from ridgeline.configs.format import format_bytes, format_count, format_seconds, plural
from ridgeline.rundir.analysis import Compilation
from ridgeline.rundir.recompilation import Change

_SECONDS = format_seconds
_SHARE = "{:.1%}".format
_UNKNOWN = "unknown"


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
        _print_operations(report["operations"][:top], _per(report))
        _print_matmuls(report["matmuls"][:top], _per(report))
    _print_collectives(report)
    _print_sizes(report["message_sizes"])
    _print_memory(report["memory"][:top])
    _print_allocators(report["allocators"])
    _print_hosts(report)
    for note in report["notes"]:
        print(f"note: {note}")


def _headline(report: dict[str, Any]) -> str:
    """What was analyzed, and the median step; then the steps that are left out and the outliers."""
    count, devices = len(report["steps"]), len(report["devices"])
    usual_s, methods = report["unprofiled_step_time_s"], ", ".join(sorted({entry["method"] for entry in report["step_assignment"]}))
    usual = "" if usual_s is None else f"; without the profiler: {format_seconds(usual_s)}"
    on = f"on {devices} {report['device_kind'] or 'unknown'} device{'' if devices == 1 else 's'}"
    on += f", {format_seconds(report['summary']['total_s']['p50'])}"
    if report["unit"] == "capture":
        lines = [f"{report['profile']}: the whole capture {on} from first to last operation"]
    elif report["unit"] == "execution":
        lines = [f"{report['profile']}: {plural(count, 'execution')} of {report['marker']} {on} per execution (median){usual}"]
    else:
        what = f"{plural(count, 'step')} of annotation '{report['marker']}'"
        lines = [f"{report['profile']}: {what} {on} per step (median){usual}; steps assigned by {methods}"]
    for odd in report["left_out"][:_MOST_ODD]:
        lines.append(f"left out: {odd['name']}, {format_seconds(odd['total_s'])}, which {odd['why']}")
    for odd in report["outliers"][:_MOST_ODD]:
        lines.append(f"outlier: {odd['name']}, {format_seconds(odd['total_s'])}, {odd['times_median']:.1f}x the median; {odd['why']}")
    return "\n".join(lines)


_MOST_ODD = 5
"""Steps left out, and outliers, that are listed."""


def _per(report: dict[str, Any]) -> str:
    """What figures are per: step, execution of a program, or capture."""
    return f"execution of {report['marker']}" if report["unit"] == "execution" else str(report["unit"])


def _print_ledger(report: dict[str, Any]) -> None:
    """Print the parts of a step, and the overlapped communication, which is not one of them."""
    summary, steps = report["summary"], report["steps"]
    total_s = summary["total_s"]["mean"]
    rows = [_part(name, summary[key], total_s) for name, key in _PARTS.items()]
    causes = steps[0]["idle_by_cause"]
    for cause in causes:
        values = [step["idle_by_cause"][cause] for step in steps]
        mean_s = sum(values) / len(values)
        if mean_s > 0:
            rows.append({"part": f"  host: {cause.replace('_', ' ')}", "p50": median(values), "mean": mean_s, "share": mean_s / total_s})
    rows.append({"part": "residual", "mean": sum(step["residual_s"] for step in steps) / len(steps), "share": 0.0})
    rows.append(_part(report["unit"], summary["total_s"], total_s))
    hidden = [step["communication_s"] - step["exposed_communication_s"] for step in steps]
    mean_s = sum(hidden) / len(hidden)
    rows.append({"part": "(communication overlapped with compute)", "p50": median(hidden), "mean": mean_s, "share": mean_s / total_s})
    columns: list[Column | str] = [
        "part",
        Column("p50", "median", _SECONDS),
        Column("p95", format=_SECONDS),
        Column("mean", format=_SECONDS),
        Column("share", "share of mean", _SHARE),
    ]
    print_table(columns, rows)
    print()


_PARTS = {
    "compute": "compute_s",
    "communication, exposed": "exposed_communication_s",
    "copies, exposed": "exposed_copy_s",
    "idle": "idle_s",
}


def _part(name: str, values: dict[str, float], total_s: float) -> dict[str, Any]:
    return {"part": name, "share": values["mean"] / total_s} | values


def _print_devices(report: dict[str, Any], most: int = 16) -> None:
    """Print the parts of each device's steps, and its idle share of the capture: over its own span, and over that of its host."""
    if len(report["devices"]) < 2:
        return
    rows = sorted(report["devices"], key=lambda d: -d["idle_s"])[:most] if len(report["devices"]) > most else report["devices"]
    title = f"devices ({most} of {len(report['devices'])}, those with most idle time)" if len(report["devices"]) > most else "devices"
    shown = [
        {"device": d["device"]}
        | {name: d[key] / d["total_s"] if d["total_s"] else None for name, key in _PARTS.items()}
        | {"total": d["total_s"]}
        | {span: d[f"{span}_idle_s"] / d[f"{span}_s"] if d[f"{span}_s"] else None for span in ("span", "capture")}
        for d in rows
    ]
    columns: list[Column | str] = [
        "device",
        *(Column(name, format=_SHARE) for name in _PARTS),
        Column("total", format=_SECONDS),
        Column("span", "idle, own span", _SHARE),
        Column("capture", "idle, host's span", _SHARE),
    ]
    print_table(columns, shown, title=title)
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
        Column("flops", "GFLOP", _giga, _UNKNOWN),
        Column("bytes", "GB", _giga, _UNKNOWN),
        Column("flops_per_s", "GFLOP/s", _giga, _UNKNOWN),
        Column("bytes_per_s", "GB/s", _giga, _UNKNOWN),
        Column("attained", "of ceiling", _SHARE, _UNKNOWN),
        Column("headroom_s", "headroom", _SECONDS, _UNKNOWN),
    ]
    print_table(columns, rows, title=f"compute by component, per {_per(report)} and device")
    print()


def _print_matmuls(shapes: Sequence[dict[str, Any]], per: str) -> None:
    if not shapes:
        return
    columns: list[Column | str] = [
        "dtype",
        *("batch", "m", "n", "k"),
        Column("runs", format="{:g}".format),
        Column("time_s", "time", _SECONDS),
        Column("flops_per_s", "TFLOP/s", lambda value: f"{value / 1e12:.3g}"),
        Column("of_peak", "of peak", _SHARE, _UNKNOWN),
        Column("attained", "of ceiling", _SHARE, _UNKNOWN),
        Column("bound", missing=_UNKNOWN),
    ]
    print_table(columns, shapes, title=f"matmuls by shape, per {per} and device")
    print()


def _print_operations(operations: Sequence[dict[str, Any]], per: str) -> None:
    if not operations:
        return
    columns: list[Column | str] = [
        Column("op", "operation"),
        *([Column("module", "program")] if len({o["module"] for o in operations}) > 1 else []),
        "component",
        Column("phase", "pass"),
        Column("runs", format="{:g}".format),
        Column("time_s", "time", _SECONDS),
        Column("attained", "of ceiling", _SHARE, _UNKNOWN),
        Column("bound", missing=_UNKNOWN),
        Column("source", missing=_UNKNOWN),
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
    print_table(columns, rows, title=f"longest operations, per {per} and device")
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
    print_table(columns, rows, title=f"communication, per {_per(report)} and device")
    for s in report["stragglers"]:
        print(
            f"straggler: {s['device']} arrived last at {s['last_share']:.0%} of its collectives, which cost the others "
            f"{format_seconds(s['cost_s'])} per {_per(report)}"
        )
    print()


_MOST_PLACES = 5
"""Places at which the host was while devices were idle, that are listed."""


def _print_sizes(sizes: Sequence[dict[str, Any]]) -> None:
    """Print the bandwidth by message size, where there is more than one size."""
    if len(sizes) < 2:
        return
    columns: list[Column | str] = [
        "kind",
        "axes",
        Column("group_size", "devices"),
        Column("size_bytes", "MB", lambda value: f"{value / 1e6:.3g}"),
        Column("count", format="{:g}".format),
        Column("time_s", "time of one", _SECONDS),
        Column("algorithm_bandwidth", "alg GB/s", _giga, _UNKNOWN),
        Column("bus_bandwidth", "bus GB/s", _giga, _UNKNOWN),
        *([Column("planned_bus_bandwidth", "planned GB/s", _giga)] if any(s["planned_bus_bandwidth"] for s in sizes) else []),
    ]
    rows = [s | {"axes": "?" if s["axes"] is None else "+".join(s["axes"])} for s in sizes]
    print_table(columns, rows, title="collectives by message size")
    print()


def _print_memory(programs: Sequence[dict[str, Any]]) -> None:
    """Print the memory of the programs, and what is live at the peak of the largest."""
    if not programs:
        return
    columns: list[Column | str] = [Column("module", "program"), *(Column(f"{key}_bytes", f"{key} GB", _giga) for key in _MEMORY), "at"]
    rows = [p | {"at": _place(p["peak_at"]) if p["timeline"] else None} for p in programs]
    print_table(columns, rows, title="memory by program, per device")
    if (first := next((p for p in programs if p["largest"]), None)) is not None:
        live = ", ".join(f"{_place(buffer)} {format_bytes(buffer['bytes'])}" for buffer in first["largest"])
        print(f"largest temporaries at the peak of {first['module']}: {live}")
    print()


def _print_allocators(allocators: Sequence[dict[str, Any]]) -> None:
    """Print the peak of every allocator during the capture, and what holds the memory of the largest then."""
    if not allocators:
        return
    columns: list[Column | str] = [
        "host",
        "allocator",
        Column("in_use_bytes", "peak GB", _giga),
        Column("time_s", "at", _SECONDS),
        Column("capacity_bytes", "of GB", _giga, _UNKNOWN),
        Column("lifetime_peak_bytes", "lifetime peak GB", _giga, _UNKNOWN),
        Column("fragmentation", format=_SHARE, missing=_UNKNOWN),
        "allocations",
    ]
    print_table(columns, [a | a["peak"] for a in allocators], title="memory of the allocators during the capture")
    largest = max(allocators, key=lambda a: a["peak"]["in_use_bytes"])
    parts = [f"{_held(each)} {format_bytes(each['bytes'])}" for each in largest["held"]]
    if largest["early_bytes"]:
        parts.append(f"allocated before the capture {format_bytes(largest['early_bytes'])}")
    print(f"in use at the peak of {largest['allocator']}: {', '.join(parts)}")
    print()


def _held(memory: dict[str, Any]) -> str:
    """Name what holds memory: `jit_step bf16[8,128] (3 times)`."""
    times = "" if memory["count"] == 1 else f" ({memory['count']} times)"
    return f"{memory['operation']} {memory['data_type']}{memory['shape']}".rstrip() + times


def _place(live: dict[str, Any]) -> str:
    return f"{live['instruction']} ({live['component']} {live['phase']})"


_MEMORY = ("arguments", "outputs", "temporaries", "peak")


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
        for place in host["idle_sources"][:_MOST_PLACES]:
            print(
                f"{host['host']}: the devices were idle for {format_seconds(place['idle_s'])} while the host was at {place['source']} "
                f"({place['cause'].replace('_', ' ')})"
            )
        for sync in host["syncs"]:
            print(
                f"{host['host']}: {sync['what']} at {sync['source']} left the device idle {plural(sync['count'], 'time')}, "
                f"{format_seconds(sync['idle_after_s'])} in all"
            )
        for compiled in host["compilations"]:
            changes = tuple(Change(**change) for change in compiled["arguments"])
            print(f"{host['host']}: {Compilation(**(compiled | {'arguments': changes})).describe()}")


def _short(source: str) -> str:
    """Return the last two parts of a path."""
    return "/".join(Path(source).parts[-2:])
