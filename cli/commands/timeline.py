"""`ridge timeline RUN`: a run's phases as a picture or a trace."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ridgeline.cli.commands.goodput import read_run
from ridgeline.configs.errors import UserError

FORMATS = (".svg", ".html", ".json")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="FILE.svg or FILE.html: a picture; FILE.json: a trace for ui.perfetto.dev. Default: timeline.html in RUN.",
)
def timeline(run: Path, output: Path | None) -> None:
    """Draw the execution flow of RUN: launch, init, restore, compile, training, evaluations, saves, restarts, by process."""
    from ridgeline.explain.gantt import gantt_html, gantt_svg, perfetto_trace
    from ridgeline.rundir.events import event_files, read_events

    output = run / "timeline.html" if output is None else output
    if output.suffix not in FORMATS:
        raise UserError(f"--output '{output}' must end in {', '.join(FORMATS)}")
    record = read_run(run)
    events = read_events(event_files(run))
    title = f"{record['name']}: {len(record['starts'])} start(s)"
    if output.suffix == ".json":
        text = json.dumps(perfetto_trace(events))
    else:
        text = (gantt_svg if output.suffix == ".svg" else gantt_html)(events, title)
    try:
        output.write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
    click.echo(f"wrote {output}")
