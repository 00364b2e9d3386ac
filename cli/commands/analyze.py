"""`ridge analyze RUN_OR_PROFILE`: where the time of a training step goes, from a captured profile."""

from __future__ import annotations

from pathlib import Path

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.tables import print_json
from ridgeline.explain.trace.analysis import analyze
from ridgeline.explain.trace.capture import find_capture
from ridgeline.explain.trace.load import load_profile
from ridgeline.rundir.analysis import to_json


@click.command("analyze")
@click.argument("source", metavar="RUN_OR_PROFILE", type=click.Path(path_type=Path))
@click.option("--capture", help="Capture of the run, by the name of its directory [default: the newest].")
@click.option("--device", "device_name", help="Device in the hardware catalog, for the ceilings [default: the profile's device].")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Calibration file of that machine, from `ridge calibrate` [default: published rates].",
)
@click.option("--cluster", help="Cluster file or name, for the planned bandwidth of collectives [default: the run's cluster].")
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, help="Number of operations to list.")
@click.option("--save", is_flag=True, help="Also write analysis.json beside the profile, and figures for TensorBoard, as a run does.")
@json_option
def analyze_command(
    source: Path,
    capture: str | None,
    device_name: str | None,
    cluster: str | None,
    calibration: Path | None,
    top: int,
    save: bool,
    as_json: bool,
) -> None:
    """Account for the time of the steps in a captured profile.

    RUN_OR_PROFILE is a run directory, the directory of one capture, or an .xplane.pb file (a directory may have one file per host).
    The parts of a step sum to its time: compute, exposed communication, exposed copies, idle. Operations are assigned to model components
    through the compiled HLO saved with the profile.
    """
    from ridgeline.cli.printing.analysis import print_analysis
    from ridgeline.planner.hardware import hardware

    found = find_capture(source, capture)
    device = None if device_name is None else hardware(device_name)
    analysis = analyze(load_profile(found, hardware=device, cluster=cluster, calibration=calibration))
    if save:
        from ridgeline.explain.trace.publish import publish

        publish(found, analysis)
    report = to_json(analysis, top=max(top, 1))
    if as_json:
        print_json(report)
        return
    print_analysis(report, top)
