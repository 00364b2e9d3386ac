"""`ridge report RUN [RUN...]`: an HTML page about a run or a captured profile, or a comparison of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import FiniteRange
from ridgeline.cli.tables import write_text
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.explain.study.document import Study


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="HTML file [default: report.html in or beside the first RUN].")
@click.option("--cluster", help="Cluster file or name, for the price per device-hour [default: the cluster each RUN was submitted to].")
@click.option("--price", "price_usd", type=FiniteRange(min=0), help="Price of one device per hour in USD; overrides --cluster.")
def report(runs: tuple[Path, ...], output: Path | None, cluster: str | None, price_usd: float | None) -> None:
    """Write a self-contained HTML page about RUN: verdict, curves, time and cost, timeline, diagnosis, configuration.

    RUN may also be a captured profile of any JAX program (an .xplane.pb file or its directory): the page shows its steps and bottlenecks.

    Several RUNs are compared with the first: time and cost, step times under a noise model, settings. Runs at several scales or batch sizes
    are shown as a study. The directory of `ridge scale` or `ridge bench sweep` stands for one run of each scale or value.
    """
    from ridgeline.explain.diagnosis.captured import capture_facts, findings, is_capture
    from ridgeline.explain.report.page import render, render_capture
    from ridgeline.explain.report.run import read_run
    from ridgeline.rundir.directory import RunDir

    output = (runs[0].parent if runs[0].is_file() else runs[0]) / "report.html" if output is None else output
    if len(runs) == 1 and is_capture(runs[0]):
        facts = capture_facts(runs[0], cluster=cluster)
        write_text(output, render_capture(facts, findings(facts)))
        click.echo(f"wrote {output}")
        return
    runs, study = _with_study(runs)
    labels = _labels(runs)
    prices = [RunDir(run).price_on(cluster) if price_usd is None else price_usd for run in runs]
    page = render([read_run(run, label, price_usd=price) for run, label, price in zip(runs, labels, prices, strict=True)], study)
    write_text(output, page)
    click.echo(f"wrote {output}")


def _with_study(runs: tuple[Path, ...]) -> tuple[tuple[Path, ...], Study | None]:
    """Return the runs of a study's directory, one of each row, and the study; other runs as they are."""
    from ridgeline.explain.study.document import read_study, study_runs

    study = read_study(runs[0]) if len(runs) == 1 else None
    if study is None:
        return runs, None
    there = {run.name: run for run in study_runs(study, runs[0])}
    return tuple(there[Path(row["runs"][0]).name] for row in study["rows"] if row["runs"]), study


def _labels(runs: tuple[Path, ...]) -> list[str | None]:
    """Name several runs by their directories, and one by its own name. The same run twice is refused."""
    if len(runs) == 1:
        return [None]
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError("a run is given twice; give different run directories")
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run) for run, name in zip(runs, names, strict=True)]
