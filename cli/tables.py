"""Output of commands: tables (aligned text, which fits a terminal without breaking words), JSON, and text files."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the key in each row, its heading, and the format of its values (JSON has the raw values)."""

    key: str
    heading: str | None = None
    format: Callable[[Any], str] = str
    missing: str = "n/a"
    """Shown for None."""

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
    """Print rows as a table: numbers right-aligned. With `as_json`, print a list of objects with all keys of the rows."""
    if as_json:
        print_json([dict(row) for row in rows])
        return
    full = [column if isinstance(column, Column) else Column(column) for column in columns]
    cells = [[c.missing if row.get(c.key) is None else c.format(row[c.key]) for c in full] for row in rows]
    right = [bool(rows) and all(_is_number(row.get(c.key)) for row in rows) for c in full]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(text_table([c.title for c in full], cells, right, title, width))


def print_json(value: Any) -> None:
    """Print any value as indented JSON; non-finite numbers are the strings "NaN", "Infinity" and "-Infinity"."""
    from ridgeline.rundir.jsonl import finite_json

    print(json.dumps(finite_json(value), indent=2, ensure_ascii=False, default=str))


def write_text(path: Path, text: str) -> None:
    """Write a text file. Raises UserError when it cannot be written."""
    from ridgeline.configs.errors import UserError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def text_table(
    headings: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool], title: str | None = None, width: int | None = None
) -> str:
    """Return an aligned text table: two spaces between columns, no lines, no trailing spaces.

    A table wider than `width` wraps its texts between words; one that is still wider is printed as several tables, each with the first
    column. A single word that is wider stays whole. `width` None: neither.
    """
    columns = [[heading, *(row[i] for row in cells)] for i, heading in enumerate(headings)]
    parts = [list(range(len(columns)))] if width is None else _parts([_least_width(column) for column in columns], width)
    blocks = [_block([columns[i] for i in part], [right[i] for i in part], width) for part in parts]
    above = [] if not title else [title] if width is None else textwrap.wrap(title, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*above, "\n\n".join(blocks)])


def _least_width(column: Sequence[str]) -> int:
    return max((len(word) for cell in column for word in cell.split()), default=0)


def _parts(least: Sequence[int], width: int) -> list[list[int]]:
    """Divide columns of these least widths into tables that fit, each beginning with the first column."""
    parts: list[list[int]] = [[0]] if least else []
    for index in range(1, len(least)):
        if len(parts[-1]) > 1 and sum(least[i] + len(GAP) for i in parts[-1]) + least[index] > width:
            parts.append([0])
        parts[-1].append(index)
    return parts


def _block(columns: Sequence[Sequence[str]], right: Sequence[bool], width: int | None) -> str:
    widths = [max(map(len, column)) for column in columns]
    if width is not None:
        least = [_least_width(column) for column in columns]
        while sum(widths) + len(GAP) * (len(widths) - 1) > width and widths != least:
            widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
            widths[widest] -= 1
    lines = []
    for number, row in enumerate(zip(*columns, strict=True)):
        wrapped = [
            textwrap.wrap(cell, size, break_long_words=False, break_on_hyphens=False) if len(cell) > size else [cell]
            for cell, size in zip(row, widths, strict=True)
        ]
        height = max(map(len, wrapped))
        for k in range(height):
            texts = [_line(cell, k - height + len(cell) if number == 0 else k) for cell in wrapped]  # headings stand on their last line
            padded = (text.rjust(w) if is_right else text.ljust(w) for text, w, is_right in zip(texts, widths, right, strict=True))
            lines.append(GAP.join(padded).rstrip())
    return "\n".join(lines)


def _line(lines: Sequence[str], index: int) -> str:
    return lines[index] if 0 <= index < len(lines) else ""


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
