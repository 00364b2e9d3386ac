"""The result of `ridge simulate`: the campaign with what was chosen, beside the best choices and the config's own saves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.planner.campaign.inputs import Inputs
from ridgeline.planner.campaign.model import CAUSES, Campaign, Choice, Elastic, Outcome, Tier
from ridgeline.planner.campaign.search import Best, Objective, Spread, best, least_interval_s, spread
from ridgeline.planner.campaign.trials import expected_events, simulate

MOST_EVENTS_EXPECTED = 50_000
"""Expected interruptions of one campaign up to which it is simulated: about a minute of one core with 200 trials."""

MOST_IN_REPAIR = 10_000
"""Nodes in repair at a time, in the mean, up to which a campaign is simulated: about 300 MB with 200 trials."""


@dataclass(frozen=True)
class Wanted:
    """What the user decided; None: the best that the trainer can do."""

    interval_s: float | None = None
    spares: int | None = None
    tier: Tier | None = None
    elastic: Elastic | None = None

    def over(self, base: Choice) -> Choice:
        """Return the choice with everything else from `base`."""
        stated = {name: value for name, value in vars(self).items() if value is not None}
        return replace(base, **stated)


@dataclass(frozen=True)
class Report:
    """Everything that `ridge simulate` reports."""

    inputs: Inputs
    chosen: Outcome
    configured: Outcome | None
    """With the interval of the config's own saves; None where it is unknown or the config never saves in between."""
    best_same_tier: Outcome
    best: Outcome
    objective: Objective
    trials: int
    seed: int

    @property
    def campaign(self) -> Campaign:
        """What was simulated."""
        return self.inputs.campaign

    @property
    def days(self) -> Spread:
        """Wall days."""
        return spread(self.chosen.days)

    @property
    def goodput(self) -> Spread:
        """Steps that count over the wall time."""
        return spread(self.chosen.goodput)

    @property
    def usd(self) -> Spread | None:
        """US dollars; None without a price."""
        return usd(self.chosen, self.campaign)

    @property
    def lost_s(self) -> dict[str, float]:
        """Cause -> seconds, mean over the trials."""
        return {cause: float(self.chosen.seconds[cause].mean()) for cause in CAUSES}


def usd(outcome: Outcome, made: Campaign) -> Spread | None:
    """Return the cost of an outcome in US dollars; None without a price."""
    price = made.price_per_device_hour_usd
    return None if price is None else spread(outcome.usd(price))


def make_report(found: Inputs, wanted: Wanted, *, objective: Objective, trials: int, seed: int) -> Report:
    """Search the best choices and simulate them, what was wanted, and the config's own interval, with the same random numbers."""
    made = found.campaign
    _check(made, wanted)
    searched: Best = best(made, objective=objective, seed=seed, tier=wanted.tier or found.tier)
    chosen = wanted.over(searched.same_tier)
    choices = [chosen, searched.same_tier, searched.overall]
    own = found.configured_s
    if own is not None and math.isfinite(own):
        choices.append(replace(chosen, interval_s=max(own, least_interval_s(made, chosen.tier))))
    distinct = list(dict.fromkeys(choices))
    outcomes = dict(zip(distinct, simulate(made, distinct, trials=trials, seed=seed), strict=True))
    return Report(
        inputs=found,
        chosen=outcomes[chosen],
        configured=outcomes[choices[3]] if len(choices) > 3 else None,
        best_same_tier=outcomes[searched.same_tier],
        best=outcomes[searched.overall],
        objective=objective,
        trials=trials,
        seed=seed,
    )


def _check(made: Campaign, wanted: Wanted) -> None:
    """Raise UserError for a campaign of too many events or nodes in repair, and an interval shorter than a save takes."""
    if (events := expected_events(made)) > MOST_EVENTS_EXPECTED:
        days = made.work_s / 86400
        raise UserError(
            f"{days:.4g} days of steps have {events:,.0f} interruptions; at most {MOST_EVENTS_EXPECTED:,} are simulated: "
            f"--days {float(f'{days * MOST_EVENTS_EXPECTED / events:.2g}'):g}"
        )
    sent_per_s = made.replaced_per_s + made.straggler_per_s
    if (away := sent_per_s * made.repair_s) > MOST_IN_REPAIR:
        raise UserError(
            f"{away:.3g} nodes would be in repair at a time; at most {MOST_IN_REPAIR:,} are simulated: "
            f"--repair {MOST_IN_REPAIR / sent_per_s / 86400:.2g}d"
        )
    least_s = least_interval_s(made, wanted.tier or "shared")
    if wanted.interval_s is not None and wanted.interval_s < least_s:
        raise UserError(
            f"--interval {wanted.interval_s:g}s: a save takes {least_s:.3g}s; --interval must be at least {math.ceil(least_s)}s, "
            "or state --save and --write"
        )


def report_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON values. p10, p50 and p90 are percentiles of the figure itself: a low goodput goes with many days.

    Days and money are null where the work is never done.
    """
    made, chosen, found = report.campaign, report.chosen, report.inputs
    hours = sum(one.per_hour(made.nodes, made.devices_per_node) for one in made.classes)
    return {
        "nodes": made.nodes,
        "devices": made.nodes * made.devices_per_node,
        "work_days": made.work_s / 86400,
        "step_s": found.step_s,
        "layout": None if found.layout is None else found.layout.layout.text(),
        "no_layout": found.without or None,
        "tokens": found.tokens,
        "trials": report.trials,
        "seed": report.seed,
        "mtbf_hours": 1 / hours if hours > 0 else None,
        "days": _finite(report.days),
        "usd": _finite(report.usd),
        "goodput": _finite(report.goodput),
        "ledger_goodput": _finite(spread(chosen.ledger_goodput)),
        "interruptions": float(chosen.interruptions.mean()),
        "interruptions_by_kind": {name: float(counts.mean()) for name, counts in chosen.events.items()},
        "stops": float(chosen.stops.mean()),
        "lost_s": report.lost_s,
        "wall_s": float(chosen.ended_s.mean()),
        "productive_s": float(chosen.seconds["productive"].mean()),
        "choice": choice_json(chosen, made),
        "objective": report.objective,
        "best": choice_json(report.best, made),
        "best_same_tier": choice_json(report.best_same_tier, made),
        "configured": None if report.configured is None else choice_json(report.configured, made),
        "failures_per_component_hour": {one.name: one.per_component_hour for one in made.classes},
    }


def choice_json(outcome: Outcome, made: Campaign) -> dict[str, Any]:
    """Return a choice (`interval` in seconds) and what comes of it."""
    choice, money = outcome.choice, usd(outcome, made)
    return {
        "interval": choice.interval_s,
        "tier": choice.tier,
        "spares": choice.spares,
        "policy": choice.elastic,
        "days": _finite(spread(outcome.days)),
        "goodput": _finite(spread(outcome.goodput)),
        "usd": _finite(money),
    }


def _finite(found: Spread | None) -> dict[str, float | None] | None:
    return None if found is None else {name: value if math.isfinite(value) else None for name, value in vars(found).items()}
