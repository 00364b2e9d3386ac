"""`ridge debug`: find the cause of what went wrong in a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from ridgeline.cli.options import Int32Range, json_option, mesh_argument


@click.command("nan")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@mesh_argument
@click.option("--step", type=Int32Range(min=1), help="Step to examine [default: the first whose loss or gradient was not finite].")
@json_option
def nan(run: Path, overrides: tuple[str, ...], step: int | None, as_json: bool) -> None:
    """Find the layer and the operation that first gave NaN or infinity in a step of RUN.

    The newest checkpoint before the step is restored, the steps up to it are taken again on the same data, and the step is run operation
    by operation. It uses the mesh of the run's config, or the largest smaller mesh that the machine has; mesh.AXIS=SIZE chooses another.
    """
    from ridgeline import api
    from ridgeline.cli.tables import print_json

    found = api.find_nan(run, step, overrides=overrides, log=lambda line: click.echo(line, err=True))
    if as_json:
        way = None if found.origin is None else "backward" if found.origin.backward else "forward"
        print_json({**dataclasses.asdict(found), "pass": way, "found": bool(found.what)})
    else:
        click.echo(found.describe())
