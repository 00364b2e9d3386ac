"""Rules on several runs: scales and batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.configs.diff import MISSING
from ridgeline.explain.diagnosis import remedies
from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.explain.diagnosis.finding import PATTERNS, THRESHOLDS, Finding, ceiling, over
from ridgeline.explain.study.scaling import Objective, Row, Study, stopping_point

OBJECTIVES: tuple[Objective, ...] = ("time", "cost", "efficiency")


def flat_batch(facts: Facts) -> Finding | None:
    """Throughput no longer grows with the batch: the device is saturated."""
    rows = _ran(facts.batch_study)
    last = rows[-1] if rows else None
    if last is None or last.marginal_gain is None or over("flat_batch", last.marginal_gain):
        return None
    return Finding(
        rule="throughput flat as the batch grows",
        confidence="high",
        gain=0.0,
        lens="balanced pipelines",
        pattern=PATTERNS["bottlenecks move"],
        evidence=(f"batch {rows[-2].devices} to {last.devices}: {last.marginal_gain:+.1%} tokens/s",),
        measure_next="ridge analyze: share of the memory ceiling, the longest kernels",
        action=f"data.batch_size={rows[-2].devices}: keep the smaller batch; fuse kernels, or accept",
        next_bottleneck="memory bandwidth",
        overrides=(f"data.batch_size={rows[-2].devices}",),
    )


def small_batch(facts: Facts) -> Finding | None:
    """Throughput still grows steeply with the batch: overheads are not amortised."""
    rows = _ran(facts.batch_study)
    here = facts.config.data.batch_size if facts.config is not None else None
    later = [row for row in rows if here is not None and row.devices > here and row.rate]
    mine = next((row for row in rows if row.devices == here and row.rate), None)
    if mine is None or not later:
        return None
    best = max(later, key=lambda row: row.rate or 0.0)
    gain = (best.rate or 0.0) / (mine.rate or 1.0) - 1
    if not over("small_batch", gain):
        return None
    return Finding(
        rule="batch too small",
        confidence="high",
        gain=gain,
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=(f"batch {mine.devices}: {mine.rate:,.0f} tokens/s; batch {best.devices}: {best.rate:,.0f}",),
        measure_next="the loss at equal tokens: is the larger batch below the critical one (ridge estimate batch)",
        action=f"data.batch_size={best.devices}",
        next_bottleneck="memory capacity, then bandwidth",
        overrides=(f"data.batch_size={best.devices}",),
    )


def time_barely_down(facts: Facts) -> Finding | None:
    """More devices: throughput up, time barely down."""
    rows = _ran(facts.study)
    if facts.study is None or not _barely_down(rows):
        return None
    last = rows[-1]
    stop, why = stopping_point(facts.study, "time", worthwhile=THRESHOLDS["worthwhile"][0])
    chosen = next(row for row in rows if row.devices == stop)
    fixed = "" if facts.study.law is None else f"; {facts.study.law.fixed_s:.0f} s do not shrink with the scale"
    rate, less = last.marginal_gain or 0.0, -(last.marginal_time or 0.0)
    change = f"only {less:.1%} less time" if less >= 0 else f"{-less:.1%} more time"
    return Finding(
        rule="fixed overheads at scale",
        confidence="high",
        gain=last.cost / chosen.cost - 1 if last.cost and chosen.cost else 0.0,
        lens="amortisation",
        pattern=PATTERNS["metrics differ"],
        evidence=(f"{last.devices} devices: {rate:+.0%} throughput, but {change}{fixed}",),
        measure_next="ridge goodput of both runs: start-up, compilation, evaluation",
        action=f"use {stop} device(s): {why}",
        next_bottleneck="the steps themselves, once the fixed part is amortised",
        **_at(facts, stop),
    )


def _barely_down(rows: Sequence[Row]) -> bool:
    """Whether the last step up brought throughput and hardly any time."""
    last = rows[-1] if rows else None
    if last is None or last.marginal_time is None or not over("throughput_up", last.marginal_gain):
        return False
    return not over("worthwhile", -last.marginal_time)


def efficiency_falls(facts: Facts) -> Finding | None:
    """Parallel efficiency falls sharply."""
    rows = _ran(facts.study)
    bad = [row for row in rows[1:] if row.efficiency is not None and row.efficiency < THRESHOLDS["efficiency"][0]]
    if not bad or facts.study is None:
        return None
    first = bad[0]
    stop, _ = stopping_point(facts.study, "efficiency", least_efficiency=THRESHOLDS["efficiency"][0])
    chosen = next(row for row in rows if row.devices == stop)
    least = THRESHOLDS["efficiency"][0]
    beyond_noise = any(row.efficiency is not None and row.efficiency * (1 + row.spread + rows[0].spread) < least for row in bad)
    return Finding(
        rule="parallel efficiency falls",
        confidence="high" if beyond_noise else "low",
        gain=max(0.0, (chosen.efficiency or 1.0) / (rows[-1].efficiency or 1.0) - 1),
        lens="amortisation",
        pattern=PATTERNS["amortisation"],
        evidence=tuple(f"{row.devices} devices: efficiency {row.efficiency:.0%}" for row in bad[:3]),
        measure_next="ridge analyze at that scale: communication and waiting for the slowest",
        action=f"use {stop} device(s), give each more work, or another layout (ridge plan --nodes)",
        next_bottleneck=f"communication, from {first.devices} devices on",
        **_at(facts, stop),
    )


def large_scales_better(facts: Facts) -> Finding | None:
    """A large model keeps its efficiency where a small one loses it: more compute for every byte and every fixed overhead."""
    studies = {size: _efficiencies(study) for size, study in facts.size_studies.items()}
    common = set.intersection(*(set(rows) for rows in studies.values())) if len(studies) > 1 else set()
    if not common:
        return None
    scale, small, large = max(common), min(studies), max(studies)
    low, high = studies[small][scale], studies[large][scale]
    if low >= THRESHOLDS["efficiency"][0] or not over("size_gap", high - low):
        return None
    stop, _ = stopping_point(facts.size_studies[small], "efficiency", least_efficiency=THRESHOLDS["efficiency"][0])
    return Finding(
        rule="large models scale better than small",
        confidence="high" if len(studies) > 2 or high - low > 2 * THRESHOLDS["size_gap"][0] else "medium",
        gain=ceiling(1 - low),
        lens="amortisation",
        pattern=PATTERNS["bigger costs more"],
        evidence=tuple(
            f"{size / 1e6:,.2f} M parameters on {scale} devices: efficiency {rows[scale]:.0%}, "
            f"{_work_over_overhead(rows[scale])} s of compute per s of communication and overhead"
            for size, rows in sorted(studies.items())
        ),
        measure_next="ridge analyze of both sizes at that scale: compute against exposed communication",
        action=f"accept if the goal needs the large model; run the small one on {stop} device(s), or give each more work"
        + (f": data.batch_size={2 * facts.config.data.batch_size}" if facts.config is not None else ": a larger data.batch_size"),
        next_bottleneck="the bill: every token of the larger model costs more",
        **_at(facts, stop),
    )


def _efficiencies(study: Study) -> dict[int, float]:
    """Return scale -> parallel efficiency of the scales above the smallest."""
    return {row.devices: row.efficiency for row in _ran(study)[1:] if row.efficiency is not None}


def _work_over_overhead(efficiency: float) -> str:
    return f"{efficiency / (1 - efficiency):.1f}" if efficiency < 0.995 else "more than 200"


def fragile(facts: Facts) -> Finding | None:
    """Many performance settings buy little over a run without them: faster, but fragile."""
    rival = facts.simpler
    if rival is None or not over("fragile_knobs", len(rival.knobs)):
        return None
    if rival.comparison.verdict == "faster" and over("fragile_gain", rival.gain):
        return None
    restored = [f"{knob.key}={_plain(knob.default)}" for knob in rival.knobs if not _is_flag(knob.key) and knob.default != MISSING]
    dropped = [knob.key for knob in rival.knobs if _is_flag(knob.key) or knob.default == MISSING]
    without = f"unset {', '.join(dropped)}" if dropped else ""
    return Finding(
        rule="faster but fragile",
        confidence="medium" if rival.comparison.verdict == "faster" else "high",
        gain=max(0.0, rival.comparison.ratio - 1) if rival.comparison.verdict == "slower" else 0.0,
        lens="co-design",
        pattern=PATTERNS["complexity"],
        evidence=(
            f"{len(rival.knobs)} performance settings beyond {rival.name}: {', '.join(map(str, rival.knobs))}",
            f"step time against {rival.name}: {rival.comparison.describe()}",
        ),
        measure_next="each setting alone against the simpler run: which one carries the gain; then on another device or version",
        action=f"prefer the simpler option: {'; '.join(part for part in (' '.join(restored), without) if part)}",
        next_bottleneck="what binds the simpler run: ridge diagnose of it",
        overrides=tuple(restored),
        command=f"env {' '.join(f'-u {name}' for name in _variables(dropped))} {remedies.train(facts)}" if dropped else None,
    )


def _plain(value: object) -> str:
    """Write a value as an override reads it."""
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)


def _variables(dropped: Sequence[str]) -> list[str]:
    """The variables that hold these flags."""
    return sorted({"XLA_FLAGS" if name.startswith("--") else name for name in dropped})


def _at(facts: Facts, devices: int) -> dict[str, Any]:
    """The overrides that run it on this many devices; where a mesh of the same shape cannot have them, the study that finds one."""
    overrides = remedies.rescaled(facts, devices)
    return {"overrides": overrides} if overrides else {"command": remedies.compared(facts, [devices])}


def _is_flag(key: str) -> bool:
    """Whether a setting is an XLA flag or a variable, not a key of the config."""
    return key.startswith("--") or key.isupper()


def dearest(facts: Facts) -> Finding | None:
    """The fastest configuration costs much more than the cheapest, and is worth its time."""
    rows = [row for row in _ran(facts.study) if row.cost is not None and row.time_s is not None]
    if len(rows) < 2 or _barely_down(rows):
        return None
    fastest, cheapest = min(rows, key=lambda r: r.time_s or 0.0), min(rows, key=lambda r: r.cost or 0.0)
    ratio = (fastest.cost or 0.0) / (cheapest.cost or 1.0)
    wasted = fastest.efficiency is not None and fastest.efficiency < THRESHOLDS["efficiency"][0]
    if wasted or fastest.devices == cheapest.devices or not over("dear", ratio - 1):
        return None
    return Finding(
        rule="best configuration is also the dearest",
        confidence="high",
        gain=ratio - 1,
        lens="purpose",
        pattern=PATTERNS["cost"],
        evidence=(
            f"{fastest.devices} devices: {fastest.time_s:.0f} s at {ratio:.1f} times the cost of "
            f"{cheapest.devices} devices ({cheapest.time_s:.0f} s)",
        ),
        measure_next="cost per 1e9 tokens beside the time each objective allows",
        action=f"choose by budget: {cheapest.devices} devices for money, {fastest.devices} for time",
        next_bottleneck="the budget",
        **_at(facts, cheapest.devices),
    )


def verdict_depends(facts: Facts) -> Finding | None:
    """Objectives name different scales."""
    if facts.study is None:
        return None
    picks = {name: stopping_point(facts.study, name)[0] for name in OBJECTIVES}
    if len(set(picks.values())) < 3:
        return None
    rows = {row.devices: row for row in _ran(facts.study)}
    fast, cheap = rows[picks["time"]], rows[picks["cost"]]
    slower, dearer = _ratio(cheap.time_s, fast.time_s), _ratio(fast.cost, cheap.cost)
    return Finding(
        rule="the verdict depends on the metric",
        confidence="high",
        gain=max(slower, dearer) - 1,
        lens="purpose",
        pattern=PATTERNS["metrics differ"],
        evidence=tuple(f"{name}: stop at {_scale(rows[devices])}" for name, devices in picks.items()),
        measure_next="throughput, efficiency and time to solution side by side",
        action="state the objective first: --objective time, cost or efficiency",
        next_bottleneck="depends on the objective",
        command=remedies.compared(facts, sorted(rows), "--objective", "cost"),
    )


def _ratio(one: float | None, other: float | None) -> float:
    return one / other if one and other else 1.0


def _scale(row: Row) -> str:
    figures = [f"{row.time_s:.0f} s" if row.time_s is not None else "", f"efficiency {row.efficiency:.0%}" if row.efficiency else ""]
    return f"{row.devices} devices ({', '.join(figure for figure in figures if figure)})"


def _ran(study: Study | None) -> Sequence[Row]:
    return [] if study is None else [row for row in study.rows if row.failure is None]
