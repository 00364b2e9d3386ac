"""What one check of a node is, and the rules by which a measured figure is judged.

A figure is held against what the machine should reach (cluster file, hardware catalogue) *and* against its peers in this job: the first
sees a fabric that is bad everywhere, the second names the one node that is slower than the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    """Worth a look; the node can train."""
    FAIL = "fail"
    """The node is unfit."""
    NOT_APPLICABLE = "not applicable"
    """Not judged, and why is in the reason: never a pass."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of a node's table."""

    node: str
    name: str
    verdict: Verdict
    measured: str = ""
    expected: str = ""
    reason: str = ""
    """Why it is not `ok`, or by what it was judged."""
    fix: str = ""
    """What to do about it."""
    value: float | None = None
    """The measured figure as a number, in `unit`."""
    unit: str = ""
    against_peers: bool = False
    """Failed by comparison with the other nodes, so it can never be the fault of all of them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Below which share of the expected figure, and of the peers' median, a rate is a warning or a failure."""

    warn: float
    fail: float
    peer_warn: float
    peer_fail: float


GPU_LIMITS = Limits(warn=0.85, fail=0.6, peer_warn=0.95, peer_fail=0.8)
"""A synchronous job runs at the pace of its slowest device: 20 % less than the peers costs all of them 20 %."""
CPU_LIMITS = Limits(warn=0.5, fail=0.1, peer_warn=0.5, peer_fail=0.1)
"""CPU nodes are shared and noisy: only a node that is lame is refused."""
NETWORK_LIMITS = Limits(warn=0.7, fail=0.4, peer_warn=0.8, peer_fail=0.5)
"""Collectives between GPUs: the achieved share of a link depends on the algorithm the library chooses, so wider than for one device."""
STORAGE_LIMITS = Limits(warn=0.3, fail=0.02, peer_warn=0.4, peer_fail=0.05)
"""A shared file system is shared with others: only a mount that would never save a checkpoint is refused."""
TOO_GOOD = 1.5
"""Above this share of the expected figure the figure itself is wrong, or the timing."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a rate should be, and who says so; no figure: judged against peers only."""

    value: float | None
    source: str


def judge_rate(
    node: str,
    name: str,
    value: float,
    unit: str,
    *,
    expected: Expected,
    peers: Sequence[float],
    limits: Limits,
    fix: str,
    detail: str = "",
    capped: bool = True,
) -> Check:
    """Judge a rate (more is better) against the expected figure and against the median of all nodes' figures.

    Args:
      value, unit: the measured figure; `expected` and `peers` are in the same unit.
      peers: the figures of all nodes of the job, this one's included; fewer than two: nothing to compare with.
      detail: added to the measured figure, in words.
      capped: a figure far above the expected one is a warning (false where the expected figure is only a lower bound).
    """
    measured = f"{_short(value)} {unit}" + (f" ({detail})" if detail else "")
    peer_median = statistics.median(peers) if len(peers) > 1 else None
    wanted = [] if expected.value is None else [f"{_short(expected.value)} {unit}"]
    if peer_median is not None:
        wanted.append(f"peers {_short(peer_median)}")

    def check(verdict: Verdict, reason: str, *, by_peers: bool = False) -> Check:
        bad = verdict in (Verdict.WARN, Verdict.FAIL)
        return Check(node, name, verdict, measured, ", ".join(wanted), reason, fix if bad else "", value, unit, by_peers)

    def grade(share: float, warn: float, fail: float) -> Verdict:
        return Verdict.FAIL if share < fail else Verdict.WARN if share < warn else Verdict.OK

    by_figure, figure_reason = Verdict.OK, ""
    if expected.value is not None:
        share = value / expected.value
        by_figure = grade(share, limits.warn, limits.fail)
        figure_reason = f"{share:.0%} of {expected.source}"
        if capped and share > TOO_GOOD:
            return check(Verdict.WARN, f"{figure_reason}: faster than it should be able to; that figure is wrong for this machine")
    by_peer, peer_reason = Verdict.OK, ""
    if peer_median:
        share = value / peer_median
        by_peer = grade(share, limits.peer_warn, limits.peer_fail)
        peer_reason = f"{share:.0%} of the median of {len(peers)} nodes"
    if by_peer == Verdict.FAIL or (by_peer == Verdict.WARN and by_figure != Verdict.FAIL):
        return check(by_peer, peer_reason, by_peers=True)
    if by_figure != Verdict.OK:
        return check(by_figure, figure_reason)
    if expected.value is None:
        if peer_median is None:
            return check(Verdict.NOT_APPLICABLE, f"measured, not judged: {expected.source}, and there are no peers")
        return check(Verdict.OK, f"against peers only: {expected.source}")
    return check(Verdict.OK, "")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
