"""The analysis of a study: speedup, efficiency, money, a fitted law and a stopping point, from times and rates at values of one variable.

The variable is the number of devices in a scaling study, and the batch size in a batch study. Strong scaling: the same work on more
devices; weak scaling: work that grows with the devices. The law of explain/study/law.py is fitted to the times to solution and to the
times of a step.

Parallel efficiency is the speedup in rate (or in time per unit of work) over the ratio of the devices, against the smallest scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.configs.errors import UserError
from ridgeline.explain.study.law import Forecast, Law, fit_law, forecast
from ridgeline.planner.scaling import LEAST_EFFICIENCY, WORTHWHILE, ScalePoint, stopping_scale
from ridgeline.planner.search import Objective


@dataclass(frozen=True)
class Variable:
    """What differs from point to point of a study."""

    name: str
    unit: str
    """Of its values, in the plural."""


DEVICES = Variable("devices", "devices")
BATCH_SIZE = Variable("batch size", "rows")


@dataclass(frozen=True)
class Point:
    """The measurements at one value of the variable. A failed run is a point without figures."""

    value: int
    """Of the variable: devices, or rows of a batch."""
    time_s: float | None = None
    """Time to solution: the whole run, including start-up and compilation."""
    rate: float | None = None
    """Units of work per second in steady state, over all devices (tokens/s, images/s)."""
    spread: float = 0.0
    """Of the repeats, relative (rundir.noise.spread)."""
    failure: str | None = None
    work: float | None = None
    """Units of work of the whole run; None: the same at every scale (strong scaling)."""

    @property
    def unit_time_s(self) -> float | None:
        """Time to solution per unit of work; the whole time when the work is the same at every scale."""
        return None if self.time_s is None else self.time_s / (self.work or 1.0)


@dataclass(frozen=True)
class Row:
    """The derived figures of one point."""

    value: int
    """Of the variable."""
    time_s: float | None = None
    rate: float | None = None
    speedup: float | None = None
    """Of the rate; of the time when there is no rate."""
    efficiency: float | None = None
    time_speedup: float | None = None
    time_efficiency: float | None = None
    marginal_gain: float | None = None
    """Relative gain in rate (or speed) over the previous point."""
    marginal_time: float | None = None
    """Relative change of the time to solution (per unit of work) over the previous point; negative is a gain."""
    cost: float | None = None
    """Device-hours of the whole run times price (device-hours when the price is 1); None when `value` does not count devices."""
    unit_cost: float | None = None
    """Cost of a unit of work; of the whole run when the work is the same at every scale."""
    rate_per_value: float | None = None
    """Rate over the value of the variable: per device in a scaling study."""
    spread: float = 0.0
    """Of the repeats, relative."""
    failure: str | None = None


@dataclass(frozen=True)
class Study:
    """The analysis of a study."""

    variable: Variable
    rows: tuple[Row, ...]
    """Smallest value first."""
    law: Law | None
    """Of the times to solution; None with fewer than three of them."""
    next_value: int
    """Twice the largest value that ran."""
    weak: bool = False
    """Whether the work grows with the devices."""
    next_time: Forecast | None = None
    """Time to solution at `next_value` by the law, with its interval."""
    step_law: Law | None = None
    """Of the time of a step, up to a constant: devices over rate in weak scaling, 1 over rate otherwise; None with fewer than three."""
    next_step: Forecast | None = None
    """Time of a step at `next_value` by the step law, with its interval."""
    doubts: tuple[str, ...] = field(default=())
    """Figures that contradict each other or the law."""

    @property
    def ran(self) -> list[Row]:
        """The rows that have figures."""
        return [row for row in self.rows if row.failure is None]


def analyze(points: Sequence[Point], variable: Variable = DEVICES, *, price_per_device_hour: float = 1.0) -> Study:
    """Analyze a study. It is weak scaling when the work of the points differs, else strong scaling.

    Raises:
      UserError: fewer than two points have figures, a value repeats, or a figure is not positive.
    """
    ordered = sorted(points, key=lambda point: point.value)
    good = [p for p in ordered if p.failure is None and (p.time_s is not None or p.rate is not None)]
    if len(good) < 2:
        raise UserError(f"a scaling study needs at least two scales that ran; {len(good)} of {len(points)} did")
    if len({p.value for p in ordered}) < len(ordered):
        raise UserError(f"a scale appears twice in the study: {[p.value for p in ordered]}; give repeats as one point with a spread")
    for p in good:
        if p.value < 1 or min(p.time_s or 1, p.rate or 1) <= 0:
            raise UserError(f"{variable.unit}, times and rates must be positive; got {p}")
    weak = len({p.work for p in good}) > 1
    if weak and not all(p.work for p in good):
        raise UserError("the work of some scales is known and that of others is not: they cannot be compared")
    rows = _rows(ordered, good[0], price_per_device_hour if variable == DEVICES else None)
    timed = [p for p in good if p.time_s is not None]
    following = 2 * good[-1].value
    law, next_time = _fitted(timed, [p.time_s or 0.0 for p in timed], following, weak)
    rated = [p for p in good if p.rate is not None]
    steps = [(p.value if weak else 1) / (p.rate or 1.0) for p in rated]
    step_law, next_step = _fitted(rated, steps, following, weak)
    doubts = _superlinear(rows, variable) + (_below_the_floor(timed, variable) if law is not None and not weak else [])
    return Study(variable, tuple(rows), law, following, weak, next_time, step_law, next_step, tuple(doubts))


def _fitted(points: Sequence[Point], times_s: Sequence[float], at: int, weak: bool) -> tuple[Law | None, Forecast | None]:
    """Fit the law to at least three times and forecast the value `at`."""
    if len(points) < 3:
        return None, None
    values = [p.value for p in points]
    law = fit_law(values, times_s, work=not weak)
    return law, forecast(law, values, times_s, [p.spread for p in points], at, work=not weak)


def _rows(ordered: Sequence[Point], base: Point, price: float | None) -> list[Row]:
    rows: list[Row] = []
    previous: Point | None = None
    for p in ordered:
        if p.failure is not None or (p.time_s is None and p.rate is None):
            rows.append(Row(p.value, failure=p.failure or "no figures"))
            continue
        ratio = p.value / base.value
        time_speedup = base.unit_time_s / p.unit_time_s if base.unit_time_s and p.unit_time_s else None
        rate_speedup = p.rate / base.rate if base.rate and p.rate else None
        speedup = rate_speedup if rate_speedup is not None else time_speedup
        before = None if previous is None else _relative(previous.rate, p.rate)
        if before is None and previous is not None and previous.unit_time_s and p.unit_time_s:
            before = previous.unit_time_s / p.unit_time_s - 1
        cost = None if p.time_s is None or price is None else p.value * p.time_s / 3600 * price
        rows.append(
            Row(
                value=p.value,
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
                rate_per_value=None if p.rate is None else p.rate / p.value,
                spread=p.spread,
            )
        )
        previous = p
    return rows


def _relative(old: float | None, new: float | None) -> float | None:
    return None if not old or new is None else new / old - 1


def stopping_point(
    study: Study, objective: Objective, *, worthwhile: float = WORTHWHILE, least_efficiency: float = LEAST_EFFICIENCY
) -> tuple[int, str]:
    """Return the measured scale at which to stop for an objective, and the reason (the policy of planner.scaling.stopping_scale).

    Args:
      study: the analysis.
      objective: time, efficiency or cost.
      worthwhile: `time`: relative gain per doubling below which a larger scale is not worth it; `cost`: largest extra cost.
      least_efficiency: `efficiency`: least parallel efficiency.
    """
    points: list[ScalePoint] = []
    for row in study.ran:
        change = 1.0
        if points:
            change = 1 / (1 + (row.marginal_gain or 0.0)) if row.marginal_time is None else 1 + row.marginal_time
        time = (points[-1].time if points else 1.0) * change
        points.append(ScalePoint(row.value, time, _unit_cost(row), row.efficiency))
    subject = "the time per unit of work" if study.weak else "the run"
    return stopping_scale(
        points, objective, worthwhile=worthwhile, most_extra_cost=worthwhile, least_efficiency=least_efficiency, subject=subject
    )


def _unit_cost(row: Row) -> float:
    """Return the cost up to a constant: of the whole run, or of a unit of work when only rates are known."""
    if row.unit_cost is not None:
        return row.unit_cost
    return 1 / row.rate_per_value if row.rate_per_value else math.inf


def _superlinear(rows: Sequence[Row], variable: Variable) -> list[str]:
    """Name efficiencies beyond 1: something else changed too (a cache that fits, another batch), or the baseline is slow."""
    if variable != DEVICES:
        return []
    best = {row.value: max(row.efficiency or 0.0, row.time_efficiency or 0.0) for row in rows}
    return [
        f"{value} {variable.unit}: efficiency {efficiency:.1%} is above 100 %: more than the scale changed, or the baseline is slow"
        for value, efficiency in best.items()
        if efficiency > 1.02
    ]


def _below_the_floor(timed: Sequence[Point], variable: Variable) -> list[str]:
    """Name scales whose time is below the fixed part of the law fitted to the smaller scales."""
    doubts = []
    for index in range(3, len(timed)):
        law = fit_law([p.value for p in timed[:index]], [p.time_s or 0.0 for p in timed[:index]])
        point = timed[index]
        assert point.time_s is not None
        expected_s = law.time_s(point.value)
        tolerance = max(0.05, 3 * law.worst_error, 3 * point.spread)
        if point.time_s < min(expected_s, max(law.fixed_s, 0.0) or math.inf) * (1 - tolerance):
            doubts.append(
                f"{point.value} {variable.unit}: {point.time_s:.4g} s is less than the fixed {law.fixed_s:.4g} s of the smaller scales "
                f"({expected_s:.4g} s expected): the work or the start-up differs"
            )
    return doubts
