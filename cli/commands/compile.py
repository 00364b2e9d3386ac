"""`ridge compile CONFIG --cluster C --nodes N`: the actual train step, compiled for GPUs that are not here."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import config_arguments, json_option
from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.configs.cluster import ClusterConfig
    from ridgeline.configs.schema import Config
    from ridgeline.trainer.aot.compile import Request
    from ridgeline.trainer.aot.report import Report

GB = 1e9


@click.command("compile")
@config_arguments
@click.option("--cluster", "-c", required=True, help="Cluster file: a shipped one by name, or a YAML file.")
@click.option("--nodes", "-N", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes of the run.")
@click.option(
    "--fail-if-memory-above", metavar="GB", type=click.FloatRange(min=0, min_open=True), help="Exit with 1 when a device needs more."
)
@click.option("--xla-flag", "xla_flags", metavar="--xla_...=V", multiple=True, help="A flag of XLA beside those of the run; repeatable.")
@click.option(
    "--optimization-level",
    type=click.Choice(["O0", "O1", "O2", "O3"]),
    help="JAX_OPTIMIZATION_LEVEL [default: that of a run]; O1 pipelines collectives and takes more memory.",
)
@click.option("--calibration", metavar="FILE", help="Rates measured by `ridge calibrate` [default: published ones].")
@click.option(
    "--compare",
    type=click.Choice(["tensor_overlap"]),
    help="Also compile with the other value of this setting of `compute`, and say with which the played schedule is shorter.",
)
@click.option("--hlo", type=click.Path(path_type=Path), help="Also write the compiled module's text to this file.")
@click.option("--timeout-s", type=click.FloatRange(min=1), default=1800.0, show_default=True, help="End a compile that takes longer.")
@json_option
def compile_command(
    config: str,
    overrides: tuple[str, ...],
    cluster: str,
    nodes: int,
    fail_if_memory_above: float | None,
    xla_flags: tuple[str, ...],
    optimization_level: str | None,
    calibration: str | None,
    compare: str | None,
    hlo: Path | None,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Compile the train step of CONFIG for the GPUs of a cluster, without a GPU, and report what it needs.

    Exact bytes per device against capacity; every collective by kind and mesh axes, whether compute hides it, and what the plan does not
    contain; what fills the memory, mapped to parameters, layers and source lines; a roofline of all kernels. Exit code 1 when the step
    needs more than --fail-if-memory-above.
    """
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.configs.load import load
    from ridgeline.planner.calibration import load_calibration
    from ridgeline.trainer.aot.compile import compile_ahead
    from ridgeline.trainer.aot.overlap import compared, other_overlap
    from ridgeline.trainer.aot.report import build_report, report_json, smallest_change

    resolved, place, rates = load(config, overrides).config, load_cluster(cluster).config, load_calibration(calibration)
    request = request_of_a_run(resolved, place, nodes, xla_flags, optimization_level)
    other = None
    if compare is not None:
        value = other_overlap(resolved, request.devices)
        changed = load(config, (*overrides, f"compute.tensor_overlap={value}")).config
        other = request_of_a_run(changed, place, nodes, xla_flags, optimization_level)
    compiled = compile_ahead(request, timeout_s=timeout_s)
    report = build_report(request, place, compiled, rates)
    change = None if report.fits else smallest_change(request, place, report)
    if hlo is not None:
        _write(hlo, compiled.hlo_text)
    comparison = None
    if other is not None:
        reports: dict[str, Report] = {resolved.compute.tensor_overlap: report}
        reports[other.config.compute.tensor_overlap] = build_report(other, place, compile_ahead(other, timeout_s=timeout_s), rates)
        comparison = compared(reports)
    if as_json:
        told = {"xla_flags": list(request.xla_flags), "optimization_level": request.optimization_level, "smallest_change": change}
        print_json(report_json(report) | told | ({"compared": comparison} if comparison is not None else {}))
    else:
        print_report(report, change, resolved.name, place.name, nodes)
        if comparison is not None:
            _print_comparison(comparison)
    needed = (compiled.peak_bytes + report.reserve_bytes) / GB
    if fail_if_memory_above is not None and needed > fail_if_memory_above:
        click.echo(f"ridge: {needed:.2f} GB per device are above the {fail_if_memory_above:g} GB allowed", err=True)
        return 1
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def request_of_a_run(config: Config, place: ClusterConfig, nodes: int, xla_flags: tuple[str, ...], level: str | None) -> Request:
    """Ask for a config with the flags of a run, the user's own in their place. Raises UserError for devices that cannot be compiled for."""
    from ridgeline.trainer.aot.compile import Request

    request = Request.on(config, place, nodes)
    flags, usual = flags_of_a_run(config, place.device)
    own = {flag.split("=", 1)[0] for flag in xla_flags}
    flags = (*(flag for flag in flags if flag.split("=", 1)[0] not in own), *xla_flags)
    return replace(request, xla_flags=flags, optimization_level=level or usual)


def flags_of_a_run(config: Config, device: str) -> tuple[tuple[str, ...], str | None]:
    """Return the XLA flags and the optimisation level that a run of this config on this device starts with (launch/environment.py)."""
    from ridgeline.launch.environment import Host, choose, generation_of
    from ridgeline.launch.xla_flags import unknown_flags
    from ridgeline.planner.hardware import hardware

    host = Host(generation_of(hardware(device).kinds[0]), importlib.metadata.version("jaxlib"), None)
    chosen = choose(host, config, {}, unknown_flags)
    flags = tuple(f"{s.name}={s.value}" for s in chosen if s.is_flag and s.chosen != "dropped")
    return flags, next((s.value for s in chosen if s.name == "JAX_OPTIMIZATION_LEVEL"), None)


