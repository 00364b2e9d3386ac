"""The best interval, tier, number of spares and elastic policy of a campaign, and the spread of what comes of a choice.

The search begins at Young's interval and simulates around it with the same random numbers for every choice, so that few trials suffice to
order choices; the choices that are reported are simulated again with all trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from ridgeline.planner.campaign.model import Campaign, Choice, Elastic, Floats, Outcome, Tier
from ridgeline.planner.campaign.trials import simulate
from ridgeline.planner.policy import young_interval_s

Objective = Literal["cost", "time"]
FACTORS = (0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 2.8)
"""Intervals that are simulated, over Young's."""
SPARES = (0.0, 0.5, 0.9, 0.99, 0.999)
"""Numbers of spares that are simulated: the nodes in repair at this quantile."""
SEARCH_TRIALS, SEARCH_EVENTS = (8, 64), 1500
"""The search simulates from 8 to 64 trials of each choice, as many as give eight times this number of interruptions; the work of a campaign
with more interruptions in one trial is cut to this number."""


@dataclass(frozen=True)
class Spread:
    """Percentiles over the trials, and the mean with its 95 % confidence interval."""

    p10: float
    p50: float
    p90: float
    mean: float
    mean_low: float
    mean_high: float


def spread(values: Floats) -> Spread:
    """Return the spread of one figure over the trials."""
    if not np.all(np.isfinite(values)):
        low, middle, high = (float(np.sort(values)[math.ceil(q * len(values)) - 1]) for q in (0.1, 0.5, 0.9))
        return Spread(low, middle, high, math.inf, math.inf, math.inf)
    low, middle, high = (float(q) for q in np.percentile(values, [10, 50, 90]))
    mean = float(values.mean())
    half = 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Spread(low, middle, high, mean, mean - half, mean + half)


def in_repair(made: Campaign, quantile: float) -> int:
    """Return the least number of nodes that is enough for those in repair with this probability: a Poisson number, because the work of a
    repair crew does not wait (M/G/infinity)."""
    mean = made.replaced_per_s * made.repair_s
    if quantile <= 0 or mean == 0:
        return 0
    count, total = 0, 0.0
    while (total := total + math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))) < quantile and count < 4 * mean + 50:
        count += 1
    return count


def score(outcome: Outcome, objective: Objective) -> tuple[float, int]:
    """Return what is least for the best choice: device-hours that are paid, or time; of equal choices that with fewer spares."""
    figure = outcome.device_s if objective == "cost" else outcome.wall_s
    return float(figure.mean()), outcome.choice.spares


def least_interval_s(made: Campaign, tier: Tier) -> float:
    """Return the shortest interval: the previous checkpoint is written by then."""
    return max(made.write_s[tier], made.save_s, 1.0)


def intervals(made: Campaign, tier: Tier) -> list[float]:
    """Return the intervals of the search, shortest first."""
    failures_per_s = made.failures_per_s
    young_s = young_interval_s(made.save_s, 1 / failures_per_s) if failures_per_s > 0 else made.work_s
    least_s = least_interval_s(made, tier)
    return sorted({min(max(factor * young_s, least_s), max(made.work_s, least_s)) for factor in FACTORS})


@dataclass(frozen=True)
class Best:
    """The best choices."""

    overall: Choice
    same_tier: Choice
    """Among those with the tier of the config."""


def best(made: Campaign, *, objective: Objective = "cost", seed: int = 0, tier: Tier = "shared") -> Best:
    """Return the best choices for an objective: first the interval of each tier, then spares and policy with it.

    tier: of the config.
    """
    expected = made.work_s * (made.failures_per_s + made.preemptions_per_s + 1 / made.time_limit_s) + 1
    least, most = SEARCH_TRIALS
    trials = int(min(most, max(least, least * SEARCH_EVENTS / expected)))
    short = replace(made, work_s=made.work_s * min(1.0, SEARCH_EVENTS / expected))
    enough = in_repair(made, SPARES[-2])

    def tried(choices: Sequence[Choice]) -> list[Outcome]:
        return sorted(simulate(short, choices, trials=trials, seed=seed), key=lambda outcome: score(outcome, objective))

    tiers = get_args(Tier)
    by_interval = tried([Choice(interval_s, enough, one) for one in tiers for interval_s in intervals(made, one)])
    of_tier = {one: next(outcome.choice for outcome in by_interval if outcome.choice.tier == one) for one in tiers}
    counts = sorted({in_repair(made, quantile) for quantile in SPARES})
    elastics: tuple[Elastic, ...] = get_args(Elastic)
    full = tried([replace(of_tier[one], spares=n, elastic=elastic) for one in tiers for n in counts for elastic in elastics])
    own = next(outcome.choice for outcome in full if outcome.choice.tier == tier)
    return Best(full[0].choice, own)
