"""Build the document of a scaling study: a row per scale, the fitted law, the stopping points, and a verdict in sentences.

Measurements come from explain/study/measured.py, the analysis from explain/study/analysis.py. A scale that failed is a row with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.format import format_count, format_duration, format_seconds
from ridgeline.configs.rules import check_devices
from ridgeline.configs.schema import Config
from ridgeline.explain.study.analysis import Point, Row, Study, analyze, stopping_point
from ridgeline.explain.study.document import FORMAT, FittedLaw, NextScale, Prediction, ScalingRow, ScalingStudy, Stop
from ridgeline.explain.study.measured import MeasuredRun
from ridgeline.planner.scaling import WORTHWHILE
from ridgeline.planner.search import Objective
from ridgeline.rundir.noise import median, spread

OBJECTIVES: tuple[Objective, ...] = ("time", "cost", "efficiency")
ENOUGH_REPEATS = 3
NAMES = {"time": "time to solution", "cost": "cost", "efficiency": "parallel efficiency"}


@dataclass(frozen=True)
class Scale:
    """The runs at one scale."""

    devices: int
    runs: Sequence[MeasuredRun] = ()
    """Finished runs; several are repeats."""
    failures: Sequence[str] = ()
    """Why the other runs have no figures."""
    nodes: int | None = None
    mesh: str = ""
    """Sizes of the mesh axes, as in fsdp=4."""
    batch_size: int | None = None
    predicted: Prediction = field(default_factory=Prediction)


@dataclass(frozen=True)
class Question:
    """The question a study answers."""

    objective: Objective = "time"
    weak: bool = False
    price_usd: float | None = None
    """Of one device and hour."""
    tokens: float | None = None
    """Tokens of the run whose time to solution is wanted; None: of the measured runs."""


def scales_of(runs: Sequence[MeasuredRun]) -> list[Scale]:
    """Group finished runs by their devices."""
    groups: dict[int, list[MeasuredRun]] = {}
    for run in sorted(runs, key=lambda run: run.devices):
        groups.setdefault(run.devices, []).append(run)
    return [
        Scale(devices, group, mesh=mesh_text(group[0].config, devices), batch_size=group[0].config.data.batch_size)
        for devices, group in groups.items()
    ]


def mesh_text(config: Config, devices: int) -> str:
    """Return the mesh axes larger than 1 and their sizes, as in fsdp=4."""
    sizes = check_devices(config, devices)
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"


def point_of(scale: Scale, question: Question) -> Point:
    """Return the point of a scale: medians of its repeats, the larger spread of time and rate; a failure when none ran."""
    if not scale.runs:
        return Point(scale.devices, failure="; ".join(dict.fromkeys(scale.failures)) or "did not run")
    times_s = [run.solution_s(question.tokens) for run in scale.runs]
    rates = [run.tokens_per_s for run in scale.runs]
    grows = question.weak and question.tokens is None
    return Point(
        scale.devices, median(times_s), median(rates), max(spread(times_s), spread(rates)), work=scale.runs[0].tokens if grows else None
    )


def analysis_of(scales: Sequence[Scale], question: Question) -> Study | None:
    """Analyze a study; None while fewer than two scales have figures."""
    points = [point_of(scale, question) for scale in scales]
    if sum(point.failure is None for point in points) < 2:
        return None
    return analyze(points, price_per_device_hour=question.price_usd or 1.0)  # free devices: device-hours


def scaling_study(name: str, scales: Sequence[Scale], question: Question, **more: Any) -> ScalingStudy:
    """Return the document of a study.

    Args:
      name: of the config.
      scales: with at least one finished run among them.
      question: objective, price and tokens.
      more: further keys of the document: where, axis, cores.

    Raises:
      UserError: no scale has a finished run.
    """
    if not any(scale.runs for scale in scales):
        reasons = "; ".join(dict.fromkeys(f"{s.devices} devices: {reason}" for s in scales for reason in s.failures))
        raise UserError(f"no scale of this study ran: {reasons or 'nothing was started'}")
    ordered = sorted(scales, key=lambda scale: scale.devices)
    study = analysis_of(ordered, question)
    derived: dict[int, Row] = {} if study is None else {row.value: row for row in study.rows}
    found: ScalingStudy = {
        "format": FORMAT,
        "kind": "scaling",
        "name": name,
        "mode": "weak" if question.weak else "strong",
        "objective": question.objective,
        "price_usd": question.price_usd,
        "tokens": question.tokens,
        **more,  # type: ignore[typeddict-item]
        "rows": [_row(scale, derived.get(scale.devices), question) for scale in ordered],
        "law": None if study is None else _law(study),
        "step_law": None if study is None else _step_law(study, ordered),
        "next": None if study is None else _next(study, ordered),
        "stop": {} if study is None else {objective: _stop(study, objective) for objective in OBJECTIVES},
        "doubts": [] if study is None else list(study.doubts),
        "verdict": [],
    }
    found["verdict"] = verdict(found)
    return found


def _stop(study: Study, objective: Objective) -> Stop:
    devices, why = stopping_point(study, objective)
    return {"devices": devices, "why": why}


def _row(scale: Scale, row: Row | None, question: Question) -> ScalingRow:
    point = point_of(scale, question)
    made: ScalingRow = {
        "devices": scale.devices,
        "nodes": scale.nodes,
        "mesh": scale.mesh,
        "batch_size": scale.batch_size,
        "runs": [str(run.path) for run in scale.runs],
        "repeats": len(scale.runs),
        "failures": list(scale.failures),
        "failure": point.failure,
        "prediction": scale.predicted,
    }
    if not scale.runs or point.time_s is None or point.rate is None:
        return made
    tokens = question.tokens or scale.runs[0].tokens
    hours = scale.devices * point.time_s / 3600
    usd = None if question.price_usd is None else hours * question.price_usd
    expected = scale.predicted.get("tokens_per_s")
    return {
        **made,
        "tokens_per_s": point.rate,
        "tokens_per_s_per_device": point.rate / scale.devices,
        "spread": spread([run.tokens_per_s for run in scale.runs]),
        "step_s": median([run.step_s for run in scale.runs]),
        "steps": scale.runs[0].steps,
        "warmup_steps": max(run.warmup_steps for run in scale.runs),
        "speedup": None if row is None else row.speedup,
        "efficiency": None if row is None else row.efficiency,
        "marginal_gain": None if row is None else row.marginal_gain,
        "time_s": point.time_s,
        "time_spread": spread([run.solution_s(question.tokens) for run in scale.runs]),
        "time_speedup": None if row is None else row.time_speedup,
        "marginal_time": None if row is None else row.marginal_time,
        "startup_s": median([run.ledger.seconds["startup"] + run.ledger.seconds["restore"] for run in scale.runs]),
        "compile_s": median([run.ledger.seconds["compile"] for run in scale.runs]),
        "queue_s": median([run.ledger.seconds["queue"] for run in scale.runs]),
        "goodput": median([run.ledger.goodput for run in scale.runs]),
        "tokens": tokens,
        "device_hours": hours,
        "usd": usd,
        "tokens_per_device_hour": tokens / hours,
        "tokens_per_usd": tokens / usd if usd else None,
        "peak_bytes": max((run.peak_bytes for run in scale.runs if run.peak_bytes is not None), default=None),
        "predicted_tokens_per_s": expected,
        "measured_over_predicted": point.rate / expected if expected else None,
    }


def _law(study: Study) -> FittedLaw | None:
    law = study.law
    if law is None:
        return None
    fastest = law.fastest_devices
    return {
        "fixed_s": law.fixed_s,
        "work_s": law.work_s,
        "sync_s": law.sync_s,
        "worst_error": law.worst_error,
        "fastest_devices": fastest if math.isfinite(fastest) else None,
    }


def _step_unit(study: Study, scales: Sequence[Scale]) -> float:
    """Return the factor from the unit of the step law (seconds per token, times devices in weak scaling) to seconds per step."""
    first = next(scale for scale in scales if scale.runs)
    return first.runs[0].tokens_per_step / (first.devices if study.weak else 1)


def _step_law(study: Study, scales: Sequence[Scale]) -> FittedLaw | None:
    law = study.step_law
    if law is None:
        return None
    unit = _step_unit(study, scales)
    return {"fixed_s": law.fixed_s * unit, "work_s": law.work_s * unit, "sync_s": law.sync_s * unit, "worst_error": law.worst_error}


def _next(study: Study, scales: Sequence[Scale]) -> NextScale | None:
    if study.next_time is None:
        return None
    ahead, step = study.next_time, study.next_step
    first, last = study.ran[0], study.ran[-1]
    ratio = (study.next_value / last.value) if study.weak else 1.0
    found: NextScale = {
        "devices": study.next_value,
        "time_s": ahead.time_s,
        "time_low_s": ahead.low_s,
        "time_high_s": ahead.high_s,
        "marginal_time": None if last.time_s is None else ahead.time_s / (last.time_s * ratio) - 1,
    }
    if step is None:
        return found
    grown = study.next_value if study.weak else 1
    found["tokens_per_s"] = grown / step.time_s
    found["tokens_per_s_low"] = grown / step.high_s
    found["tokens_per_s_high"] = grown / step.low_s
    if first.rate is not None:
        found["efficiency"] = found["tokens_per_s"] / first.rate / (study.next_value / first.value)
    return found


def verdict(study: ScalingStudy) -> list[str]:
    """Return the verdict of a study in sentences, the most important first."""
    ran = [row for row in study["rows"] if row.get("failure") is None]
    lines = [f"{row['devices']} devices did not run: {row['failure']}" for row in study["rows"] if row.get("failure") is not None]
    if len(ran) < 2:
        return [*lines, "one scale ran: there is nothing to compare it with"]
    stop = study["stop"][study["objective"]]
    found = [f"for {_name(study, study['objective'])}, stop at {_devices(stop['devices'])}: {stop['why']}"]
    found += [*_noise(ran), _best_by_metric(ran, study), *_other_objectives(study), *_law_sentences(study, ran)]
    found += [*_next_sentences(study, ran), *_shared_cores(study), *_prediction(ran)]
    return [*found, *lines, *(f"doubt: {doubt}" for doubt in study["doubts"])]


def _name(study: ScalingStudy, objective: str) -> str:
    """Name the metric of an objective. In weak scaling the work differs from scale to scale, so time and cost are per token."""
    return NAMES[objective] if study["mode"] == "strong" or objective == "efficiency" else f"{objective} per token"


def duration(value_s: float) -> str:
    """Format a time with three digits; from a minute on in minutes, hours and days."""
    return format_seconds(value_s) if value_s < 60 else format_duration(value_s)


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def _best_by_metric(ran: Sequence[ScalingRow], study: ScalingStudy) -> str:
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
    text = "; ".join(f"{' and '.join(metrics)}: {_devices(devices)}" for devices, metrics in picks.items())
    return f"best by metric: {text}"


def _other_objectives(study: ScalingStudy) -> list[str]:
    mine = study["stop"][study["objective"]]["devices"]
    others = {name: found["devices"] for name, found in study["stop"].items() if found["devices"] != mine}
    if not others:
        return ["all objectives stop there"]
    return [
        "other objectives stop elsewhere: " + ", ".join(f"{_name(study, name)} at {_devices(devices)}" for name, devices in others.items())
    ]


def _law_sentences(study: ScalingStudy, ran: Sequence[ScalingRow]) -> list[str]:
    law = study["law"]
    if law is None:
        return [f"{len(ran)} scales ran: the law of fixed overhead, work and communication needs three"]
    written = ((law["fixed_s"], "fixed"), (law["work_s"], "of work / devices"), (law["sync_s"], "x log2(devices)"))
    terms = [f"{duration(value_s)} {words}" for value_s, words in written if value_s > 0]
    last = ran[-1]
    lines = [
        f"time to solution = {' + '.join(terms)} (worst error {law['worst_error']:.1%}); "
        f"the fixed part is {min(1.0, law['fixed_s'] / last['time_s']):.0%} of the time at {_devices(last['devices'])}"
    ]
    fastest = law.get("fastest_devices")
    if study["mode"] == "strong" and fastest is not None and fastest < 4 * last["devices"]:
        lines.append(
            f"by that law more than about {fastest:.0f} devices are slower" if fastest > 1 else "by that law one device is fastest"
        )
    return lines


def _next_sentences(study: ScalingStudy, ran: Sequence[ScalingRow]) -> list[str]:
    ahead = study["next"]
    if ahead is None:
        return []
    low, high = duration(ahead["time_low_s"]), duration(ahead["time_high_s"])
    text = f"the fit predicts {duration(ahead['time_s'])} ({low} to {high}) at {_devices(ahead['devices'])}"
    if "tokens_per_s" in ahead:
        rates = f"{format_count(ahead['tokens_per_s_low'])} to {format_count(ahead['tokens_per_s_high'])}"
        text += f", {format_count(ahead['tokens_per_s'])} tokens/s ({rates})"
    gain = -(ahead["marginal_time"] or 0.0)
    per = " per token" if study["mode"] == "weak" else ""
    worth = "worth trying for time" if gain >= WORTHWHILE else "not worth it for time"
    changes = f"{abs(gain):.0%} {'less' if gain >= 0 else 'more'} time{per} than at {_devices(ran[-1]['devices'])}"
    return [f"{text}: {changes}, {worth}"]


def _noise(ran: Sequence[ScalingRow]) -> list[str]:
    """Name the steps between scales that are within the spread of the repeats."""
    fewest = min(row["repeats"] for row in ran)
    if fewest < 2:
        return [f"one run at some scales: small differences may be noise (--repeats {ENOUGH_REPEATS})"]
    lines = []
    for before, after in pairwise(ran):
        both, gain = before["spread"] + after["spread"], after["marginal_gain"]
        if gain is not None and abs(gain) <= both:
            lines.append(
                f"{before['devices']} to {after['devices']} devices: {gain:+.1%} tokens/s is within the spread of the repeats "
                f"(+-{both:.1%}): cannot tell"
            )
    return lines


def _shared_cores(study: ScalingStudy) -> list[str]:
    cores = study.get("cores")
    if cores is None:
        return []
    return [f"all devices are virtual and share {cores} cores: this measures overheads, not the effect of more hardware"]


def _prediction(ran: Sequence[ScalingRow]) -> list[str]:
    """Compare with the planner, or name the reason why there is no prediction."""
    compared = [row for row in ran if row.get("measured_over_predicted")]
    if not compared:
        reasons = dict.fromkeys(row["prediction"].get("why_none") for row in ran)
        return [f"no prediction to compare with: {reason}" for reason in reasons if reason]
    shares = {row["devices"]: share for row in compared if (share := row.get("measured_over_predicted")) is not None}
    devices, share = max(shares.items(), key=lambda item: abs(item[1] - 1))
    cluster = next(row["prediction"].get("cluster") for row in compared if row["devices"] == devices)
    return [f"planner ({cluster}): measured {share:.0%} of the predicted tokens/s at {_devices(devices)}, the largest difference"]
