"""Rules on several runs: scales and batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.configs.diff import MISSING
from ridgeline.configs.format import plural
from ridgeline.explain.diagnosis import remedies
from ridgeline.explain.diagnosis.facts import Facts
from ridgeline.explain.diagnosis.finding import PATTERNS, THRESHOLDS, Finding, ceiling, over
from ridgeline.explain.study.analysis import Row, Study, stopping_point
from ridgeline.planner.search import Objective

OBJECTIVES: tuple[Objective, ...] = ("time", "cost", "efficiency")


def flat_batch(facts: Facts) -> Finding | None:
    """Throughput no longer grows with the batch size: the device is saturated."""
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
        evidence=(f"batch {rows[-2].value} to {last.value}: {last.marginal_gain:+.1%} tokens/s",),
        measure_next="share of the memory roofline, and the longest kernels (ridge analyze)",
        action=f"keep data.batch_size={rows[-2].value}: the larger batch gains nothing; fuse kernels to go faster",
        overrides=(f"data.batch_size={rows[-2].value}",),
    )


def small_batch(facts: Facts) -> Finding | None:
    """Throughput still grows steeply with the batch size: overheads are not amortized."""
    rows = _ran(facts.batch_study)
    here = facts.config.data.batch_size if facts.config is not None else None
    later = [row for row in rows if here is not None and row.value > here and row.rate]
    mine = next((row for row in rows if row.value == here and row.rate), None)
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
        lens="amortization",
        pattern=PATTERNS["amortization"],
        evidence=(f"batch {mine.value}: {mine.rate:,.0f} tokens/s; batch {best.value}: {best.rate:,.0f}",),
        measure_next="the loss at equal tokens: whether the larger batch is below the critical batch size (ridge estimate batch)",
        action=f"set data.batch_size={best.value}",
        next_bottleneck=f"batch {rows[-2].value} to {rows[-1].value} gains {rows[-1].marginal_gain or 0.0:+.0%}; memory is the limit",
        overrides=(f"data.batch_size={best.value}",),
    )


def time_barely_down(facts: Facts) -> Finding | None:
    """More devices raise the throughput and hardly reduce the time to solution."""
    rows = _ran(facts.study)
    if facts.study is None or not _barely_down(rows):
        return None
    last = rows[-1]
    stop, why = stopping_point(facts.study, "time", worthwhile=THRESHOLDS["worthwhile"][0])
    chosen = next(row for row in rows if row.value == stop)
    fixed = "" if facts.study.law is None else f"; {facts.study.law.fixed_s:.0f} s do not depend on the scale"
    rate, less = last.marginal_gain or 0.0, -(last.marginal_time or 0.0)
    change = f"only {less:.1%} less time" if less >= 0 else f"{-less:.1%} more time"
    return Finding(
        rule="fixed overheads at scale",
        confidence="high",
        gain=last.cost / chosen.cost - 1 if last.cost and chosen.cost else 0.0,
        lens="amortization",
        pattern=PATTERNS["metrics differ"],
        evidence=(f"{last.value} devices: {rate:+.0%} throughput, but {change}{fixed}",),
        measure_next="start-up, compilation and evaluation of both runs (ridge goodput)",
        action=f"use {plural(stop, 'device')}: {why}",
        next_bottleneck=_lost(chosen),
        **_at(facts, stop),
    )


def _barely_down(rows: Sequence[Row]) -> bool:
    """Whether the last increase in scale raised the throughput and hardly reduced the time."""
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
    stop, _ = stopping_point(facts.study, "efficiency", least_efficiency=THRESHOLDS["efficiency"][0])
    chosen = next(row for row in rows if row.value == stop)
    least = THRESHOLDS["efficiency"][0]
    beyond_noise = any(row.efficiency is not None and row.efficiency * (1 + row.spread + rows[0].spread) < least for row in bad)
    return Finding(
        rule="parallel efficiency falls",
        confidence="high" if beyond_noise else "low",
        gain=max(0.0, (chosen.efficiency or 1.0) / (rows[-1].efficiency or 1.0) - 1),
        lens="amortization",
        pattern=PATTERNS["amortization"],
        evidence=tuple(f"{row.value} devices: efficiency {row.efficiency:.0%}" for row in bad[:3]),
        measure_next="communication and stragglers at that scale (ridge analyze)",
        action=f"use {plural(stop, 'device')}, or increase the work per device, or change the layout (ridge plan --nodes)",
        next_bottleneck=_lost(chosen),
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
        lens="amortization",
        pattern=PATTERNS["bigger costs more"],
        evidence=tuple(
            f"{size / 1e6:,.2f} M parameters on {scale} devices: efficiency {rows[scale]:.0%}, "
            f"{_work_over_overhead(rows[scale])} s of compute per s of communication and overhead"
            for size, rows in sorted(studies.items())
        ),
        measure_next="compute and exposed communication of both sizes at that scale (ridge analyze)",
        action=f"accept it if the goal needs the large model; run the small one on {plural(stop, 'device')}, or give each more work: "
        + (f"data.batch_size={2 * facts.config.data.batch_size}" if facts.config is not None else "a larger data.batch_size"),
        next_bottleneck=f"communication and overheads ({1 - low:.0%} of the time of the small model, {1 - high:.0%} of the large one)",
        **_at(facts, stop),
    )


def _efficiencies(study: Study) -> dict[int, float]:
    """Return scale -> parallel efficiency of the scales above the smallest."""
    return {row.value: row.efficiency for row in _ran(study)[1:] if row.efficiency is not None}


def _work_over_overhead(efficiency: float) -> str:
    return f"{efficiency / (1 - efficiency):.1f}" if efficiency < 0.995 else "more than 200"


def fragile(facts: Facts) -> Finding | None:
    """Many performance settings gain little over a run without them."""
    simpler = facts.simpler
    if simpler is None or not over("fragile_knobs", len(simpler.settings)):
        return None
    if simpler.comparison.verdict == "faster" and over("fragile_gain", simpler.gain):
        return None
    restored = [
        f"{setting.key}={_plain(setting.default)}"
        for setting in simpler.settings
        if not _is_flag(setting.key) and setting.default != MISSING
    ]
    dropped = [setting.key for setting in simpler.settings if _is_flag(setting.key) or setting.default == MISSING]
    without = f"unset {', '.join(dropped)}" if dropped else ""
    return Finding(
        rule="faster but fragile",
        confidence="medium" if simpler.comparison.verdict == "faster" else "high",
        gain=max(0.0, simpler.comparison.ratio - 1) if simpler.comparison.verdict == "slower" else 0.0,
        lens="co-design",
        pattern=PATTERNS["complexity"],
        evidence=(
            f"{len(simpler.settings)} performance settings beyond {simpler.name}: {', '.join(map(str, simpler.settings))}",
            f"step time against {simpler.name}: {simpler.comparison.describe()}",
        ),
        measure_next="each setting alone against the simpler run, to find the one that gains; then another device or version",
        action=f"use the simpler run: {'; '.join(part for part in (' '.join(restored), without) if part)}",
        overrides=tuple(restored),
        command=f"env {' '.join(f'-u {name}' for name in _variables(dropped))} {remedies.train(facts)}" if dropped else None,
    )


def _plain(value: object) -> str:
    """Format a value as an override."""
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)


def _variables(dropped: Sequence[str]) -> list[str]:
    """Return the environment variables that contain these flags."""
    return sorted({"XLA_FLAGS" if name.startswith("--") else name for name in dropped})


def _at(facts: Facts, devices: int) -> dict[str, Any]:
    """Return the overrides for this many devices; where the mesh cannot be rescaled, the command of a study at that scale."""
    overrides = remedies.rescaled(facts, devices)
    return {"overrides": overrides} if overrides else {"command": remedies.compared(facts, [devices])}


def _is_flag(key: str) -> bool:
    """Whether a setting is an XLA flag or an environment variable, not a config key."""
    return key.startswith("--") or key.isupper()


def dearest(facts: Facts) -> Finding | None:
    """The fastest configuration costs much more than the cheapest, at good efficiency."""
    rows = [row for row in _ran(facts.study) if row.cost is not None and row.time_s is not None]
    if len(rows) < 2 or _barely_down(rows):
        return None
    fastest, cheapest = min(rows, key=lambda r: r.time_s or 0.0), min(rows, key=lambda r: r.cost or 0.0)
    ratio = (fastest.cost or 0.0) / (cheapest.cost or 1.0)
    wasted = fastest.efficiency is not None and fastest.efficiency < THRESHOLDS["efficiency"][0]
    if wasted or fastest.value == cheapest.value or not over("dear", ratio - 1):
        return None
    return Finding(
        rule="best configuration is also the dearest",
        confidence="high",
        gain=ratio - 1,
        lens="purpose",
        pattern=PATTERNS["cost"],
        evidence=(
            f"{fastest.value} devices take {fastest.time_s:.0f} s at {ratio:.1f} times the cost of "
            f"{cheapest.value} devices ({cheapest.time_s:.0f} s)",
        ),
        measure_next="cost per 1e9 tokens, and the time that the project allows",
        action=f"choose by objective: {cheapest.value} devices for cost, {fastest.value} for time",
        next_bottleneck=_lost(cheapest),
        **_at(facts, cheapest.value),
    )


def verdict_depends(facts: Facts) -> Finding | None:
    """Each objective has another best scale."""
    if facts.study is None:
        return None
    picks = {name: stopping_point(facts.study, name)[0] for name in OBJECTIVES}
    if len(set(picks.values())) < 3:
        return None
    rows = {row.value: row for row in _ran(facts.study)}
    fast, cheap = rows[picks["time"]], rows[picks["cost"]]
    slower, dearer = _ratio(cheap.time_s, fast.time_s), _ratio(fast.cost, cheap.cost)
    return Finding(
        rule="the verdict depends on the metric",
        confidence="high",
        gain=max(slower, dearer) - 1,
        lens="purpose",
        pattern=PATTERNS["metrics differ"],
        evidence=tuple(f"{name}: stop at {_scale(rows[devices])}" for name, devices in picks.items()),
        measure_next="throughput, efficiency and time to solution at each scale (ridge report)",
        action="choose the objective first: --objective time, cost or efficiency",
        next_bottleneck="; ".join(f"for {name}: {_lost(rows[devices])}" for name, devices in picks.items()),
        command=remedies.compared(facts, sorted(rows), "--objective", "cost"),
    )


def _lost(row: Row) -> str:
    """Describe the time at a scale that is not the work of the smallest scale, divided by the devices."""
    if row.efficiency is None:
        return f"unknown on {row.value} device(s): no efficiency was measured"
    return f"communication and overheads ({max(0.0, 1 - row.efficiency):.0%} of the time on {row.value} device(s))"


def _ratio(one: float | None, other: float | None) -> float:
    return one / other if one and other else 1.0


def _scale(row: Row) -> str:
    figures = [f"{row.time_s:.0f} s" if row.time_s is not None else "", f"efficiency {row.efficiency:.0%}" if row.efficiency else ""]
    return f"{row.value} devices ({', '.join(figure for figure in figures if figure)})"


def _ran(study: Study | None) -> Sequence[Row]:
    return [] if study is None else study.ran
