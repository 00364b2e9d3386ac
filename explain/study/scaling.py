"""Scaling studies: from times and rates at several scales to efficiency, money, a fitted law, and where to stop.

Strong scaling: the same work on more devices; weak scaling: work that grows with the devices, so that every device always does the same.
The law of explain/study/law.py is fitted to the times to solution and to the times of a step.

Parallel efficiency is the speedup in rate (or in time per unit of work) over the ratio of the devices, against the smallest scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from ridgeline.configs.errors import UserError
from ridgeline.explain.study.law import Forecast, Law, fit_law, forecast

Objective = Literal["time", "cost", "efficiency"]


@dataclass(frozen=True)
class Point:
    """What was measured at one scale. A failed run is a point without figures."""

    devices: int
    time_s: float | None = None
    """Time to solution: the whole run, start-up and compilation included."""
    rate: float | None = None
    """Units of work per second in steady state, over all devices (tokens/s, images/s)."""
    spread: float = 0.0
    """Relative half-width of the repeats (0: one run)."""
    failure: str | None = None
    work: float | None = None
    """Units of work of the whole run; None: the same at every scale (strong scaling)."""

    @property
    def unit_time_s(self) -> float | None:
        """Time to solution per unit of work; of all of it where it is the same at every scale."""
        return None if self.time_s is None else self.time_s / (self.work or 1.0)


@dataclass(frozen=True)
class Row:
    """One scale, derived."""

    devices: int
    time_s: float | None = None
    rate: float | None = None
    speedup: float | None = None
    """Of the rate; of the time where there is no rate."""
    efficiency: float | None = None
    time_speedup: float | None = None
    time_efficiency: float | None = None
    marginal_gain: float | None = None
    """Relative gain in rate (or speed) over the scale before it."""
    marginal_time: float | None = None
    """Relative change of the time to solution (per unit of work) over the scale before it; negative is a gain."""
    cost: float | None = None
    """Device-hours of the whole run times price; without a price, device-hours."""
    unit_cost: float | None = None
    """Cost of a unit of work; of the whole run where the work is the same at every scale."""
    rate_per_device: float | None = None
    spread: float = 0.0
    """Relative half-width of the repeats."""
    failure: str | None = None


@dataclass(frozen=True)
class Study:
    """The analysis of a scaling study."""

    rows: tuple[Row, ...]
    law: Law | None
    """Of the times to solution; None with fewer than three of them."""
    next_devices: int
    next_time_s: float | None
    """The law's prediction for the next doubling."""
    weak: bool = False
    """Whether the work grows with the devices."""
    next_time: Forecast | None = None
    """`next_time_s` with its interval."""
    step_law: Law | None = None
    """Of the time of a step, up to a constant: devices over rate in weak scaling, 1 over rate otherwise; None with fewer than three."""
    next_step: Forecast | None = None
    """The step law's prediction for the next doubling, with its interval."""
    doubts: tuple[str, ...] = field(default=())
    """What in the figures contradicts itself or the law."""


def analyse(points: Sequence[Point], *, price_per_device_hour: float = 1.0) -> Study:
    """Analyse a study: weak scaling when the points say that their work differs, else strong scaling.

    Raises:
      UserError: fewer than two scales have figures, scales repeat, or a figure is not positive.
    """
    ordered = sorted(points, key=lambda point: point.devices)
    good = [p for p in ordered if p.failure is None and (p.time_s is not None or p.rate is not None)]
    if len(good) < 2:
        raise UserError(f"a scaling study needs at least two scales that ran; {len(good)} of {len(points)} did")
    if len({p.devices for p in ordered}) < len(ordered):
        raise UserError(f"a scale appears twice in the study: {[p.devices for p in ordered]}; give repeats as one point with a spread")
    for p in good:
        if p.devices < 1 or min(p.time_s or 1, p.rate or 1) <= 0:
            raise UserError(f"devices, times and rates must be positive; got {p}")
    weak = len({p.work for p in good}) > 1
    if weak and not all(p.work for p in good):
        raise UserError("the work of some scales is known and that of others is not: they cannot be compared")
    rows = _rows(ordered, good[0], price_per_device_hour)
    timed = [p for p in good if p.time_s is not None]
    following = 2 * good[-1].devices
    law, next_time = _fitted(timed, [p.time_s or 0.0 for p in timed], following, weak)
    rated = [p for p in good if p.rate is not None]
    steps = [(p.devices if weak else 1) / (p.rate or 1.0) for p in rated]
    step_law, next_step = _fitted(rated, steps, following, weak)
    doubts = _superlinear(rows) + (_below_the_floor(timed) if law is not None and not weak else [])
    next_time_s = None if next_time is None else next_time.time_s
    return Study(tuple(rows), law, following, next_time_s, weak, next_time, step_law, next_step, tuple(doubts))


