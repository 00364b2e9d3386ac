"""Result of a preflight: unfit nodes, printed lines and tables, and files in the run directory.

`doctor.jsonl` gets a line per check and one with the verdict; `bad_nodes` a line per unfit node: name, time, reason. The job script
excludes these nodes when it requeues.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ridgeline.launch.preflight.checks import Check, Verdict
from ridgeline.rundir.bad_nodes import add_bad_nodes
from ridgeline.rundir.jsonl import LineFile, dump_json

LOG = "doctor.jsonl"
FULL_TABLES = 8
"""With more nodes only those with warnings or failures get a table; all are in doctor.jsonl."""


@dataclass(frozen=True)
class Report:
    """The outcome of a preflight."""

    nodes: tuple[str, ...]
    checks: tuple[Check, ...]
    unfit: Mapping[str, str]
    """Node -> reason, of nodes that failed on their own."""
    common: Mapping[str, str]
    """Check -> reason, of failures common to most nodes."""
    seconds: float

    @property
    def fit(self) -> bool:
        """Whether the job may start."""
        return not self.unfit and not self.common


def conclude(nodes: Sequence[str], checks: Sequence[Check], seconds: float) -> Report:
    """Separate unfit nodes from failures that most nodes share.

    A check that fails on more than half of two or more nodes has a common cause (wrong cluster file, slow fabric, full file system), and
    excluding the nodes would not help. Exception: checks that failed in comparison with the other nodes.
    """
    failed = [check for check in checks if check.verdict == Verdict.FAIL]
    everywhere: dict[str, str] = {}
    for name in dict.fromkeys(check.name for check in failed if not check.against_peers):
        where = {check.node for check in failed if check.name == name and not check.against_peers}
        if len(nodes) > 1 and len(where) > len(nodes) / 2:
            first = next(check for check in failed if check.name == name and not check.against_peers)
            everywhere[name] = f"{len(where)} of {len(nodes)} nodes: {first.measured}: {first.reason}"
    unfit: dict[str, str] = {}
    for check in failed:
        if check.against_peers or check.name not in everywhere:
            text = f"{check.name}: {check.measured}: {check.reason}" if check.measured else f"{check.name}: {check.reason}"
            unfit[check.node] = f"{unfit[check.node]}; {text}" if check.node in unfit else text
    return Report(tuple(nodes), tuple(checks), unfit, everywhere, seconds)


def verdict_lines(report: Report) -> list[str]:
    """Return the lines of the verdict: one per unfit node or common failure, and a summary."""
    warned = {check.node for check in report.checks if check.verdict == Verdict.WARN}
    count = f"{len(report.nodes)} node{'s' if len(report.nodes) != 1 else ''}"
    lines = [f"doctor: {node} is unfit: {why}" for node, why in report.unfit.items()]
    lines += [f"doctor: common to most nodes, none excluded: {name}: {why}" for name, why in report.common.items()]
    if report.fit:
        also = f", {len(warned)} with warnings" if warned else ""
        lines.append(f"doctor: {count} fit{also} ({report.seconds:.0f} s)")
    else:
        lines.append(f"doctor: {len(report.unfit)} of {count} unfit ({report.seconds:.0f} s)")
    return lines


def tables(report: Report) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return (node, rows) for the nodes to print."""
    shown = []
    for node in report.nodes:
        rows = [check for check in report.checks if check.node == node]
        notable = any(check.verdict in (Verdict.WARN, Verdict.FAIL) for check in rows)
        if len(report.nodes) <= FULL_TABLES or notable:
            shown.append((node, [asdict(check) for check in rows]))
    return shown


def as_json(report: Report) -> dict[str, Any]:
    """Return the whole report as JSON values."""
    return {
        "fit": report.fit,
        "nodes": list(report.nodes),
        "unfit": dict(report.unfit),
        "common": dict(report.common),
        "seconds": report.seconds,
        "checks": [asdict(check) for check in report.checks],
    }


def write(report: Report, run_dir: Path, now: datetime, *, restart: int) -> None:
    """Append the report to doctor.jsonl, and unfit nodes to bad_nodes. Raises UserError if the run directory is not writable."""
    stamp = now.isoformat(timespec="seconds")
    log = LineFile(run_dir / LOG)
    try:
        for check in report.checks:
            log.append(dump_json({"time": stamp, "restart": restart, "kind": "check", **asdict(check)}).encode() + b"\n")
        summary = {key: value for key, value in as_json(report).items() if key != "checks"}
        log.append(json.dumps({"time": stamp, "restart": restart, "kind": "verdict", **summary}).encode() + b"\n")
    finally:
        log.close()
    add_bad_nodes(run_dir, report.unfit, now)
