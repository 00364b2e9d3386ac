"""The HTML that all parts of the report share: the frame with the style sheet, tables, escaped text."""

from __future__ import annotations

import html
from collections.abc import Sequence

LONGEST_FIGURE = 24
"""Characters; a longer cell that begins with a number is a sentence."""


def document(title: str, body: Sequence[str]) -> str:
    """Return a whole page."""
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return f"{head}<title>{text(title)}</title><style>{STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"


def text(value: object) -> str:
    """Return a value as escaped text."""
    return html.escape(str(value))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. Columns of figures are right-aligned; columns without any known value are left out."""
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


def folded(summary: str, body: Sequence[str]) -> list[str]:
    """Return HTML that is shown when its summary is clicked; the summary is a text, the body HTML."""
    return [f'<details><summary>{text(summary)}</summary><div class="wide">', *body, "</div></details>"]


def _is_figure(cell: str) -> bool:
    return len(cell) <= LONGEST_FIGURE and _begins_with_a_number(cell)


def _begins_with_a_number(cell: str) -> bool:
    return cell in ("", "n/a", "none") or cell[:1].isdigit() or (cell[:1] in "+-" and cell[1:2].isdigit())


STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5c6670; --line: #d8dde2; --paper: #fff; --card: #f6f8fa; --mark: #0b6e4f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7eb; --soft: #9aa5b0; --line: #333b43; --paper: #14181c; --card: #1c2228; --mark: #58c99b; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 1180px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 .2rem; font-size: 1.6rem; } h2 { margin: 2rem 0 .6rem; font-size: 1.15rem; border-bottom: 1px solid var(--line); }
h1:not(:first-child) { margin-top: 3rem; } h3 { margin: 1.3rem 0 .4rem; font-size: 1rem; }
p.lead { font-size: 1.05rem; } .soft { color: var(--soft); } .mark { color: var(--mark); font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: .6rem; margin: 1rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem; }
.card b { display: block; font-size: 1.2rem; } .card span { color: var(--soft); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: .8rem; }
.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; background: transparent; } .wide svg { max-width: none; }
svg.gantt { background: transparent; }
svg text, svg.gantt text { fill: var(--ink); } svg .roof { stroke: var(--ink); stroke-width: 2; } svg .grid { stroke: var(--line); }
table { border-collapse: collapse; font-size: .92rem; margin-bottom: .8rem; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word; }
th { white-space: nowrap; } p, li, dd, summary { overflow-wrap: anywhere; }
.finding { border-left: 3px solid var(--mark); padding-left: .9rem; margin: 1rem 0; } .finding h3 { margin-top: 0; }
.finding h3 span { font-weight: 400; color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem .9rem; margin: .3rem 0; }
dt { color: var(--soft); } dd { margin: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { overflow-x: auto; background: var(--card); padding: .7rem; font-size: .82rem; }
details { margin: .4rem 0; } summary { cursor: pointer; }
@media (max-width: 600px) {
  td:not(.n) { min-width: 7.5rem; } td:not(.n):last-child:not(:nth-child(-n+2)) { min-width: 16rem; }
  dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; }
}
@media print {
  html { font-size: 11px; }
  body { max-width: none; padding: 0; font-size: 11px; }
  .wide { overflow: visible; } .wide svg { max-width: 100%; } th, td { overflow-wrap: anywhere; white-space: normal; padding-right: .5rem; }
  .charts { grid-template-columns: 1fr 1fr; }
  details { display: none; } h2, h3 { break-after: avoid; } .card, .finding, svg, tr { break-inside: avoid; }
}
"""
"""Style sheet: light and dark, narrow and wide, screen and print."""
