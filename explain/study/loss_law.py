"""The scaling law of the loss, its fit, and predictions for compute that was not spent.

    L(C) = E + A * (C / C0)^-alpha            E, A >= 0; C in FLOP, C0 the geometric mean of the fitted compute

(Kaplan et al., arXiv 2001.08361, section 6; with the irreducible loss E, Henighan et al., arXiv 2010.14701). The fit minimizes the Huber
loss of the relative errors, as Hoffmann et al. (arXiv 2203.15556, appendix D.2): for every alpha the law is linear in E and A, which
iteratively reweighted least squares finds; alpha is searched on a grid that is refined. Intervals are of a parametric bootstrap (Efron
1979) whose noise is itself drawn from its posterior (scaled inverse chi-square), so that few runs give wide intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HUBER = 0.005
"""Relative error from which on a run counts linearly, not quadratically."""
LEAST_ALPHA, MOST_ALPHA = 0.02, 1.5
ASSUMED_NOISE = 0.01
"""Relative scatter of the loss of one run, where there are no more runs than coefficients."""
DRAWS = 400
INTERVAL = (5.0, 95.0)
"""Percentiles of every interval: 90 %."""
_GRID, _ROUNDS, _REFINED, _ITERATIONS = 28, 3, 9, 6

Range = tuple[float, float]


@dataclass(frozen=True)
class Point:
    """One run."""

    flops: float
    loss: float


@dataclass(frozen=True)
class LossLaw:
    """A fitted law with what its bootstrap found."""

    irreducible: float
    """E, nats per token."""
    amplitude: float
    """A: the reducible loss at `flops_scale`."""
    alpha: float
    flops_scale: float
    """C0, FLOP."""
    noise: float
    """Relative scatter of one run around the law."""
    noise_measured: bool
    """False: ASSUMED_NOISE, because no run is left over to measure it."""
    irreducible_fitted: bool
    """False: two distinct sizes, so E = 0 is assumed."""
    worst_error: float
    """Largest relative error over the fitted runs."""
    draws: np.ndarray
    """[DRAWS, 3] E, A, alpha of the fits to drawn losses."""
    noise_draws: np.ndarray
    """[DRAWS] noise of each draw."""

    def loss(self, flops: float) -> float:
        """Return the predicted loss, nats per token."""
        return self.irreducible + self.amplitude * (flops / self.flops_scale) ** -self.alpha

    def interval(self, flops: float, *, of_run: bool = True, seed: int = 1) -> Range:
        """Return the 90 % interval of the loss of one run (`of_run`), or of the law without the run's own noise."""
        e, a, alpha = self.draws.T
        losses = e + a * (flops / self.flops_scale) ** -alpha
        if of_run:
            losses = losses * np.exp(self.noise_draws * np.random.default_rng(seed).standard_normal(len(losses)))
        return self._around(self.loss(flops), losses)

    @property
    def intervals(self) -> dict[str, Range]:
        """90 % intervals of the coefficients."""
        values = (self.irreducible, self.amplitude, self.alpha)
        names = ("irreducible", "amplitude", "alpha")
        return {name: self._around(value, drawn) for name, value, drawn in zip(names, values, self.draws.T, strict=True)}

    @staticmethod
    def _around(value: float, drawn: np.ndarray) -> Range:
        low, high = np.percentile(drawn, INTERVAL)
        return min(float(low), value), max(float(high), value)


