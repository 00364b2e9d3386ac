"""nodes.jsonl: the nodes of each start of an elastic job, which the job script writes before the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.rundir.jobs import read_attempts
from ridgeline.rundir.jsonl import read_typed_jsonl

FILE = "nodes.jsonl"


@dataclass(frozen=True)
class Allocation:
    """The nodes of one start."""

    job: int
    begin: float
    """Wall clock, seconds since 1970; whole seconds."""
    nodes: int
    """Nodes that train."""
    of: int
    """Nodes that the job was submitted for, without spares."""
    spares: int = 0
    """Idle spare nodes."""
    names: str = ""
    spare_names: str = ""


@dataclass(frozen=True)
class Usage:
    """Node-seconds of an elastic run."""

    reduced_s: float
    """Time of starts on fewer nodes than the job was submitted for."""
    missing_node_s: float
    """Node-seconds that those starts lacked."""
    spare_node_s: float
    """Node-seconds of idle spares, which are paid."""


def read_allocations(run_dir: Path) -> list[Allocation]:
    """Return the nodes of every start, oldest first; [] for a run without elastic jobs. Raises UserError when damaged."""
    path = run_dir / FILE
    found = sorted(read_typed_jsonl(path, Allocation), key=lambda one: one.begin) if path.is_file() else []
    return [one for one in found if one.nodes > 0]


def usage(run_dir: Path, now_s: float) -> Usage | None:
    """Return the node-seconds of an elastic run until now; None for other runs. A start lasts until the job script recorded its end."""
    found = read_allocations(run_dir)
    if not found:
        return None
    ends = _ends_s(run_dir, found, now_s)
    lasted = [(one, max(0.0, end_s - one.begin)) for one, end_s in zip(found, ends, strict=True)]
    return Usage(
        reduced_s=sum(s for one, s in lasted if one.nodes < one.of),
        missing_node_s=sum(s * (one.of - one.nodes) for one, s in lasted),
        spare_node_s=sum(s * one.spares for one, s in lasted),
    )


def _ends_s(run_dir: Path, found: Sequence[Allocation], now_s: float) -> list[float]:
    """Return when each start ended: its attempt's end; else, for a start whose script was lost, the begin of the next start."""
    attempts = read_attempts(run_dir)
    limits = [*(one.begin for one in found[1:]), now_s]
    ends = []
    for one, limit_s in zip(found, limits, strict=True):
        own = [a.end for a in attempts if a.job == one.job and one.begin <= a.begin <= limit_s]
        ends.append(min([limit_s, *own]))
    return ends
