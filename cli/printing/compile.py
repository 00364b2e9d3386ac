"""Print what a compiled step needs: memory, buffers, collectives, roofline."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.cli.tables import Column, print_table
from ridgeline.configs.format import plural
from ridgeline.rundir.records import MemoryRow, TrafficRow
from ridgeline.trainer.aot.report import Report, buffer_json, roofline_json
from ridgeline.trainer.plan_comparison import memory_rows, traffic_rows

GB = 1e9
COLUMNS = ("planned", "compiled")


def print_report(report: Report, change: list[str] | None, name: str, cluster: str, nodes: int) -> None:
    """Print the tables of one compiled step."""
    c = report.compiled
    mesh = " x ".join(f"{axis}={size}" for axis, size in c.mesh.items() if size > 1) or "one device"
    mesh += f", attention over context: {report.context_method}" if report.context_method else ""
    mesh += f", exchange of tokens over expert: {report.expert_exchange}" if report.expert_exchange else ""
    print(f"{name} on {plural(nodes, 'node')} of {cluster} ({math.prod(c.mesh.values())} x {report.device.name}, {mesh})")
    took = f"compiled in {c.compile_s:.1f} s (traced in {c.trace_s:.1f} s, lowered in {c.lower_s:.1f} s)"
    print(f"{took} with jaxlib {c.versions['jaxlib']}; GB is 1e9 bytes\n")
    _print_memory(report)
    for warning in c.warnings:
        print(f"XLA: {warning}")
    if report.uncounted_loops:
        print(f"loops with an unknown number of iterations, counted once: {', '.join(report.uncounted_loops)}")
    if report.estimated_loops:
        print("ring attention in blocks: FLOPs, bytes and times are the mean over devices for rows of one document")
    if not report.fits:
        print(f"\nsmallest change that should fit: {' '.join(change) if change else 'none found; use more devices or a smaller model'}")
    print()
    _print_buffers(report)
    print()
    _print_collectives(report)
    print()
    _print_roofline(report)


def _print_memory(report: Report) -> None:

    c = report.compiled
    rows: list[dict[str, object]] = [_in_gb(row) for row in memory_rows(report.estimate, c.argument_bytes, c.temp_bytes)]
    rows.append(
        {"what": "runtime (driver, communicators)", "planned": report.reserve_bytes / GB, "explanation": "outside the compiled program"}
    )
    number = "{:.2f}".format
    columns: list[Column | str] = ["what", Column("planned", format=number), Column("compiled", format=number), "explanation"]
    print_table(columns, rows, title="memory per device, GB")
    needed = report.needed_bytes / GB
    verdict = "fits" if report.fits else f"DOES NOT FIT: {needed - report.capacity_bytes / GB:.2f} GB too much"
    print(f"needs {needed:.2f} GB of {report.capacity_bytes / GB:.2f} GB usable: {verdict}")
    peak, share = c.allocated_bytes - c.gap_bytes, c.gap_bytes / c.temp_bytes if c.temp_bytes else 0.0
    print(f"of the step, {peak / GB:.2f} GB are in use at the peak; {c.gap_bytes / GB:.2f} GB are gaps in XLA's heap ({share:.1%} of it)")


def print_points(points: list[dict[str, Any]]) -> None:
    """Print planned and compiled memory at each point of a step."""
    rows = [
        {"point": at["point"], **{name: "-" if at[f"{name}_bytes"] is None else f"{at[f'{name}_bytes'] / GB:.2f}" for name in COLUMNS}}
        for at in points
    ]
    print()
    print_table(["point", *COLUMNS], rows, title="memory per device at each point of the step, GB (planned: without margin)")


def _in_gb(row: MemoryRow | TrafficRow) -> dict[str, object]:
    return dict(row) | {"planned": row.planned_bytes / GB, "compiled": row.compiled_bytes / GB}


def _print_buffers(report: Report) -> None:

    rows = [buffer_json(buffer) | {"gb": buffer.bytes / GB} for buffer in report.buffers[:12]]
    columns = [Column("gb", "GB", "{:.3f}".format), Column("copies"), Column("shape"), Column("what"), Column("source")]
    print_table(columns, rows, title="largest buffers at peak memory")


def _print_collectives(report: Report) -> None:

    rows = [_in_gb(row) | {"axes": ",".join(row.axes)} for row in traffic_rows(report.traffic, report.collectives)]
    number = "{:.3f}".format
    columns: list[Column | str] = [
        "where",
        "kind",
        "axes",
        Column("planned", format=number),
        Column("compiled", format=number),
        "explanation",
    ]
    print_table(columns, rows, title="collectives per step and device, GB")
    print(f"{report.overlapped_share:.1%} of the bytes are overlapped with compute")
    for heading, found in (("not in the plan", report.unplanned), ("full precision, although half would suffice", report.wide_gathers)):
        for c in found[:8]:
            place = f"{c.source.file}:{c.source.line}" if c.source is not None else c.op_name or c.name
            print(f"{heading}: {c.kind} over {c.axes} of {c.bytes / 1e6:.1f} MB {c.dtype} x {c.count:.0f} at {place}")


def _print_roofline(report: Report) -> None:

    roofline = roofline_json(report)
    rows = [row for row in roofline["components"] if row["seconds"] >= 0.005 * roofline["kernels_s"]]
    for row in rows:
        row |= {
            "ms": row["seconds"] * 1e3,
            "share": row["seconds"] / roofline["kernels_s"],
            "tf": row["flops"] / 1e12,
            "gb": row["bytes"] / GB,
        }
    columns: list[Column | str] = ["component", "part", Column("ms", format="{:.2f}".format), Column("share", format="{:.0%}".format)]
    columns += [Column("tf", "TFLOP", "{:.2f}".format), Column("gb", "GB", "{:.1f}".format)]
    print_table(columns, rows, title="roofline: minimum time of the kernels from FLOPs and bytes at datasheet rates")
    for kernel, count in roofline["unknown_flops"].items():
        print(f"not included: the FLOPs of {kernel} ({count:g} calls), which are unknown")
    print(f"all kernels: at least {roofline['kernels_s'] * 1e3:.1f} ms per step, without communication")
    step, compute, talk, waited = (roofline[k] * 1e3 for k in ("step_s", "compute_s", "communication_s", "exposed_communication_s"))
    print(f"simulated schedule at calibrated rates: {step:.1f} ms per step, of which {compute:.1f} ms kernels")
    print(f"communication: {talk:.1f} ms, of which {waited:.1f} ms exposed")


def print_comparison(comparison: dict[str, Any]) -> None:
    rows = [row | {"ms": row["step_s"] * 1e3, "waited": row["exposed_communication_s"] * 1e3} for row in comparison["rows"]]
    columns = [Column("value", "compute.tensor_overlap"), Column("ms", "step, ms", "{:.1f}".format)]
    columns += [Column("waited", "exposed, ms", "{:.1f}".format), Column("overlapped_share", "overlapped", "{:.1%}".format)]
    columns += [Column("needed_bytes", "GB", lambda size: f"{size / GB:.2f}"), Column("fits")]
    print()
    print_table(columns, rows, title="tensor-parallel matmuls with each setting, simulated at calibrated rates")
    print(comparison["advice"])