def fit_loss_law(points: Sequence[Point], seed: int = 0) -> LossLaw:
    """Fit the law to runs of at least two sizes; several runs of a size measure the noise. With two sizes E = 0.

    seed: of the bootstrap.
    """
    flops, losses = (np.array(values, dtype=float) for values in zip(*((p.flops, p.loss) for p in points), strict=True))
    sizes = len(np.unique(flops))
    assert sizes >= 2 and np.all(losses > 0), points
    free = sizes > 2
    scale = float(np.exp(np.mean(np.log(flops))))
    x = np.log(flops / scale)
    fitted = _fit(x, losses[None], free)[0]
    expected = _law(x, fitted[None])[0]
    errors = losses / expected - 1
    left = len(points) - (3 if free else 2)
    noise = float(np.sqrt(np.sum(errors**2) / left)) if left > 0 else ASSUMED_NOISE
    rng = np.random.default_rng(seed)
    # sigma^2 = s^2 nu / chi2(nu): what s^2 of nu degrees of freedom says about sigma^2
    drawn = noise * np.sqrt(left / rng.chisquare(left, DRAWS)) if left > 0 else np.full(DRAWS, noise)
    around = expected * np.exp(drawn[:, None] * rng.standard_normal((DRAWS, len(points))))
    return LossLaw(
        irreducible=float(fitted[0]),
        amplitude=float(fitted[1]),
        alpha=float(fitted[2]),
        flops_scale=scale,
        noise=noise,
        noise_measured=left > 0,
        irreducible_fitted=free,
        worst_error=float(np.max(np.abs(errors))),
        draws=_fit(x, around, free),
        noise_draws=drawn,
    )


def _law(x: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Return the losses [draws, points] of coefficients [draws, 3] at x = log(C / C0) [points]."""
    return coefficients[:, :1] + coefficients[:, 1:2] * np.exp(-coefficients[:, 2:] * x)


def _fit(x: np.ndarray, losses: np.ndarray, free: bool) -> np.ndarray:
    """Fit the law to each row of losses [draws, points]; return E, A, alpha [draws, 3]."""
    step = (math.log(MOST_ALPHA) - math.log(LEAST_ALPHA)) / (_GRID - 1)
    best, cost = np.zeros((len(losses), 3)), np.full(len(losses), np.inf)
    for offset in np.arange(_GRID) * step:
        best, cost = _better(x, losses, free, np.full(len(losses), LEAST_ALPHA * math.exp(offset)), best, cost)
    for _ in range(_ROUNDS):
        center = best[:, 2].copy()
        for offset in np.linspace(-step, step, _REFINED):
            best, cost = _better(x, losses, free, np.clip(center * np.exp(offset), LEAST_ALPHA, MOST_ALPHA), best, cost)
        step *= 2 / (_REFINED - 1)
    return best


def _better(
    x: np.ndarray, losses: np.ndarray, free: bool, alpha: np.ndarray, best: np.ndarray, cost: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the better of `best` and the fit with these alphas [draws], and its cost."""
    basis = np.exp(-alpha[:, None] * x) / losses
    constant = 1 / losses
    weights = np.ones_like(losses)
    e = a = np.zeros(len(losses))
    for _ in range(_ITERATIONS):
        # minimize sum w (e / L + a x^-alpha / L - 1)^2 over e, a >= 0
        cc, bb, cb = (np.sum(weights * u * v, -1) for u, v in ((constant, constant), (basis, basis), (constant, basis)))
        c1, b1 = np.sum(weights * constant, -1), np.sum(weights * basis, -1)
        only_a, only_e = b1 / bb, c1 / cc
        if free:
            determinant = np.maximum(cc * bb - cb**2, 1e-12 * cc * bb)
            e, a = (c1 * bb - b1 * cb) / determinant, (b1 * cc - c1 * cb) / determinant
            e, a = np.where(a < 0, only_e, np.where(e < 0, 0.0, e)), np.where(e < 0, only_a, np.maximum(a, 0.0))
        else:
            e, a = np.zeros_like(only_a), only_a
        errors = np.abs(e[:, None] * constant + a[:, None] * basis - 1)
        weights = HUBER / np.maximum(errors, HUBER)
    huber = np.sum(np.where(errors <= HUBER, errors**2 / 2, HUBER * (errors - HUBER / 2)), -1)
    found = huber < cost
    return np.where(found[:, None], np.stack([e, a, alpha], -1), best), np.where(found, huber, cost)
