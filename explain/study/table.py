"""A study as a table: the columns of the terminal and of study.md, and the Markdown file itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ridgeline.configs.format import format_count, format_seconds

Format = Callable[[Any], str]


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _change(value: float) -> str:
    return f"{value:+.1%}"


def _figure(value: float) -> str:
    return f"{value:,.4g}"


COLUMNS: tuple[tuple[str, str, Format], ...] = (
    ("devices", "devices", str),
    ("nodes", "nodes", str),
    ("mesh", "mesh", str),
    ("batch_size", "batch", str),
    ("tokens_per_s", "tokens/s", format_count),
    ("spread", "+-", _percent),
    ("predicted_tokens_per_s", "planned", format_count),
    ("measured_over_predicted", "of plan", _percent),
    ("speedup", "speed-up", lambda value: f"{value:.2f}"),
    ("efficiency", "efficiency", _percent),
    ("marginal_gain", "gain", _change),
    ("step_s", "step", format_seconds),
    ("time_s", "time s", lambda value: f"{value:,.1f}"),
    ("time_spread", "+-", _percent),
    ("startup_s", "start-up s", lambda value: f"{value:.1f}"),
    ("compile_s", "compile s", lambda value: f"{value:.1f}"),
    ("queue_s", "queue s", lambda value: f"{value:.1f}"),
    ("device_hours", "device-hours", _figure),
    ("usd", "USD", _figure),
    ("tokens_per_device_hour", "tokens/device-hour", format_count),
    ("tokens_per_usd", "tokens/USD", format_count),
    ("failure", "failed because", str),
)
"""Key of a row, heading, and how a value is written."""
_ONLY_WHERE_SOME: frozenset[str] = frozenset(
    {"nodes", "predicted_tokens_per_s", "measured_over_predicted", "usd", "tokens_per_usd", "failure", "queue_s", "spread", "time_spread"}
)
"""Columns that are left out where no row has anything (or nothing but 0) in them."""


def columns(rows: Sequence[Mapping[str, Any]], all_columns: Sequence[tuple[str, str, Format]] = COLUMNS) -> list[tuple[str, str, Format]]:
    """Return the columns that say something about these rows."""
    return [column for column in all_columns if column[0] not in _ONLY_WHERE_SOME or any(row.get(column[0]) for row in rows)]


def markdown(study: Mapping[str, Any], all_columns: Sequence[tuple[str, str, Format]] = COLUMNS, pictures: Sequence[str] = ()) -> str:
    """Return a study as a Markdown page: verdict, table, pictures by file name."""
    shown = columns(study["rows"], all_columns)
    lines = [f"# {study['name']}: {study['kind']} study", ""]
    lines += [f"* {sentence}" for sentence in study["verdict"]]
    lines += ["", f"| {' | '.join(heading for _, heading, _ in shown)} |", f"|{'---|' * len(shown)}"]
    for row in study["rows"]:
        cells = ["n/a" if row.get(key) is None else write(row[key]).replace("|", "\\|") for key, _, write in shown]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"![{name}]({name})" for name in pictures), ""]
    return "\n".join(lines)