def _fitted(points: Sequence[Point], times_s: Sequence[float], at: int, weak: bool) -> tuple[Law | None, Forecast | None]:
    """Fit the law to three times or more (weak scaling has a term less: two are a line through anything, too) and look one scale ahead."""
    if len(points) < 3:
        return None, None
    devices = [p.devices for p in points]
    law = fit_law(devices, times_s, work=not weak)
    return law, forecast(law, devices, times_s, [p.spread for p in points], at, work=not weak)


def _rows(ordered: Sequence[Point], base: Point, price: float) -> list[Row]:
    rows: list[Row] = []
    previous: Point | None = None
    for p in ordered:
        if p.failure is not None or (p.time_s is None and p.rate is None):
            rows.append(Row(p.devices, failure=p.failure or "no figures"))
            continue
        ratio = p.devices / base.devices
        time_speedup = base.unit_time_s / p.unit_time_s if base.unit_time_s and p.unit_time_s else None
        rate_speedup = p.rate / base.rate if base.rate and p.rate else None
        speedup = rate_speedup if rate_speedup is not None else time_speedup
        before = None if previous is None else _relative(previous.rate, p.rate)
        if before is None and previous is not None and previous.unit_time_s and p.unit_time_s:
            before = previous.unit_time_s / p.unit_time_s - 1
        cost = None if p.time_s is None else p.devices * p.time_s / 3600 * price
        rows.append(
            Row(
                devices=p.devices,
                time_s=p.time_s,
                rate=p.rate,
                speedup=speedup,
                efficiency=None if speedup is None else speedup / ratio,
                time_speedup=time_speedup,
                time_efficiency=None if time_speedup is None else time_speedup / ratio,
                marginal_gain=before,
                marginal_time=None if previous is None else _relative(previous.unit_time_s, p.unit_time_s),
                cost=cost,
                unit_cost=None if cost is None else cost / (p.work or 1.0),
                rate_per_device=None if p.rate is None else p.rate / p.devices,
                spread=p.spread,
            )
        )
        previous = p
    return rows


def _relative(old: float | None, new: float | None) -> float | None:
    return None if not old or new is None else new / old - 1


def stopping_point(study: Study, objective: Objective, *, worthwhile: float = 0.1, least_efficiency: float = 0.8) -> tuple[int, str]:
    """Say at which measured scale to stop for an objective, and why.

    Args:
      study: the analysis.
      objective: `time`: go on while another step up shortens the time to solution by at least `worthwhile`; `efficiency`: the largest
        scale with parallel efficiency of at least `least_efficiency`; `cost`: the largest scale whose cost is within `worthwhile` of the
        cheapest one's.
      worthwhile: relative gain below which one stops.
      least_efficiency: parallel efficiency below which one stops.
    """
    rows = [row for row in study.rows if row.failure is None]
    chosen, why = rows[0], "it is the smallest scale"
    what = "the time per unit of work" if study.weak else "the run"
    if objective == "time":
        for row in rows[1:]:
            gain = -row.marginal_time if row.marginal_time is not None else 1 - 1 / (1 + (row.marginal_gain or 0.0))
            if gain < worthwhile:
                change = f"shorten {what} by {gain:.1%} only" if gain >= 0 else f"lengthen {what} by {-gain:.1%}"
                return chosen.devices, f"going on to {row.devices} would {change}"
            chosen, why = row, f"each step up to here shortened {what} by at least {worthwhile:.0%}"
        return chosen.devices, why + "; nothing larger was measured"
    if objective == "efficiency":
        for row in rows[1:]:
            if row.efficiency is not None and row.efficiency < least_efficiency:
                return chosen.devices, f"at {row.devices} the parallel efficiency falls to {row.efficiency:.1%}"
            chosen, why = row, f"the parallel efficiency is still {row.efficiency:.1%}" if row.efficiency is not None else why
        return chosen.devices, why
    costs = [(row, _unit_cost(row)) for row in rows]
    cheapest = min(cost for _, cost in costs)
    within = [row for row, cost in costs if cost <= cheapest * (1 + worthwhile)]
    last = within[-1]
    return last.devices, f"its cost is within {worthwhile:.0%} of the cheapest scale ({min(costs, key=lambda pair: pair[1])[0].devices})"


