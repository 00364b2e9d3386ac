"""A scaling study as a document: what ran at each scale, what follows from it, and what it says in words (study.json).

Figures: finished runs (explain/study/measured.py); analysis: explain/study/scaling.py. Failed scales are rows with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.rules import check_devices
from ridgeline.configs.schema import Config
from ridgeline.explain.study.measured import MeasuredRun
from ridgeline.explain.study.scaling import Objective, Point, Row, Study, analyse, stopping_point
from ridgeline.explain.study.words import verdict
from ridgeline.rundir.noise import median, spread

FORMAT = 1
OBJECTIVES: tuple[Objective, ...] = ("time", "cost", "efficiency")


@dataclass(frozen=True)
class Scale:
    """What was tried at one scale."""

    devices: int
    runs: Sequence[MeasuredRun] = ()
    """Finished ones; several are repeats."""
    failures: Sequence[str] = ()
    """Why the others have no figures, in words."""
    nodes: int | None = None
    mesh: str = ""
    """Sizes of the axes, as in fsdp=4."""
    batch_size: int | None = None
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """`tokens_per_s` and `step_s` of the planner with `cluster`, or `why_none`."""


@dataclass(frozen=True)
class Question:
    """What the study is to answer."""

    objective: Objective = "time"
    weak: bool = False
    price_usd: float | None = None
    """Of one device and hour."""
    tokens: float | None = None
    """Of the run whose time to solution is asked for; None: of the runs that were made."""


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
    """Say the axes larger than 1."""
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
    """Analyse a study; None while fewer than two scales have figures."""
    points = [point_of(scale, question) for scale in scales]
    if sum(point.failure is None for point in points) < 2:
        return None
    return analyse(points, price_per_device_hour=question.price_usd or 1.0)  # free devices: device-hours


def document(name: str, scales: Sequence[Scale], question: Question, **more: Any) -> dict[str, Any]:
    """Return the study as plain values; `more` are further keys (where it ran, what was changed).

    Raises UserError when no scale ran at all.
    """
    if not any(scale.runs for scale in scales):
        reasons = "; ".join(dict.fromkeys(f"{s.devices} devices: {reason}" for s in scales for reason in s.failures))
        raise UserError(f"no scale of this study ran: {reasons or 'nothing was started'}")
    ordered = sorted(scales, key=lambda scale: scale.devices)
    study = analysis_of(ordered, question)
    derived: dict[int, Row] = {} if study is None else {row.devices: row for row in study.rows}
    made: dict[str, Any] = {
        "format": FORMAT,
        "kind": "scaling",
        "name": name,
        "mode": "weak" if question.weak else "strong",
        "objective": question.objective,
        "price_usd": question.price_usd,
        "tokens": question.tokens,
        **more,
        "rows": [_row(scale, derived.get(scale.devices), question) for scale in ordered],
        "law": None if study is None else _law(study),
        "step_law": None if study is None else _step_law(study, ordered),
        "next": None if study is None else _next(study, ordered),
        "stop": {} if study is None else {o: dict(zip(("devices", "why"), stopping_point(study, o), strict=True)) for o in OBJECTIVES},
        "doubts": [] if study is None else list(study.doubts),
    }
    return made | {"verdict": verdict(made)}


def _row(scale: Scale, row: Row | None, question: Question) -> dict[str, Any]:
    point = point_of(scale, question)
    made: dict[str, Any] = {
        "devices": scale.devices,
        "nodes": scale.nodes,
        "mesh": scale.mesh,
        "batch_size": scale.batch_size,
        "runs": [str(run.path) for run in scale.runs],
        "repeats": len(scale.runs),
        "failures": list(scale.failures),
        "failure": point.failure,
        "prediction": dict(scale.predicted),
    }
    if not scale.runs or point.time_s is None or point.rate is None:
        return made
    tokens = question.tokens or scale.runs[0].tokens
    hours = scale.devices * point.time_s / 3600
    usd = None if question.price_usd is None else hours * question.price_usd
    expected = scale.predicted.get("tokens_per_s")
    return made | {
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


def _law(study: Study) -> dict[str, Any] | None:
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
    """Return what the step law's unit (seconds per token, times devices in weak scaling) is to be multiplied with to be a step."""
    first = next(scale for scale in scales if scale.runs)
    return first.runs[0].tokens_per_step / (first.devices if study.weak else 1)


def _step_law(study: Study, scales: Sequence[Scale]) -> dict[str, Any] | None:
    law = study.step_law
    if law is None:
        return None
    unit = _step_unit(study, scales)
    return {"fixed_s": law.fixed_s * unit, "work_s": law.work_s * unit, "sync_s": law.sync_s * unit, "worst_error": law.worst_error}


def _next(study: Study, scales: Sequence[Scale]) -> dict[str, Any] | None:
    if study.next_time is None:
        return None
    ahead, step = study.next_time, study.next_step
    last = next(row for row in reversed(study.rows) if row.failure is None)
    ratio = (study.next_devices / last.devices) if study.weak else 1.0
    made: dict[str, Any] = {
        "devices": study.next_devices,
        "time_s": ahead.time_s,
        "time_low_s": ahead.low_s,
        "time_high_s": ahead.high_s,
        "marginal_time": None if last.time_s is None else ahead.time_s / (last.time_s * ratio) - 1,
    }
    if step is None:
        return made
    grown = study.next_devices if study.weak else 1
    rates = {"tokens_per_s": step.time_s, "tokens_per_s_low": step.high_s, "tokens_per_s_high": step.low_s}
    made |= {key: grown / value for key, value in rates.items()}
    first = next(row for row in study.rows if row.failure is None)
    if first.rate is not None:
        made["efficiency"] = made["tokens_per_s"] / first.rate / (study.next_devices / first.devices)
    return made
