"""Print a comparison of two captures."""

from __future__ import annotations

from typing import Any

from ridgeline.cli.tables import Column, print_table
from ridgeline.configs.format import format_seconds
from ridgeline.explain.trace.comparison import CaptureComparison, Difference


def print_captures(compared: CaptureComparison, top: int) -> None:
    """Print the comparison of two captures."""
    base, now = (f"{count} x {unit}" for count, unit in zip(compared.steps, compared.unit, strict=True))
    print(f"{compared.capture} ({now}) against {compared.base} ({base})")
    print(f"{compared.unit[1]} time: {compared.verdict}")
    for note in compared.notes:
        print(f"note: {note}")
    titles = {
        "parts": "median, per device",
        "components": "compute by component",
        "operations": "operations by category, pass and source line",
        "collectives": "communication",
    }
    for key, title in titles.items():
        rows = getattr(compared, key)
        if key != "parts":
            rows = [row for row in rows if row.change_s][:top]
        if rows:
            print()
            print_table(_CHANGES, [_change(row) for row in rows], title=title)


_CHANGES: list[Column | str] = [
    "name",
    Column("base_s", "base", format_seconds, "none"),
    Column("time_s", "now", format_seconds, "none"),
    Column("change_s", "change", lambda value: f"{'-' if value < 0 else '+'}{format_seconds(abs(value))}"),
    Column("ratio", "ratio", "{:.2f}".format),
]


def _change(row: Difference) -> dict[str, Any]:
    ratio = row.time_s / row.base_s if row.time_s is not None and row.base_s else None
    return {"name": row.name, "base_s": row.base_s, "time_s": row.time_s, "change_s": row.change_s, "ratio": ratio}
