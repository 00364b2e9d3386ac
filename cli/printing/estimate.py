"""Print the results of `ridge estimate`: values with units, and with --explain the formula and the source of each."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.tables import Column, print_json, print_table

if TYPE_CHECKING:
    from ridgeline.planner.formulas import Formula

Function = TypeVar("Function", bound=Callable[..., object])


DEFINITION = "by definition"
"""Source of a result that is plain arithmetic on other results."""


@dataclass(frozen=True)
class Result:
    """One named value."""

    key: str
    """Key in the JSON object; part of the command's interface."""
    value: Any
    unit: str = ""
    """s, bytes, bytes/s, FLOP, FLOP/s, share, USD, h, kWh, ... or empty."""
    formula: str = ""
    source: str = ""


def formula_results(formulas: Sequence[Formula]) -> list[Result]:
    """Return the results of formulas. The formula of a constant is its meaning."""
    return [Result(f.name, f.value, f.unit, f.text or f.meaning, f.meaning if f.text else "") for f in formulas]


def print_symbols(symbols: Sequence[Formula]) -> None:
    """Print what the symbols of formulas are."""
    rows = [{"name": s.name, "value": format_value(s.value, s.unit), "meaning": s.meaning} for s in symbols]
    print_table([Column("name", "symbol"), "value", Column("meaning")], rows)


def result_options(function: Function) -> Function:
    """Add `--explain` and `--json` as the parameters `explain` and `as_json`."""
    function = click.option("--explain", is_flag=True, help="Also print the formula and the source of each result.")(function)
    return json_option(function)


def print_results(results: Sequence[Result], *, as_json: bool, explain: bool, more: Mapping[str, Any] | None = None) -> None:
    """Print results as `key  value unit`, or as one JSON object.

    `more`: further keys of the JSON object, not printed as text. With `explain`, the JSON object has the key `explain`.
    """
    if as_json:
        value: dict[str, Any] = {result.key: result.value for result in results} | dict(more or {})
        if explain:
            value["explain"] = {a.key: {"formula": a.formula, "source": a.source or DEFINITION} for a in results if a.formula}
        print_json(value)
        return
    width = max(len(result.key) for result in results)
    for result in results:
        print(f"{result.key.ljust(width)}  {format_value(result.value, result.unit)}")
        if explain and result.formula:
            for line in (f"= {result.formula}", f"[{result.source or DEFINITION}]"):
                print(textwrap.fill(line, 120, initial_indent="    ", subsequent_indent="      ", break_long_words=False))


def format_value(value: Any, unit: str) -> str:
    """Format a value with its unit."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(format_value(item, unit) for item in value)
    if not isinstance(value, (int, float)):
        return str(value)
    if unit == "share":
        return f"{value:.2%}"
    if unit == "bytes":
        return f"{value / 1e9:,.3f} GB ({value:,.0f} bytes)"
    if unit == "bytes/s":
        return f"{value / 1e9:,.2f} GB/s"
    if unit == "FLOP/s":
        return f"{value / 1e12:,.1f} TFLOP/s"
    if unit == "USD":
        return f"${value:,.2f}"
    if unit == "s":
        return _seconds(value)
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.6g}" if value < 1e15 else f"{value:.6g}"
    return f"{number} {unit}".rstrip()


def _seconds(value: float) -> str:
    for size, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{value:,.0f} s ({value / size:,.2f} {name})"
    if value >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.3f} ms" if value >= 1e-3 else f"{value * 1e6:.2f} us"
