"""Statistics of repeated timings: median, percentile, spread, and a comparison of two sets of timings under a noise model.

Spread. The one definition: half the range over the median, the relative half-width that contains all repeats. It suits the two to five
repeats of a study, where quartiles would hide most of the scatter.

Noise model. Timings of one run scatter around their median, and the median of a run scatters around the true value: other programs on the
machine, another clock, another placement. The second kind does not shrink with more samples, so it is a figure of its own
(`between_runs`), measured from repeated runs of unchanged code where there are any (`run_to_run_noise`), else assumed.

Losses. A validation loss scatters from one evaluation to the next. `curve_noise` is the standard deviation of that scatter around the
trend of the curve (noise as in Heineman et al. 2025, arXiv 2508.13144). It is that of one run: other seeds may differ by more.

The interval of the ratio of medians is a percentile bootstrap (Efron 1979) over the samples, widened by the noise between runs of both
sides. The verdict is "faster" or "slower" only when the whole interval is on one side of 1, else "cannot tell".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ridgeline.configs.errors import UserError

UNKNOWN_NOISE = 0.02
"""Relative noise between runs that is assumed where none was measured."""
LEAST_NOISE = 0.002
"""Lower bound of the noise between runs: clock and temperature move an idle GPU by this much."""
LAST = 16
"""Evaluations at the end of a curve that show its noise."""
_RESAMPLES = 2000
_Z = 2.576  # two-sided 99 %: one false alarm in a hundred comparisons


def median(values: Sequence[float]) -> float:
    """Return the median of a non-empty sequence (the mean of the middle two of an even number)."""
    return percentile(sorted(values), 0.5)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the linearly interpolated percentile of an ascending, non-empty sequence; `share` in [0, 1] (numpy's default method)."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Sequence[float]) -> float:
    """Return half the range of repeats over their median; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    middle = median(values)
    return (max(values) - min(values)) / 2 / middle if middle > 0 else 0.0


def curve_noise(values: Sequence[float]) -> float | None:
    """Return the standard deviation of the scatter of a curve around its trend, from its last LAST values; None for fewer than five.

    Second differences remove a trend that is locally a line; those of independent values have 6 times their variance. The standard
    deviation is 1.4826 times the median absolute value, so that single outliers do not count. A bent trend adds to it.
    """
    last = [value for value in values if math.isfinite(value)][-LAST:]
    if len(last) < 5:
        return None
    return 1.4826 * median([abs(a - 2 * b + c) for a, b, c in zip(last, last[1:], last[2:], strict=False)]) / math.sqrt(6)


def compare_losses(old: float, new: float, noise: tuple[float | None, float | None]) -> str:
    """Return "lower" or "higher" for a new loss outside of the 99 % noise of both, else "cannot tell". `noise`: of `curve_noise`."""
    if noise[0] is None or noise[1] is None or not abs(new - old) > _Z * math.hypot(*(each or 0.0 for each in noise)):
        return "cannot tell"
    return "lower" if new < old else "higher"


@dataclass(frozen=True)
class Comparison:
    """The verdict on two sets of timings (lower is better)."""

    verdict: Literal["faster", "slower", "cannot tell"]
    ratio: float
    """Median of the new timings over median of the old ones."""
    low: float
    """Lower end of the 99 % interval of the ratio."""
    high: float
    samples: tuple[int, int]
    between_runs: float
    """Relative noise between runs that the interval includes."""

    def describe(self) -> str:
        """Return the verdict with its interval in one line."""
        change = self.ratio - 1
        interval = f"99 % interval {self.low - 1:+.1%} to {self.high - 1:+.1%}, noise between runs {self.between_runs:.1%}"
        if self.verdict == "cannot tell":
            return f"cannot tell: {change:+.1%} ({interval})"
        return f"{self.verdict} by {abs(change):.1%} ({interval})"


def compare(old: Sequence[float], new: Sequence[float], *, between_runs: float = UNKNOWN_NOISE, seed: int = 0) -> Comparison:
    """Compare timings of two versions, in the same unit, warm-up excluded.

    Args:
      old: timings of the baseline, at least three.
      new: timings of the new version, at least three.
      between_runs: relative standard deviation of the median of a run (see `run_to_run_noise`).
      seed: of the bootstrap.

    Raises:
      UserError: too few timings, or one that is not positive and finite.
    """
    for name, values in (("baseline", old), ("new", new)):
        if len(values) < 3:
            raise UserError(f"{len(values)} timings of the {name} version are too few: take at least 3")
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise UserError(f"timings of the {name} version must be positive and finite; got {list(values)}")
    noise = max(between_runs, LEAST_NOISE)
    rng = np.random.default_rng(seed)
    logs = [np.log(np.asarray(values, dtype=float)) for values in (old, new)]
    ratio = float(np.median(logs[1]) - np.median(logs[0]))
    draws = [np.median(rng.choice(log, size=(_RESAMPLES, len(log))), axis=1) for log in logs]
    within = float(np.std(draws[1] - draws[0], ddof=1))
    half = _Z * math.sqrt(within**2 + 2 * noise**2)
    low, high = ratio - half, ratio + half
    verdict: Literal["faster", "slower", "cannot tell"] = "faster" if high < 0 else "slower" if low > 0 else "cannot tell"
    return Comparison(verdict, math.exp(ratio), math.exp(low), math.exp(high), (len(old), len(new)), noise)


def run_to_run_noise(runs: Sequence[Sequence[float]]) -> float:
    """Return the relative standard deviation of the medians of repeated runs of unchanged code; UNKNOWN_NOISE for fewer than three runs."""
    if len(runs) < 3:
        return UNKNOWN_NOISE
    medians = np.log([float(np.median(run)) for run in runs])
    return max(LEAST_NOISE, float(np.std(medians, ddof=1)))
