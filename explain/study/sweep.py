"""Build the document of a sweep of one config key: speed, memory, gain per doubling, and the value to choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.configs.errors import UserError
from ridgeline.explain.study.document import FORMAT, Choice, SweepRow, SweepStudy
from ridgeline.explain.study.measured import MeasuredRun
from ridgeline.rundir.noise import median, spread

SweepObjective = Literal["time", "memory"]
FLAT = 0.05
"""Gain in throughput per doubling up to which throughput is flat (the threshold of the diagnosis rule)."""
NEAR = 0.10
"""Objective `memory`: largest loss of throughput for less memory."""
SURE = 0.02
"""Spread that is assumed for single runs."""


@dataclass(frozen=True)
class Value:
    """The runs with one value."""

    value: Any
    runs: Sequence[MeasuredRun] = ()
    failures: Sequence[str] = ()


def sweep_study(name: str, key: str, values: Sequence[Value], objective: SweepObjective, **more: Any) -> SweepStudy:
    """Return the document of a sweep.

    Args:
      name: of the config.
      key: of the config.
      values: in their order; gains are over the previous value.
      objective: time (most tokens/s) or memory.
      more: further keys of the document: devices.

    Raises:
      UserError: no value has a finished run.
    """
    if not any(value.runs for value in values):
        reasons = "; ".join(dict.fromkeys(f"{key}={v.value}: {reason}" for v in values for reason in v.failures))
        raise UserError(f"no value of this sweep ran: {reasons or 'nothing was started'}")
    rows = _rows(values)
    found: SweepStudy = {
        "format": FORMAT,
        "kind": f"sweep of {key}",
        "name": name,
        "key": key,
        "objective": objective,
        **more,  # type: ignore[typeddict-item]
        "rows": rows,
        "flat_from": _flat_from(rows),
        "choice": {objective: chosen for objective in ("time", "memory") if (chosen := _choice(rows, objective)) is not None},
        "verdict": [],
    }
    found["verdict"] = _verdict(found)
    return found


def _rows(values: Sequence[Value]) -> list[SweepRow]:
    rows: list[SweepRow] = []
    before: SweepRow | None = None
    for value in values:
        row: SweepRow = {
            "value": value.value,
            "runs": [str(run.path) for run in value.runs],
            "repeats": len(value.runs),
            "failures": list(value.failures),
            "failure": None if value.runs else "; ".join(dict.fromkeys(value.failures)) or "did not run",
        }
        if value.runs:
            rates = [run.tokens_per_s for run in value.runs]
            peak = max((run.peak_bytes for run in value.runs if run.peak_bytes is not None), default=None)
            row["tokens_per_s"], row["spread"] = median(rates), spread(rates)
            row["step_s"] = median([run.step_s for run in value.runs])
            row["peak_bytes"] = peak
            row["compile_s"] = median([run.ledger.seconds["compile"] for run in value.runs])
            _add_change(row, before)
            before = row
        rows.append(row)
    return rows


def _add_change(row: SweepRow, before: SweepRow | None) -> None:
    """Add the change over the previous value to a row."""
    row["gain"] = row["gain_per_doubling"] = row["memory_change"] = None
    if before is None:
        return
    gain = row["tokens_per_s"] / before["tokens_per_s"] - 1
    doublings = _doublings(before["value"], row["value"])
    row["gain"], row["gain_per_doubling"] = gain, None if doublings is None else (1 + gain) ** (1 / doublings) - 1
    if row["peak_bytes"] and before["peak_bytes"]:
        row["memory_change"] = row["peak_bytes"] / before["peak_bytes"] - 1


def _doublings(old: Any, new: Any) -> float | None:
    """Return the number of doublings from one value to the next; None unless both are numbers and the next is larger."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in (old, new))
    return math.log2(new / old) if numbers and new > old else None


def _flat_from(rows: Sequence[SweepRow]) -> Any:
    """Return the value from which on no doubling gains more than FLAT; None when throughput still grows, or values are not numbers."""
    ran = [row for row in rows if row["failure"] is None]
    flat = None
    for before, row in zip(reversed(ran[:-1]), reversed(ran[1:]), strict=True):
        gain = row["gain_per_doubling"]
        if gain is None or gain > FLAT:
            break
        flat = before["value"]
    return flat


def _choice(rows: Sequence[SweepRow], objective: str) -> Choice | None:
    """Choose a value: the fastest (with least memory among those within the noise), or the least memory near the fastest."""
    ran = [row for row in rows if row["failure"] is None]
    best = max(ran, key=lambda row: row["tokens_per_s"])
    slack = NEAR if objective == "memory" else max(SURE, best["spread"])
    near = [row for row in ran if row["tokens_per_s"] >= best["tokens_per_s"] * (1 - slack)]
    if any(row["peak_bytes"] is None for row in near):
        if objective == "memory":
            return None
        return {"value": best["value"], "why": "most tokens/s"}
    chosen = min(near, key=lambda row: (row["peak_bytes"] or 0, -row["tokens_per_s"]))
    if chosen is best:
        return {"value": best["value"], "why": "most tokens/s" + (", and least memory near that" if objective == "memory" else "")}
    share = chosen["tokens_per_s"] / best["tokens_per_s"]
    saved = 1 - (chosen["peak_bytes"] or 0) / (best["peak_bytes"] or 1)
    return {"value": chosen["value"], "why": f"{share:.0%} of the tokens/s of {best['value']} with {saved:.0%} less memory"}


def _verdict(sweep: SweepStudy) -> list[str]:
    ran = [row for row in sweep["rows"] if row["failure"] is None]
    failed = [f"{sweep['key']}={row['value']} did not run: {row['failure']}" for row in sweep["rows"] if row["failure"] is not None]
    chosen = sweep["choice"].get(sweep["objective"])
    lines = [] if chosen is None else [f"for {sweep['objective']}: {sweep['key']}={chosen['value']}: {chosen['why']}"]
    if chosen is None:
        lines.append("no run reported its memory")
    if sweep["flat_from"] is not None:
        lines.append(f"throughput is flat from {sweep['key']}={sweep['flat_from']} on: a doubling gains at most {FLAT:.0%}")
    elif len(ran) > 1 and (gain := ran[-1]["gain_per_doubling"]) is not None:
        lines.append(f"throughput still grows at {ran[-1]['value']}: {gain:+.0%} per doubling; try larger values")
    if sweep["key"] == "data.batch_size":
        lines.append("beyond the critical batch size a larger batch learns less per token: ridge estimate batch")
    if min(row["repeats"] for row in ran) < 2:
        lines.append(f"one run of some values: differences below about {SURE:.0%} to 10% may be noise (--repeats 3)")
    return [*lines, *failed]
