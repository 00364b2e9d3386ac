"""A measured curve: positive values at some sizes, a power law between neighbours, constant outside.

Power laws keep order: where a bigger message took longer at the measured sizes, it does so in between as well.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """Points by rising size."""

    log_sizes: tuple[float, ...]
    log_values: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Build the curve through (size, value) points, all positive, sizes distinct."""
        ordered = sorted(points)
        assert ordered, "a curve has at least one point"
        return cls(tuple(math.log(size) for size, _ in ordered), tuple(math.log(value) for _, value in ordered))

    def at(self, size: float) -> float:
        """Return the value at a size."""
        sizes, values = self.log_sizes, self.log_values
        x = math.log(size) if size > 0 else sizes[0]
        if x <= sizes[0]:
            return math.exp(values[0])
        if x >= sizes[-1]:
            return math.exp(values[-1])
        i = bisect_right(sizes, x)
        weight = (x - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return math.exp(values[i - 1] + weight * (values[i] - values[i - 1]))
