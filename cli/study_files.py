"""The files of a study: study.json, study.md and a picture each, in its directory; and the table on the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.configs.errors import UserError
from ridgeline.explain.study.table import COLUMNS, Format, columns, markdown

FILE = "study.json"
ALONE = '<svg style="background:#fff;font:12px system-ui,sans-serif" '
"""What a page says in its style sheet, for a picture that is a file of its own."""


def write_study(
    study: Mapping[str, Any], output: Path, pictures: Mapping[str, str], all_columns: Sequence[tuple[str, str, Format]]
) -> None:
    """Write a study into its directory. Raises UserError when that cannot be done."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            (output / f"{name}.svg").write_text(picture.replace("<svg ", ALONE, 1), encoding="utf-8")
        (output / "study.md").write_text(markdown(study, all_columns, [f"{name}.svg" for name in pictures]), encoding="utf-8")
        partial = output / f".{FILE}"
        partial.write_text(json.dumps(study, indent=1) + "\n", encoding="utf-8")
        partial.replace(output / FILE)
    except OSError as error:
        raise UserError(f"{output}: the study cannot be written: {error.strerror}") from error


def show_study(
    study: Mapping[str, Any], output: Path | None, *, as_json: bool, all_columns: Sequence[tuple[str, str, Format]] = COLUMNS
) -> None:
    """Print a study: its table and what it says, or JSON."""
    if as_json:
        print_json(study)
        return
    shown = [Column(key, heading, write) for key, heading, write in columns(study["rows"], all_columns)]
    price = study.get("price_usd")
    money = "" if price is None else f", {price:g} USD per device and hour"
    print_table(shown, study["rows"], title=f"{study['name']}: {study.get('mode', '')} {study['kind']}{money}".replace(":  ", ": "))
    print()
    for sentence in study["verdict"]:
        print(f"* {sentence}")
    if output is not None:
        click.echo(f"\nwritten: {output / FILE}, study.md and pictures beside it; next: ridge diagnose {output}")
