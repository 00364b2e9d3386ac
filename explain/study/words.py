"""What a study says, in sentences: which metric favours which scale, where to stop, what the next doubling would bring, what to doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ridgeline.configs.format import format_count, format_duration, format_seconds

WORTHWHILE = 0.10
"""Gain in time to solution for which the next doubling is worth its devices (stopping_point's default)."""
ENOUGH_REPEATS = 3
NAMES = {"time": "time to solution", "cost": "cost", "efficiency": "parallel efficiency"}


def verdict(study: Mapping[str, Any]) -> list[str]:
    """Return the sentences about a study document (explain/study/study.py), the most important first."""
    ran = [row for row in study["rows"] if row.get("failure") is None]
    lines = [f"{row['devices']} devices did not run: {row['failure']}" for row in study["rows"] if row.get("failure") is not None]
    if len(ran) < 2:
        return [*lines, "one scale ran: there is nothing to compare it with"]
    stop = study["stop"][study["objective"]]
    said = [f"for {_name(study, study['objective'])}, stop at {_devices(stop['devices'])}: {stop['why']}"]
    said += [*_noise(ran), _favours(ran, study), *_other_objectives(study), *_law(study, ran), *_next(study, ran)]
    said += [*_shared(study), *_prediction(ran)]
    return [*said, *lines, *(f"doubt: {doubt}" for doubt in study["doubts"])]


def _name(study: Mapping[str, Any], objective: str) -> str:
    """Say what an objective looks at: in weak scaling every scale does other work, so time and cost are those of a token."""
    return NAMES[objective] if study["mode"] == "strong" or objective == "efficiency" else f"{objective} per token"


def duration(value_s: float) -> str:
    """Write a time in three figures, and from a minute on in minutes, hours and days."""
    return format_seconds(value_s) if value_s < 60 else format_duration(value_s)


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def _favours(ran: Sequence[Mapping[str, Any]], study: Mapping[str, Any]) -> str:
    """Name the best scale by each metric."""
    per_token = "time per token" if study["mode"] == "weak" else "time to solution"
    best = {
        "throughput": max(ran, key=lambda r: r["tokens_per_s"]),
        "throughput per device": max(ran, key=lambda r: r["tokens_per_s_per_device"]),
        per_token: min(ran, key=lambda r: r["time_s"] / r["tokens"]),
        "tokens per device-hour": max(ran, key=lambda r: r["tokens_per_device_hour"]),
    }
    picks: dict[int, list[str]] = {}
    for metric, row in best.items():
        picks.setdefault(row["devices"], []).append(metric)
    told = "; ".join(f"{' and '.join(metrics)}: {_devices(devices)}" for devices, metrics in picks.items())
    return f"best by metric: {told}"


def _other_objectives(study: Mapping[str, Any]) -> list[str]:
    mine = study["stop"][study["objective"]]["devices"]
    others = {name: found["devices"] for name, found in study["stop"].items() if found["devices"] != mine}
    if not others:
        return ["every objective stops there"]
    return [
        "other objectives stop elsewhere: " + ", ".join(f"{_name(study, name)} at {_devices(devices)}" for name, devices in others.items())
    ]


def _law(study: Mapping[str, Any], ran: Sequence[Mapping[str, Any]]) -> list[str]:
    law = study["law"]
    if law is None:
        return [f"{len(ran)} scales have figures: the law of fixed overhead, work and communication needs three"]
    written = {"fixed_s": "fixed", "work_s": "of work / devices", "sync_s": "x log2(devices)"}
    terms = [f"{duration(law[key])} {words}" for key, words in written.items() if law[key] > 0]
    last = ran[-1]
    lines = [
        f"time to solution = {' + '.join(terms)} (worst error {law['worst_error']:.1%}); "
        f"the fixed part is {min(1.0, law['fixed_s'] / last['time_s']):.0%} of the time at {_devices(last['devices'])}"
    ]
    if study["mode"] == "strong" and law["fastest_devices"] is not None and law["fastest_devices"] < 4 * last["devices"]:
        fastest = law["fastest_devices"]
        lines.append(
            f"by that law more than about {fastest:.0f} devices make it slower" if fastest > 1 else "by that law any scaling slows it"
        )
    return lines


def _next(study: Mapping[str, Any], ran: Sequence[Mapping[str, Any]]) -> list[str]:
    ahead = study["next"]
    if ahead is None:
        return []
    low, high = duration(ahead["time_low_s"]), duration(ahead["time_high_s"])
    told = f"the fit predicts {duration(ahead['time_s'])} ({low} to {high}) at {_devices(ahead['devices'])}"
    if "tokens_per_s" in ahead:
        rates = " to ".join(format_count(ahead[key]) for key in ("tokens_per_s_low", "tokens_per_s_high"))
        told += f", {format_count(ahead['tokens_per_s'])} tokens/s ({rates})"
    gain = -(ahead["marginal_time"] or 0.0)
    per = " per token" if study["mode"] == "weak" else ""
    worth = "worth trying for time" if gain >= WORTHWHILE else "not worth it for time"
    changes = f"{abs(gain):.0%} {'less' if gain >= 0 else 'more'} time{per} than at {_devices(ran[-1]['devices'])}"
    return [f"{told}: {changes}, {worth}"]


def _noise(ran: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which steps between scales are within the scatter of the repeats."""
    fewest = min(row["repeats"] for row in ran)
    if fewest < 2:
        return [f"one run at some scales: small differences may be noise (--repeats {ENOUGH_REPEATS})"]
    lines = []
    for before, after in pairwise(ran):
        scatter = before["spread"] + after["spread"]
        if after["marginal_gain"] is not None and abs(after["marginal_gain"]) <= scatter:
            lines.append(
                f"{before['devices']} to {after['devices']} devices: {after['marginal_gain']:+.1%} tokens/s is within the scatter of the "
                f"repeats (+-{scatter:.1%}): cannot tell"
            )
    return lines


def _shared(study: Mapping[str, Any]) -> list[str]:
    cores = study.get("cores")
    if cores is None:
        return []
    return [f"all devices are virtual and share {cores} cores: this measures overheads and the analysis, not what more hardware would do"]


def _prediction(ran: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare with the planner, or say why there is nothing to compare with."""
    compared = [row for row in ran if row.get("measured_over_predicted")]
    if not compared:
        reasons = dict.fromkeys(row["prediction"].get("why_none") for row in ran)
        return [f"no prediction to compare with: {reason}" for reason in reasons if reason]
    worst = max(compared, key=lambda row: abs(row["measured_over_predicted"] - 1))
    return [
        f"planner ({worst['prediction'].get('cluster')}): measured {worst['measured_over_predicted']:.0%} of the predicted tokens/s at "
        f"{_devices(worst['devices'])}, the largest disagreement"
    ]
