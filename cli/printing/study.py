"""Print a scaling study or a sweep: its table and its verdict."""

from __future__ import annotations

from pathlib import Path

import click

from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.explain.study.document import FILE, Study, columns, is_ladder


def print_study(study: Study, output: Path | None, *, as_json: bool) -> None:
    """Print a study as a table with its verdict, or as JSON."""
    if as_json:
        print_json(study)
        return
    shown = [Column(key, heading, write) for key, heading, write in columns(study)]
    price = study.get("price_usd")
    money = "" if price is None else f", {price:g} USD per device-hour"
    print_table(shown, study["rows"], title=f"{study['name']}: {study.get('mode', '')} {study['kind']}{money}".replace(":  ", ": "))
    print()
    for sentence in study["verdict"]:
        print(f"* {sentence}")
    if output is not None:
        click.echo(f"\nwritten: {output / FILE}, study.md and plots; next: ridge {'report' if is_ladder(study) else 'diagnose'} {output}")
