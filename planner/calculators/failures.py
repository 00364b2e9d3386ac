"""Failures at scale: mean time between failures, optimal checkpoint interval, and goodput.

    rates add            1/MTBF = sum(n_i / MTBF_i)
    interval (Young)     I = sqrt(2 * save * MTBF)
    overhead             save/I + I/(2*MTBF): time of saves, and work lost since the last save
    goodput              (1 - save/I) * (1 - (I/2 + restart)/MTBF), at least 0: without saves, lost work and restarts

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; node failure rates of Meta's
clusters: Kokolis et al., arXiv 2410.21680, section 4 (6.5 and 2.3 failures per 1,000 node-days); Llama 3, arXiv 2407.21783, table 5
(466 interruptions in 54 days on 16,384 GPUs).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ridgeline.configs.errors import UserError
from ridgeline.planner.calculators.checks import count, not_negative, positive
from ridgeline.planner.failure_catalog import fleets

PUBLISHED_FAILURES_PER_NODE_DAY = {fleet.title: fleet.per_node_day for fleet in fleets().values()}
"""Published fleet -> failures per node and day. They differ by a factor of 3."""
FAILURES_PER_NODE_DAY = statistics.median(PUBLISHED_FAILURES_PER_NODE_DAY.values())
"""4.2 per 1,000 node-days."""
DEFAULT_NODE_MTBF_HOURS = 24 / FAILURES_PER_NODE_DAY
"""5,696 hours, for clusters without node_mtbf_hours."""


@dataclass(frozen=True)
class CheckpointPlan:
    """The optimal checkpoint interval and its overhead."""

    mtbf_s: float
    """Mean time between failures of the job."""
    interval_s: float
    """Optimal time between saves."""
    overhead_fraction: float
    """Fraction of the wall time lost to saves and repeated work at this interval, without restarts."""


def fleet_mtbf_s(fleet: Iterable[tuple[float, float]]) -> float:
    """Return the mean time between failures of a fleet of (count, MTBF in hours) parts; any failure stops the job."""
    parts = [(count("fleet count", n), positive("fleet MTBF_HOURS", hours)) for n, hours in fleet]
    if not parts:
        raise UserError("fleet: needs at least one COUNT:MTBF_HOURS")
    return 3600 / sum(n / hours for n, hours in parts)


def checkpoint_plan(*, save_s: float, mtbf_s: float) -> CheckpointPlan:
    """Return the optimal interval for saves that block training for `save_s` seconds.

    Raises UserError for times that are not positive, or saves so slow that no progress is possible between failures.
    """
    save, mtbf = positive("save-s", save_s), positive("mtbf-s", mtbf_s)
    interval = math.sqrt(2 * save * mtbf)
    overhead = overhead_fraction(save_s=save, mtbf_s=mtbf, interval_s=interval)
    if overhead >= 1:
        raise UserError(
            f"save-s={save:g} with mtbf-s={mtbf:g}: no interval makes progress; a save must take less than half the time"
            f" between failures ({mtbf / 2:g} s)"
        )
    return CheckpointPlan(mtbf, interval, overhead)


def overhead_fraction(*, save_s: float, mtbf_s: float, interval_s: float) -> float:
    """Return the fraction of the time that is lost when saving every `interval_s` seconds."""
    return save_s / interval_s + interval_s / (2 * mtbf_s)


def goodput(*, save_s: float, mtbf_s: float, interval_s: float, restart_s: float) -> float:
    """Return useful step time over wall time, without saves, repeated work and `restart_s` per failure; at least 0."""
    not_negative("restart-s", restart_s)
    saving = save_s / (interval_s + save_s)
    failing = (interval_s / 2 + restart_s) / (mtbf_s + restart_s)
    return max(0.0, (1 - saving) * (1 - min(1.0, failing)))
