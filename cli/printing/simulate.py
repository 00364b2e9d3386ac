"""Print a simulated campaign: three sentences, the choices, where the lost time goes, and what interrupts the job."""

from __future__ import annotations

import math
from typing import Any

from ridgeline.cli.tables import Column, print_table
from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.format import format_duration, plural
from ridgeline.configs.schema import Config
from ridgeline.planner.campaign.model import CAUSES, Campaign, Outcome
from ridgeline.planner.campaign.report import Report, usd
from ridgeline.planner.campaign.search import spread
from ridgeline.planner.economics import price_text
from ridgeline.planner.hardware import hardware


def print_report(report: Report, config: Config, cluster: ClusterConfig) -> None:
    """Print everything."""
    made = report.campaign
    rate = f"one failure or stop in {1 / _per_hour(made):.3g} h" if _per_hour(made) > 0 else "no failures"
    print(f"{config.name}: {report.trials} simulated campaigns on cluster {cluster.name} ({cluster.device}), seed {report.seed}; {rate}\n")
    for sentence in (_takes(report, cluster), _costs(report, cluster), _advice(report)):
        print(sentence)
    print()
    _print_choices(report)
    print()
    _print_lost(report)
    print()
    _print_interruptions(report)
    if report.inputs.without:
        print(f"\nNo layout is planned, so the time of a step and the tokens are unknown: {report.inputs.without}")
    print("\nRates and times: planner/failures.yaml, with sources and what is assumed.")


def _per_hour(made: Campaign) -> float:
    return sum(one.per_hour(made.nodes, made.devices_per_node) for one in made.classes)


def _takes(report: Report, cluster: ClusterConfig) -> str:
    made, days, goodput = report.campaign, report.days, report.goodput
    where = f"{plural(made.nodes, 'node')} of {cluster.name} ({plural(made.nodes * made.devices_per_node, 'device')})"
    take = f"take {days.p50:.4g} days (P90 {'not done' if math.isinf(days.p90) else f'{days.p90:.4g}'})"
    if math.isinf(days.p50):
        take = f"are not done after {spread(report.chosen.ended_s).p50 / 86400:.4g} days"
    return (
        f"{made.work_s / 86400:.4g} days of steps on {where} {take}: "
        f"goodput {goodput.p50:.1%} (P10 {goodput.p10:.1%}), {report.chosen.interruptions.mean():,.0f} interruptions."
    )


def _costs(report: Report, cluster: ClusterConfig) -> str:
    made, chosen, money = report.campaign, report.chosen, report.usd
    hours = spread(chosen.device_s / 3600)
    if math.isinf(hours.p90):
        return "Costs have no limit: the steps are not done."
    spares = f"with {plural(chosen.choice.spares, 'spare node')}"
    if money is None:
        return f"Costs {hours.p50:,.0f} device-hours (P90 {hours.p90:,.0f}) {spares}; {price_text(cluster, hardware(cluster.device))}."
    least = made.work_s / 3600 * made.nodes * made.devices_per_node * (made.price_per_device_hour_usd or 0.0)
    more = f" ({money.p50 / least - 1:.1%} more than the steps alone)" if least > 0 else ""
    price = price_text(cluster, hardware(cluster.device))
    return f"Costs ${money.p50:,.0f} (P90 ${money.p90:,.0f}) {spares}{more} at {price}."


def _advice(report: Report) -> str:
    causes = sorted(report.lost_s.items(), key=lambda item: -item[1])[:2]
    wall_s = float(report.chosen.ended_s.mean())
    most = " and ".join(f"{cause} ({lost_s / wall_s:.1%} of the time)" for cause, lost_s in causes)
    stops = float(report.chosen.stops.mean())
    limit = report.campaign.max_restarts
    if stops >= 1 and limit is not None:
        needed = int(spread(report.chosen.interruptions).p90) + 1
        return f"Largest losses: {most}; a person submits the job again {stops:,.0f} times: set slurm.max_restarts={needed} (now {limit})."
    return f"Largest losses: {most}."


def _print_choices(report: Report) -> None:
    named: dict[str, Outcome] = {"simulated": report.chosen}
    if report.configured is not None:
        named["saves of CONFIG"] = report.configured
    named |= {"best with its tier": report.best_same_tier, "best of all": report.best}
    rows = [_row(name, outcome, report.campaign) for name, outcome in named.items()]
    columns: list[Column | str] = [
        "choice",
        Column("interval", "save every", format_duration),
        "tier",
        "spares",
        "policy",
        Column("days", "days P50", "{:.4g}".format),
        Column("late", "P90", "{:.4g}".format),
        Column("goodput", "goodput P50", "{:.1%}".format),
        Column("usd", "USD P50", "{:,.0f}".format),
        Column("dear", "P90", "{:,.0f}".format),
    ]
    print_table(columns, rows, title=f"choices; best: least {report.objective}, mean over the trials")


def _row(name: str, outcome: Outcome, made: Campaign) -> dict[str, Any]:
    choice, days, money = outcome.choice, spread(outcome.days), usd(outcome, made)
    return {
        "choice": name,
        "interval": choice.interval_s,
        "tier": choice.tier,
        "spares": choice.spares,
        "policy": choice.elastic,
        "days": _finite(days.p50),
        "late": _finite(days.p90),
        "goodput": spread(outcome.goodput).p50,
        "usd": None if money is None else _finite(money.p50),
        "dear": None if money is None else _finite(money.p90),
    }


def _finite(value: float) -> float | None:
    """Return a figure; None where the work is not done."""
    return value if math.isfinite(value) else None


def _print_lost(report: Report) -> None:
    wall_s = float(report.chosen.ended_s.mean())
    rows = [
        {"cause": cause, "days": lost_s / 86400, "share": lost_s / wall_s, "what": CAUSES[cause]}
        for cause, lost_s in sorted(report.lost_s.items(), key=lambda item: -item[1])
        if lost_s > 0
    ]
    columns = [Column("cause"), Column("days", format="{:.3f}".format), Column("share", "of wall time", "{:.2%}".format), Column("what")]
    print_table(columns, rows, title="lost time, mean over the trials")


def _print_interruptions(report: Report) -> None:
    rows = [{"kind": kind, "count": float(counts.mean())} for kind, counts in report.chosen.events.items() if counts.any()]
    rows.sort(key=lambda row: -float(row["count"]))  # type: ignore[arg-type]
    if rows:
        print_table([Column("kind", "interruption"), Column("count", "number", "{:,.1f}".format)], rows)
