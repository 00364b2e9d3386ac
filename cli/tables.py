"""Output of commands: tables (drawn by rich on a terminal, aligned plain text in a pipe), JSON, and text files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the key in each row, its heading, and the format of its values (JSON has the raw values)."""

    key: str
    heading: str | None = None
    format: Callable[[Any], str] = str

    @property
    def title(self) -> str:
        """The heading, by default the key."""
        return self.heading if self.heading is not None else self.key


def print_table(
    columns: Sequence[Column | str],
    rows: Sequence[Mapping[str, Any]],
    *,
    as_json: bool = False,
    title: str | None = None,
) -> None:
    """Print rows as a table: numbers right-aligned, None as `n/a`. With `as_json`, print a list of objects with all keys of the rows."""
    if as_json:
        print_json([dict(row) for row in rows])
        return
    full = [column if isinstance(column, Column) else Column(column) for column in columns]
    cells = [["n/a" if row.get(c.key) is None else c.format(row[c.key]) for c in full] for row in rows]
    right = [bool(rows) and all(_is_number(row.get(c.key)) for row in rows) for c in full]
    if sys.stdout.isatty():
        _print_rich(full, cells, right, title)
    else:
        print(plain_table([c.title for c in full], cells, right, title))


def print_json(value: Any) -> None:
    """Print any value as indented JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def write_text(path: Path, text: str) -> None:
    """Write a text file. Raises UserError when it cannot be written."""
    from ridgeline.configs.errors import UserError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def plain_table(headings: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool], title: str | None = None) -> str:
    """Return an aligned text table: two spaces between columns, no lines, no trailing spaces."""
    widths = [max(len(heading), *(len(row[i]) for row in cells)) if cells else len(heading) for i, heading in enumerate(headings)]
    lines = [title] if title else []
    for row in (headings, *cells):
        padded = (cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in zip(row, widths, right, strict=True))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _print_rich(columns: Sequence[Column], cells: Sequence[Sequence[str]], right: Sequence[bool], title: str | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column, is_right in zip(columns, right, strict=True):
        table.add_column(column.title, justify="right" if is_right else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
