"""`ridge timeline RUN`: the phases of a run as a picture or a trace."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ridgeline.cli.tables import write_text
from ridgeline.configs.errors import UserError
from ridgeline.configs.format import plural

FORMATS = (".svg", ".html", ".json")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="FILE.svg or FILE.html: a picture; FILE.json: a trace for ui.perfetto.dev [default: timeline.html in RUN].",
)
def timeline(run: Path, output: Path | None) -> None:
    """Draw the phases of RUN per process: launch, initialization, restore, compilation, training, evaluation, saves, restarts."""
    from ridgeline.explain.gantt import gantt_html, gantt_svg, perfetto_trace
    from ridgeline.rundir.directory import RunDir

    output = run / "timeline.html" if output is None else output
    if output.suffix not in FORMATS:
        raise UserError(f"--output '{output}' must end in {', '.join(FORMATS)}")
    directory = RunDir.open(run)
    events = directory.require_events()
    title = f"{directory.name}: {plural(len(directory.record.starts), 'start')}"
    if output.suffix == ".json":
        text = json.dumps(perfetto_trace(events))
    else:
        text = (gantt_svg if output.suffix == ".svg" else gantt_html)(events, title)
    write_text(output, text)
    click.echo(f"wrote {output}")
