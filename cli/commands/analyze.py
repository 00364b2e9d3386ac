"""`ridge analyze RUN_OR_PROFILE`: where the time of a training step goes, from a captured profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from ridgeline.cli.options import Int32Range, json_option
from ridgeline.cli.tables import print_json
from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import Capture, find_capture
from ridgeline.explain.trace.load import Profile, load_profile
from ridgeline.rundir.analysis import Analysis, to_json


@click.command("analyze")
@click.argument("source", metavar="RUN_OR_PROFILE", type=click.Path(path_type=Path))
@click.option("--capture", help="Capture of the run, by the name of its directory [default: the newest].")
@click.option("--annotation", help="Step annotation to use [default: the one that launches the main program].")
@click.option(
    "--warm-up",
    type=Int32Range(min=0),
    help="Leading steps to leave out [default: those that take more than twice the median of the steps after them].",
)
@click.option("--device", "device_name", help="Device in the hardware catalog, for the ceilings [default: the profile's device].")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Calibration file of that machine, from `ridge calibrate` [default: published rates].",
)
@click.option("--cluster", help="Cluster file or name, for the planned bandwidth of collectives [default: the run's cluster].")
@click.option("--top", type=Int32Range(min=0), default=10, show_default=True, help="Number of operations to list.")
@click.option("--save", is_flag=True, help="Also write analysis.json beside the profile, and figures for TensorBoard, as a run does.")
@click.option("--against", type=click.Path(path_type=Path), help="Base to compare with: another run or profile.")
@click.option("--tables", type=click.Path(path_type=Path), help="Directory to write the full tables to, one file per table.")
@click.option("--format", "form", type=click.Choice(["csv", "parquet"]), default="csv", show_default=True, help="Format of --tables.")
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path),
    help="File for a trace of devices, host threads and phases of the run, for ui.perfetto.dev (.json or .json.gz).",
)
@json_option
def analyze_command(
    source: Path,
    capture: str | None,
    annotation: str | None,
    warm_up: int | None,
    device_name: str | None,
    cluster: str | None,
    calibration: Path | None,
    top: int,
    save: bool,
    against: Path | None,
    tables: Path | None,
    form: Literal["csv", "parquet"],
    perfetto: Path | None,
    as_json: bool,
) -> None:
    """Account for the time of the steps in a captured profile.

    RUN_OR_PROFILE is a run directory, the directory of one capture, or an .xplane.pb file (a directory may have one file per host).
    The parts of a step sum to its time: compute, exposed communication, exposed copies, idle. Without step annotations the executions of
    the main program are the steps; warm-up is left out. Operations are assigned to model components through the compiled HLO of the
    profile.
    """
    from ridgeline.cli.printing.analysis import print_analysis
    from ridgeline.planner.hardware import hardware

    found = find_capture(source, capture)
    device = None if device_name is None else hardware(device_name)

    def analyzed(of: Capture) -> tuple[Profile, Analysis]:
        loaded = load_profile(of, hardware=device, cluster=cluster, calibration=calibration)
        return loaded, analyze(loaded, annotation=annotation, warm_up=warm_up)

    profile, analysis = analyzed(found)
    if save:
        from ridgeline.explain.trace.publish import publish

        publish(found, analysis)
    if tables is not None:
        from ridgeline.explain.trace.tables import write_tables

        _note_written(write_tables(analysis, tables, form), as_json)
    if perfetto is not None:
        from ridgeline.explain.trace.perfetto import write_perfetto

        write_perfetto(profile, analysis, perfetto)
        _note_written([perfetto], as_json)
    if against is not None:
        from ridgeline.cli.printing.captures import print_captures
        from ridgeline.explain.trace.comparison import compare_captures

        _, base = analyzed(find_capture(against))
        compared = compare_captures(base, analysis)
        if as_json:
            print_json(dataclasses.asdict(compared))
        else:
            print_captures(compared, top)
        return
    report = to_json(analysis, top=max(top, 1))
    if as_json:
        print_json(report)
        return
    print_analysis(report, top)


def _note_written(files: Sequence[Path], as_json: bool) -> None:
    """Name the files, on stderr where stdout is JSON."""
    for file in files:
        click.echo(f"wrote {file}", err=as_json)