def print_report(report: Report, change: list[str] | None, name: str, cluster: str, nodes: int) -> None:
    """Print the report for people."""
    c = report.compiled
    mesh = " x ".join(f"{axis}={size}" for axis, size in c.mesh.items() if size > 1) or "one device"
    print(f"{name} on {nodes} node(s) of {cluster} ({math.prod(c.mesh.values())} x {report.device.name}, {mesh})")
    took = f"compiled in {c.compile_s:.1f} s (traced in {c.trace_s:.1f} s, lowered in {c.lower_s:.1f} s)"
    print(f"{took} with jaxlib {c.versions['jaxlib']}; GB is 1e9 bytes\n")
    _print_memory(report)
    for warning in c.warnings:
        print(f"XLA: {warning}")
    if report.uncounted_loops:
        print(f"nothing tells how often these loops run, all figures count them once: {', '.join(report.uncounted_loops)}")
    if not report.fits:
        print(f"\nsmallest change that should fit: {' '.join(change) if change else 'none found; use more devices or a smaller model'}")
    print()
    _print_buffers(report)
    print()
    _print_collectives(report)
    print()
    _print_roofline(report)


def _print_memory(report: Report) -> None:
    from ridgeline.trainer.reconcile import memory_rows

    c = report.compiled
    rows = [_in_gb(row) for row in memory_rows(report.estimate, c.argument_bytes, c.temp_bytes)]
    rows.append(
        {"what": "runtime (driver, communicators)", "planned": report.reserve_bytes / GB, "explanation": "not part of what is compiled"}
    )
    number = "{:.2f}".format
    columns: list[Column | str] = ["what", Column("planned", format=number), Column("compiled", format=number), "explanation"]
    print_table(columns, rows, title="memory per device, GB")
    needed = (c.peak_bytes + report.reserve_bytes) / GB
    verdict = "fits" if report.fits else f"DOES NOT FIT: {needed - report.capacity_bytes / GB:.2f} GB too much"
    print(f"needs {needed:.2f} GB of {report.capacity_bytes / GB:.2f} GB that may be used: {verdict}")


def _in_gb(row: dict[str, Any]) -> dict[str, object]:
    return row | {"planned": row["planned_bytes"] / GB, "compiled": row["compiled_bytes"] / GB}


def _print_buffers(report: Report) -> None:
    from ridgeline.trainer.aot.report import buffer_json

    rows = [buffer_json(buffer) | {"gb": buffer.bytes / GB} for buffer in report.buffers[:12]]
    columns = [Column("gb", "GB", "{:.3f}".format), Column("copies"), Column("shape"), Column("what"), Column("source")]
    print_table(columns, rows, title="what fills the memory at its fullest moment")


def _print_collectives(report: Report) -> None:
    from ridgeline.trainer.reconcile import traffic_rows

    rows = [_in_gb(row) | {"axes": ",".join(row["axes"])} for row in traffic_rows(report.traffic, report.collectives)]
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
    print(f"{report.overlapped_share:.1%} of the bytes have compute between start and done")
    for heading, found in (("not in the plan", report.unplanned), ("full precision where half would do", report.wide_gathers)):
        for c in found[:8]:
            place = f"{c.source.file}:{c.source.line}" if c.source is not None else c.op_name or c.name
            print(f"{heading}: {c.kind} over {c.axes} of {c.bytes / 1e6:.1f} MB {c.dtype} x {c.count:.0f} at {place}")


def _print_roofline(report: Report) -> None:
    from ridgeline.trainer.aot.report import roofline_json

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
    print_table(columns, rows, title="roofline of the kernels: the least time by FLOPs and bytes at the datasheet's rates")
    for kernel, count in roofline["unknown_flops"].items():
        print(f"not in these times: what {kernel} multiplies, {count:g} times; its kernel does not say")
    print(f"all kernels: at least {roofline['kernels_s'] * 1e3:.1f} ms per step, communication left out")
    step, compute, talk, waited = (roofline[k] * 1e3 for k in ("step_s", "compute_s", "communication_s", "exposed_communication_s"))
    print(f"the schedule at calibrated rates: {step:.1f} ms per step, {compute:.1f} ms of them kernels")
    print(f"of {talk:.1f} ms of communication {waited:.1f} ms are waited for")


def _print_comparison(comparison: dict[str, Any]) -> None:
    rows = [row | {"ms": row["step_s"] * 1e3, "waited": row["exposed_communication_s"] * 1e3} for row in comparison["rows"]]
    columns = [Column("value", "compute.tensor_overlap"), Column("ms", "step, ms", "{:.1f}".format)]
    columns += [Column("waited", "waited, ms", "{:.1f}".format), Column("overlapped_share", "hidden", "{:.1%}".format)]
    columns += [Column("needed_bytes", "GB", lambda size: f"{size / GB:.2f}"), Column("fits")]
    print()
    print_table(columns, rows, title="both ways around the products that tensor cuts, played at calibrated rates")
    print(comparison["advice"])
