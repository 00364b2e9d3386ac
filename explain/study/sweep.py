"""A sweep of one setting (batch size, remat policy, any key) as a document: speed, memory, gain per doubling, which value to choose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.configs.errors import UserError
from ridgeline.configs.format import format_count, format_seconds
from ridgeline.explain.study.measured import MeasuredRun
from ridgeline.explain.study.table import Format
from ridgeline.rundir.noise import median, spread

SweepObjective = Literal["time", "memory"]
FORMAT = 1
FLAT = 0.05
"""Gain in throughput of a doubled value below which it has flattened (the diagnosis rule's threshold)."""
NEAR = 0.10
"""Loss of throughput that less memory may cost (`memory`)."""
SURE = 0.02
"""Scatter that is assumed where nothing was repeated."""
GIB = 2**30
COLUMNS: tuple[tuple[str, str, Format], ...] = (
    ("value", "value", str),
    ("tokens_per_s", "tokens/s", format_count),
    ("spread", "+-", lambda value: f"{value:.1%}"),
    ("step_s", "step", format_seconds),
    ("gain", "gain", lambda value: f"{value:+.1%}"),
    ("gain_per_doubling", "per doubling", lambda value: f"{value:+.1%}"),
    ("peak_bytes", "memory GiB", lambda value: f"{value / GIB:.3f}"),
    ("memory_change", "memory", lambda value: f"{value:+.1%}"),
    ("compile_s", "compile s", lambda value: f"{value:.1f}"),
    ("failure", "failed because", str),
)


@dataclass(frozen=True)
class Value:
    """What was tried with one value."""

    value: Any
    runs: Sequence[MeasuredRun] = ()
    failures: Sequence[str] = ()


def sweep_document(name: str, key: str, values: Sequence[Value], objective: SweepObjective, **more: Any) -> dict[str, Any]:
    """Return the sweep as plain values. Values are in the order given: gains are over the one before.

    Raises UserError when no value ran at all.
    """
    if not any(value.runs for value in values):
        reasons = "; ".join(dict.fromkeys(f"{key}={v.value}: {reason}" for v in values for reason in v.failures))
        raise UserError(f"no value of this sweep ran: {reasons or 'nothing was started'}")
    rows = _rows(values)
    made: dict[str, Any] = {
        "format": FORMAT,
        "kind": f"sweep of {key}",
        "name": name,
        "key": key,
        "objective": objective,
        **more,
        "rows": rows,
        "flat_from": _flat_from(rows),
        "choice": {objective: chosen for objective in ("time", "memory") if (chosen := _choice(rows, objective)) is not None},
    }
    return made | {"verdict": _verdict(made)}


def _rows(values: Sequence[Value]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    before: dict[str, Any] | None = None
    for value in values:
        row: dict[str, Any] = {
            "value": value.value,
            "runs": [str(run.path) for run in value.runs],
            "repeats": len(value.runs),
            "failures": list(value.failures),
            "failure": None if value.runs else "; ".join(dict.fromkeys(value.failures)) or "did not run",
        }
        if value.runs:
            rates = [run.tokens_per_s for run in value.runs]
            peak = max((run.peak_bytes for run in value.runs if run.peak_bytes is not None), default=None)
            row |= {
                "tokens_per_s": median(rates),
                "spread": spread(rates),
                "step_s": median([run.step_s for run in value.runs]),
                "peak_bytes": peak,
                "compile_s": median([run.ledger.seconds["compile"] for run in value.runs]),
            }
            row |= _against(row, before)
            before = row
        rows.append(row)
    return rows


def _against(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the change over the value before."""
    if before is None:
        return {"gain": None, "gain_per_doubling": None, "memory_change": None}
    gain = row["tokens_per_s"] / before["tokens_per_s"] - 1
    doublings = _doublings(before["value"], row["value"])
    memory = None if not row["peak_bytes"] or not before["peak_bytes"] else row["peak_bytes"] / before["peak_bytes"] - 1
    return {"gain": gain, "gain_per_doubling": None if doublings is None else (1 + gain) ** (1 / doublings) - 1, "memory_change": memory}


def _doublings(old: Any, new: Any) -> float | None:
    """Return how often a number was doubled; None for what is no growing number."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in (old, new))
    return math.log2(new / old) if numbers and new > old else None


def _flat_from(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value from which on no doubling gains more than FLAT; None when it still grows, or values are no numbers."""
    ran = [row for row in rows if row["failure"] is None]
    flat = None
    for before, row in zip(reversed(ran[:-1]), reversed(ran[1:]), strict=True):
        if row["gain_per_doubling"] is None or row["gain_per_doubling"] > FLAT:
            break
        flat = before["value"]
    return flat


def _choice(rows: Sequence[Mapping[str, Any]], objective: str) -> dict[str, Any] | None:
    """Choose a value: the fastest (of those nobody can tell apart, the one with least memory), or the least memory near the fastest."""
    ran = [row for row in rows if row["failure"] is None]
    best = max(ran, key=lambda row: row["tokens_per_s"])
    slack = NEAR if objective == "memory" else max(SURE, best["spread"])
    near = [row for row in ran if row["tokens_per_s"] >= best["tokens_per_s"] * (1 - slack)]
    if any(row["peak_bytes"] is None for row in near):
        if objective == "memory":
            return None
        return {"value": best["value"], "why": "most tokens/s"}
    chosen = min(near, key=lambda row: (row["peak_bytes"], -row["tokens_per_s"]))
    if chosen is best:
        return {"value": best["value"], "why": "most tokens/s" + (", and least memory near that" if objective == "memory" else "")}
    share = chosen["tokens_per_s"] / best["tokens_per_s"]
    saved = 1 - chosen["peak_bytes"] / best["peak_bytes"]
    return {"value": chosen["value"], "why": f"{share:.0%} of the tokens/s of {best['value']} with {saved:.0%} less memory"}


def _verdict(sweep: Mapping[str, Any]) -> list[str]:
    ran = [row for row in sweep["rows"] if row["failure"] is None]
    failed = [f"{sweep['key']}={row['value']} did not run: {row['failure']}" for row in sweep["rows"] if row["failure"] is not None]
    chosen = sweep["choice"].get(sweep["objective"])
    lines = [] if chosen is None else [f"for {sweep['objective']}: {sweep['key']}={chosen['value']}: {chosen['why']}"]
    if chosen is None:
        lines.append("memory is not known here: no run reported any")
    if sweep["flat_from"] is not None:
        lines.append(f"throughput is flat from {sweep['key']}={sweep['flat_from']} on: a doubling gains at most {FLAT:.0%}")
    elif len(ran) > 1 and ran[-1]["gain_per_doubling"] is not None:
        lines.append(f"throughput still grows at {ran[-1]['value']}: {ran[-1]['gain_per_doubling']:+.0%} per doubling; try larger values")
    if sweep["key"] == "data.batch_size":
        lines.append("a larger batch learns less per token beyond the critical one: ridge estimate batch")
    if min(row["repeats"] for row in ran) < 2:
        lines.append(f"one run of some values: differences below about {SURE:.0%} to 10% may be noise (--repeats 3)")
    return [*lines, *failed]
