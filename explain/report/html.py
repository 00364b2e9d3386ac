"""Small pieces of HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence


def text(value: object) -> str:
    """Return a value as text that cannot break the page."""
    return html.escape(str(value))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table; columns of figures are right-aligned, and columns of which nothing is known left out."""
    kept = [i for i in range(len(headings)) if not rows or any(row[i] not in ("", "n/a") for row in rows)]
    headings, rows = [headings[i] for i in kept], [[row[i] for i in kept] for row in rows]
    figures = [bool(rows) and all(_is_figure(row[i]) for row in rows) for i in range(len(headings))]
    kinds = [' class="n"' if is_figure else "" for is_figure in figures]
    head = "".join(f"<th{kind}>{text(heading)}</th>" for kind, heading in zip(kinds, headings, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{text(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>" for row in rows
    )
    top = f"<tr>{head}</tr>" if any(headings) else ""
    return f'<div class="wide"><table>{top}{body}</table></div>'


LONGEST_FIGURE = 24
"""Characters; more is a sentence that begins with a number."""


def _is_figure(cell: str) -> bool:
    return len(cell) <= LONGEST_FIGURE and _begins_with_a_number(cell)


def _begins_with_a_number(cell: str) -> bool:
    return cell in ("", "n/a", "none") or cell[:1].isdigit() or (cell[:1] in "+-" and cell[1:2].isdigit())
