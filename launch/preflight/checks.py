"""Result of one check of a node, and the rules that judge a measured rate.

A rate is compared with the expected one (cluster file, hardware catalog) *and* with the other nodes of the job. The first comparison
detects a fabric that is slow everywhere, the second a single slow node.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARN = "warn"
    """Unusual; the node can train."""
    FAIL = "fail"
    """The node is unfit."""
    NOT_APPLICABLE = "not applicable"
    """Not judged, for the given reason; never counted as passed."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one node: a row of its table."""

    node: str
    name: str
    verdict: Verdict
    measured: str = ""
    expected: str = ""
    reason: str = ""
    """Why it is not `ok`, or what it was compared with."""
    fix: str = ""
    """Action that solves the problem."""
    value: float | None = None
    """Measured value in `unit`."""
    unit: str = ""
    against_peers: bool = False
    """Failed in comparison with the other nodes, so the cause cannot be common to all nodes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Shares of the expected rate and of the peers' median below which a rate is a warning or a failure."""

    warn: float
    fail: float
    peer_warn: float
    peer_fail: float


GPU_LIMITS = Limits(warn=0.85, fail=0.6, peer_warn=0.95, peer_fail=0.8)
"""A synchronous job is as fast as its slowest device: a device 20% slower than its peers slows all of them by 20%."""
CPU_LIMITS = Limits(warn=0.5, fail=0.1, peer_warn=0.5, peer_fail=0.1)
"""CPU nodes are shared and noisy: only a very slow node fails."""
NETWORK_LIMITS = Limits(warn=0.7, fail=0.4, peer_warn=0.8, peer_fail=0.5)
"""Collectives between GPUs. Wider than for one device: the reached share of a link depends on the library's algorithm."""
STORAGE_LIMITS = Limits(warn=0.3, fail=0.02, peer_warn=0.4, peer_fail=0.05)
"""A shared file system serves other jobs too: only a mount too slow to save a checkpoint fails."""
TOO_GOOD = 1.5
"""Above this share of the expected rate, the expectation or the timing is wrong."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected rate and its source; value None: compared with peers only."""

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
    """Judge a rate (higher is better) by the expected one and by the median of all nodes.

    Args:
      value, unit: measured rate; `expected` and `peers` have the same unit.
      peers: rates of all nodes of the job, including this one; fewer than two: no comparison.
      detail: text appended to the measured rate.
      capped: whether a rate far above the expected one is a warning (false if the expected one is only a lower bound).
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
            return check(Verdict.WARN, f"{figure_reason}: faster than possible; the expected rate is wrong for this machine")
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
            return check(Verdict.NOT_APPLICABLE, f"measured, not judged: {expected.source}, no peers")
        return check(Verdict.OK, f"compared with peers only: {expected.source}")
    return check(Verdict.OK, "")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
