"""The law of scaling times, its fit, and forecasts for scales that were not measured.

    T(p) = fixed + work / p + sync * log2(p)        (Amdahl's law with a term that grows with the scale)

with all coefficients >= 0. The fit minimizes relative errors, so that small times at large scales count as much as large times at small
scales. In weak scaling, where the work grows with the devices, T(p) = fixed + sync * log2(p).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

LEAST_NOISE = 0.01
"""Lower bound of the relative scatter of a measured time: with as many terms as points the residuals are zero."""
_DRAWS = 400
_INTERVAL = (5, 95)
"""Percentiles of the interval of a forecast."""


@dataclass(frozen=True)
class Law:
    """T(p) = fixed_s + work_s / p + sync_s * log2(p)."""

    fixed_s: float
    work_s: float
    sync_s: float
    worst_error: float
    """Largest relative error over the fitted points."""

    def time_s(self, devices: float) -> float:
        """Predict the time at a scale."""
        return self.fixed_s + self.work_s / devices + self.sync_s * math.log2(devices)

    @property
    def fastest_devices(self) -> float:
        """The number of devices with the least time (dT/dp = 0); infinite without a growing term."""
        return self.work_s * math.log(2) / self.sync_s if self.sync_s > 0 else math.inf


@dataclass(frozen=True)
class Forecast:
    """The forecast of a law for a scale that was not measured. The interval covers the fit, not effects outside of the law."""

    devices: int
    time_s: float
    low_s: float
    high_s: float
    """Upper end of the 90 % interval: the fit repeated on times that scatter like the measured ones."""


def fit_law(devices: Sequence[float], times_s: Sequence[float], *, work: bool = True) -> Law:
    """Fit the law by non-negative least squares on relative errors (all subsets of the terms are tried: exact for three).

    work: False leaves work / p out (weak scaling).
    """
    assert len(devices) == len(times_s) >= 2
    p = np.asarray(devices, dtype=float)
    y = np.asarray(times_s, dtype=float)
    terms = np.stack([np.ones_like(p), 1 / p, np.log2(p)], axis=1) / y[:, None]
    allowed = (0, 1, 2) if work else (0, 2)
    best, best_error = np.array([0.0, 0.0, 0.0]), math.inf
    for count in range(1, len(allowed) + 1):
        for subset in combinations(allowed, count):
            chosen, *_ = np.linalg.lstsq(terms[:, subset], np.ones_like(y), rcond=None)
            error = float(np.sum((terms[:, subset] @ chosen - 1) ** 2))
            # a further term must improve the fit: with as many terms as points the fit is exact
            if np.all(chosen >= 0) and error < best_error * (1 - 1e-9) and count < len(y) + (count == 1):
                best = np.zeros(3)
                best[list(subset)] = chosen
                best_error = error
    worst = float(np.max(np.abs(terms @ best - 1)))
    return Law(float(best[0]), float(best[1]), float(best[2]), worst)


def forecast(
    law: Law, devices: Sequence[float], times_s: Sequence[float], spreads: Sequence[float], at: int, *, work: bool = True, seed: int = 0
) -> Forecast:
    """Predict the time at a scale, with an interval.

    The fit is repeated on times drawn around the fitted law, each with the larger of the spread of its repeats and the scatter of the
    residuals (parametric bootstrap, Efron 1979). The interval is wide for few points and many terms.

    Args:
      law: fitted to `devices` and `times_s`.
      spreads: relative spread of the repeats of each time (rundir.noise.spread).
      at: the scale to forecast.
      seed: of the draws.
    """
    p, y = np.asarray(devices, dtype=float), np.asarray(times_s, dtype=float)
    fitted = np.asarray([law.time_s(float(scale)) for scale in p])
    used = sum(value > 0 for value in (law.fixed_s, law.work_s, law.sync_s))
    residual = float(np.sqrt(np.sum((y / fitted - 1) ** 2) / max(1, len(y) - used)))
    scatter = np.maximum(np.asarray(spreads, dtype=float), max(residual, LEAST_NOISE))
    rng = np.random.default_rng(seed)
    draws = fitted * np.exp(rng.standard_normal((_DRAWS, len(y))) * scatter)
    predicted = [fit_law(devices, list(draw), work=work).time_s(at) for draw in draws]
    low_s, high_s = np.percentile(predicted, _INTERVAL)
    value_s = law.time_s(at)
    return Forecast(at, value_s, min(float(low_s), value_s), max(float(high_s), value_s))
