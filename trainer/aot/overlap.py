"""Which way around the products that `tensor` cuts is faster, `compute.tensor_overlap: gather` or `ring`, by both compiled schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.mesh import resolve_sizes
from ridgeline.configs.schema import Config

if TYPE_CHECKING:
    from ridgeline.trainer.aot.report import Report

EQUAL = 0.02
"""Played steps that differ by less than this share say nothing: the rates are not that exact."""


def other_overlap(config: Config, devices: int) -> str:
    """Return the value of compute.tensor_overlap that the config does not have. Raises UserError where nothing travels over `tensor`."""
    if resolve_sizes(config.mesh, devices)["tensor"] == 1:
        raise UserError("--compare tensor_overlap: mesh.tensor is 1, so that nothing travels around products; set mesh.tensor=2 or more")
    return "gather" if config.compute.tensor_overlap == "ring" else "ring"


def compared(reports: Mapping[str, Report]) -> dict[str, Any]:
    """Return a row per value, the config's own first, the faster one of those that fit, and what to do, in words.

    ratio: the longer played step over the shorter; None where only one fits, or none. faster: None where they are equal or none fits.
    """
    rows: list[dict[str, Any]] = [
        {
            "value": value,
            "step_s": report.schedule.step_s,
            "exposed_communication_s": report.schedule.exposed_s,
            "overlapped_share": report.overlapped_share,
            "needed_bytes": report.compiled.peak_bytes + report.reserve_bytes,
            "fits": report.fits,
        }
        for value, report in reports.items()
    ]
    own, other = rows
    ratio: float | None
    faster: str | None
    fitting = [row for row in rows if row["fits"]]
    if len(fitting) < 2:
        faster, ratio = (fitting[0]["value"], None) if fitting else (None, None)
        advice = f"only {faster} fits: compute.tensor_overlap={faster}" if fitting else "neither fits: change that first"
    else:
        short, long = sorted(rows, key=lambda row: row["step_s"])
        ratio = long["step_s"] / short["step_s"]
        faster = short["value"] if ratio >= 1 + EQUAL else None
        if faster is None:
            advice = f"within {EQUAL:.0%} of each other: keep {own['value']}"
        elif faster == own["value"]:
            advice = f"keep {faster}: with {other['value']} the played step takes {ratio:.2f} times as long"
        else:
            advice = f"compute.tensor_overlap={faster} is faster: with {own['value']} the played step takes {ratio:.2f} times as long"
    return {"setting": "compute.tensor_overlap", "rows": rows, "faster": faster, "ratio": ratio, "advice": advice}