def _unit_cost(row: Row) -> float:
    """Cost up to a constant: of the whole run, or of a unit of work where only rates are known."""
    if row.unit_cost is not None:
        return row.unit_cost
    assert row.rate_per_device is not None
    return 1 / row.rate_per_device


def _superlinear(rows: Sequence[Row]) -> list[str]:
    """Efficiency beyond 1 means that something else changed too (a cache that fits, another batch, a bad baseline)."""
    best = {row.devices: max(row.efficiency or 0.0, row.time_efficiency or 0.0) for row in rows}
    return [
        f"{devices} devices: efficiency {value:.1%} is above 100 %: more than the scale changed, or the baseline is slow"
        for devices, value in best.items()
        if value > 1.02
    ]


def _below_the_floor(timed: Sequence[Point]) -> list[str]:
    """Name scales whose time is below what the law of the scales before them leaves: their fixed part cannot shrink."""
    doubts = []
    for index in range(3, len(timed)):
        law = fit_law([p.devices for p in timed[:index]], [p.time_s or 0.0 for p in timed[:index]])
        point = timed[index]
        assert point.time_s is not None
        expected_s = law.time_s(point.devices)
        tolerance = max(0.05, 3 * law.worst_error, 3 * point.spread)
        if point.time_s < min(expected_s, max(law.fixed_s, 0.0) or math.inf) * (1 - tolerance):
            doubts.append(
                f"{point.devices} devices: {point.time_s:.4g} s is less than the {law.fixed_s:.4g} s that no scale before it got rid of "
                f"({expected_s:.4g} s expected): not the same work, or not the same start-up"
            )
    return doubts


def check_claims(study: Study, claims: dict[int, dict[str, float]], *, digits: float = 0.006) -> list[str]:
    """Compare published derived figures with what follows from the published measurements.

    Args:
      study: the analysis of the measurements.
      claims: devices -> {`speedup`, `efficiency`, `time_speedup`, `ideal_rate`, `marginal_gain`: value}; efficiencies and gains are
        fractions.
      digits: largest absolute difference (relative for values above 1) that rounding explains.

    Returns:
      One line for each figure that does not follow.
    """
    by_devices = {row.devices: row for row in study.rows}
    base = next(row for row in study.rows if row.failure is None)
    found = []
    for devices, values in sorted(claims.items()):
        row = by_devices[devices]
        for name, claimed in values.items():
            ideal = None if base.rate is None else base.rate * devices / base.devices
            actual = ideal if name == "ideal_rate" else getattr(row, name)
            if actual is not None and abs(actual - claimed) > digits * max(1.0, abs(actual)):
                found.append(f"{devices} devices: {name} is printed as {claimed:g} and follows from the measurements as {actual:.4g}")
    return found


def doublings(study: Study) -> list[tuple[int, int, float]]:
    """Return (from, to, relative gain in rate or speed) for neighbouring scales that ran."""
    rows = [row for row in study.rows if row.failure is None]
    return [(a.devices, b.devices, b.marginal_gain) for a, b in pairwise(rows) if b.marginal_gain is not None]
