"""`ridge report RUN [RUN...]`: one page about a run, or about several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ridgeline.configs.errors import UserError


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="HTML file. Default: report.html in the first RUN.")
@click.option("--cluster", help="Cluster file or name: its price per device and hour. Default: the cluster each RUN was submitted to.")
@click.option("--price", "price_usd", type=click.FloatRange(min=0), help="Price of one device for an hour, in USD; wins over --cluster.")
def report(runs: tuple[Path, ...], output: Path | None, cluster: str | None, price_usd: float | None) -> None:
    """Write one self-contained HTML page about RUN: verdict, curves, ledgers with money, timeline, diagnosis, configuration.

    Several RUNs are compared with the first: ledgers, step times under a noise model, settings; at several scales or batch sizes they are
    a study. The directory of `ridge scale` or `ridge bench sweep` stands for a run of each scale or value.
    """
    from ridgeline.cli.commands.goodput import price_of
    from ridgeline.explain.report.page import read_run, render

    output = runs[0] / "report.html" if output is None else output
    runs, study = _with_study(runs)
    labels = _labels(runs)
    prices = [price_of(cluster, run) if price_usd is None else price_usd for run in runs]
    page = render([read_run(run, label, price_usd=price) for run, label, price in zip(runs, labels, prices, strict=True)], study)
    try:
        output.write_text(page)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
    click.echo(f"wrote {output}")


def _with_study(runs: tuple[Path, ...]) -> tuple[tuple[Path, ...], dict[str, Any] | None]:
    """Return the runs of a study's directory, one of each row, and the study; other runs as they are."""
    from ridgeline.explain.diagnosis.several import read_study, study_runs

    if len(runs) > 1 or study_runs(runs[0]) is None:
        return runs, None
    study = read_study(runs[0])
    there = {run.name: run for run in study_runs(runs[0]) or ()}
    return tuple(there[Path(row["runs"][0]).name] for row in study["rows"] if row["runs"]), study


def _labels(runs: tuple[Path, ...]) -> list[str | None]:
    """Name several runs by their directories, and one by its own name. The same run twice is refused."""
    if len(runs) == 1:
        return [None]
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError("a run is named twice: compare different run directories")
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run) for run, name in zip(runs, names, strict=True)]
