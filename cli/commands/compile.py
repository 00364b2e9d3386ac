"""`ridge compile CONFIG --cluster C --nodes N`: compile the real train step for the GPUs of a cluster, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import FAILED_CHECK, MEMBERS, FiniteRange, config_arguments, json_option
from ridgeline.cli.tables import print_json, write_text

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config
    from ridgeline.trainer.aot.compile import Request
    from ridgeline.trainer.aot.report import Report
GB = 1e9


@click.command("compile")
@config_arguments
@click.option("--cluster", "-c", required=True, help="Cluster: the name of a shipped one, or a YAML file.")
@click.option("--nodes", "-N", type=MEMBERS, default=1, show_default=True, help="Nodes of the run.")
@click.option(
    "--fail-if-memory-above",
    metavar="GB",
    type=FiniteRange(min=0, min_open=True),
    help="Exit with code 1 if a device needs more memory.",
)
@click.option(
    "--xla-flag",
    "xla_flags",
    metavar="--xla_...=V",
    multiple=True,
    help="Further XLA flag, or another value for a flag of the run; repeatable.",
)
@click.option(
    "--optimization-level",
    type=click.Choice(["O0", "O1", "O2", "O3"]),
    help="JAX_OPTIMIZATION_LEVEL; O1 pipelines collectives and needs more memory [default: as in a training run].",
)
@click.option("--calibration", metavar="FILE", help="Calibration file from `ridge calibrate` [default: published rates].")
@click.option(
    "--compare",
    type=click.Choice(["tensor_overlap"]),
    help="Also compile with the other value of this `compute` setting, and report which simulated schedule is shorter.",
)
@click.option("--hlo", type=click.Path(path_type=Path), help="Also write the compiled HLO module to this file.")
@click.option("--heap", is_flag=True, help="Also report planned and compiled memory at each point of the step.")
@click.option("--timeout-s", type=FiniteRange(min=1), default=1800.0, show_default=True, help="Time limit for one compilation.")
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
    heap: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Compile the train step of CONFIG for the GPUs of a cluster, without a GPU, and report what it needs.

    Reports the exact memory per device against its capacity; every collective by kind and mesh axes, whether compute overlaps it, and
    whether the plan contains it; the largest buffers with their parameters, layers and source lines; and a roofline of all kernels. Needs
    the packages of `pip install 'ridgeline[aot]'`. Exit code 1 if the step needs more than --fail-if-memory-above.
    """
    from ridgeline.cli.printing.compile import print_comparison, print_points, print_report
    from ridgeline.configs.cluster import load_cluster
    from ridgeline.configs.load import load
    from ridgeline.configs.mesh import with_mesh
    from ridgeline.launch.environment import run_flags
    from ridgeline.planner.calibration import load_calibration
    from ridgeline.trainer.aot.compile import Request, compile_ahead
    from ridgeline.trainer.aot.report import build_report, bytes_at_points, compare_overlap, other_overlap, report_json, smallest_change

    resolved, place, rates = load(config, overrides).config, load_cluster(cluster).config, load_calibration(calibration)

    def request_for(made: Config) -> Request:
        request = Request.on(made, place, nodes)
        flags, level = run_flags(with_mesh(made, request.devices), place.device, xla_flags)
        return replace(request, xla_flags=flags, optimization_level=optimization_level or level)

    request = request_for(resolved)
    other = None
    if compare is not None:
        value = other_overlap(resolved, request.devices)
        changed = load(config, (*overrides, f"compute.tensor_overlap={value}")).config
        other = request_for(changed)
    compiled = compile_ahead(request, timeout_s=timeout_s)
    report = build_report(request, place, compiled, rates)
    change = None if report.fits else smallest_change(request, place, report)
    if hlo is not None:
        write_text(hlo, compiled.hlo_text)
    points = bytes_at_points(report) if heap else []
    comparison = None
    if other is not None:
        reports: dict[str, Report] = {resolved.compute.tensor_overlap: report}
        reports[other.config.compute.tensor_overlap] = build_report(other, place, compile_ahead(other, timeout_s=timeout_s), rates)
        comparison = compare_overlap(reports)
    if as_json:
        more = {"xla_flags": list(request.xla_flags), "optimization_level": request.optimization_level, "smallest_change": change}
        asked = ({"points": points} if heap else {}) | ({"compared": comparison} if comparison is not None else {})
        print_json(report_json(report) | more | asked)
    else:
        print_report(report, change, resolved.name, place.name, nodes)
        if heap:
            print_points(points)
        if comparison is not None:
            print_comparison(comparison)
    needed = report.needed_bytes / GB
    if fail_if_memory_above is not None and needed > fail_if_memory_above:
        click.echo(f"ridge: {needed:.2f} GB per device exceed the limit of {fail_if_memory_above:g} GB", err=True)
        return FAILED_CHECK
    return 0
