"""Steps and examples by batch size, and the critical batch size from measured runs.

    S = S_min * (1 + B_crit / B)        steps to reach the goal at batch B
    E = S * B = S_min * (B + B_crit)    examples processed
At B = B_crit a run takes twice the fewest steps and twice the fewest examples. In 1/B the law is a line: S = S_min + (S_min*B_crit) / B,
fitted by least squares of the relative errors. Source: McCandlish et al., arXiv 1812.06162, sections 2.3 and 2.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.configs.errors import UserError
from ridgeline.planner.calculators.checks import positive

MISFIT_FROM = 0.05
"""Relative residual above which a run does not fit the law; smaller ones are noise between runs."""


@dataclass(frozen=True)
class BatchEstimate:
    """A run at one batch size."""

    steps: float
    """Optimizer steps to the goal."""
    examples: float
    """Examples processed, in the unit of the batch."""
    steps_over_min: float
    """1 + B_crit/B."""
    examples_over_min: float
    """1 + B/B_crit."""


@dataclass(frozen=True)
class BatchFit:
    """The law fitted to measured runs."""

    s_min: float
    """Fewest steps, S_min."""
    b_crit: float
    """Critical batch size, B_crit."""
    residuals: tuple[float, ...]
    """Measured minus fitted steps, in the order given."""
    relative_residuals: tuple[float, ...]
    """Residuals over measured steps."""
    misfit: bool
    """Whether the law does not hold: a relative residual is above MISFIT_FROM, or steps do not fall with the batch."""


def batch_estimate(*, s_min: float, b_crit: float, batch: float) -> BatchEstimate:
    """Return steps and examples at a batch size, in the unit (examples or tokens) of the three arguments."""
    s, crit, size = positive("s-min", s_min), positive("b-crit", b_crit), positive("batch", batch)
    steps = s * (1 + crit / size)
    return BatchEstimate(steps, steps * size, 1 + crit / size, 1 + size / crit)


def fit_critical_batch(runs: Sequence[tuple[float, float]]) -> BatchFit:
    """Fit S_min and B_crit to (steps, batch) of runs that reached the same goal.

    Raises UserError for fewer than two batch sizes, values that are not positive, or two runs whose steps do not fall with the batch.
    """
    for steps, batch in runs:
        positive("fit STEPS", steps)
        positive("fit BATCH", batch)
    if len({batch for _, batch in runs}) < 2:
        raise UserError("fit: needs runs at two or more different batch sizes, as in --fit 12000@256,8000@512")
    # weights 1/steps^2: minimize the relative errors of steps = a + b/batch
    w = [1 / steps**2 for steps, _ in runs]
    x = [1 / batch for _, batch in runs]
    y = [steps for steps, _ in runs]
    total = sum(w)
    mean_x = sum(wi * xi for wi, xi in zip(w, x, strict=True)) / total
    mean_y = sum(wi * yi for wi, yi in zip(w, y, strict=True)) / total
    spread = sum(wi * (xi - mean_x) ** 2 for wi, xi in zip(w, x, strict=True))
    slope = sum(wi * (xi - mean_x) * (yi - mean_y) for wi, xi, yi in zip(w, x, y, strict=True)) / spread
    s_min = mean_y - slope * mean_x
    if len({batch for _, batch in runs}) == 2 and (slope <= 0 or s_min <= 0):
        raise UserError(f"fit: {_why(slope)}; no critical batch size fits these runs")
    residuals = tuple(yi - (s_min + slope * xi) for xi, yi in zip(x, y, strict=True))
    relative = tuple(residual / yi for residual, yi in zip(residuals, y, strict=True))
    lawful = slope > 0 and s_min > 0
    misfit = not lawful or max(abs(r) for r in relative) > MISFIT_FROM
    return BatchFit(s_min, slope / s_min, residuals, relative, misfit)


def _why(slope: float) -> str:
    if slope <= 0:
        return "steps must fall as the batch grows"
    return "steps fall faster than the batch grows, so fewer examples were enough at the larger batch"
