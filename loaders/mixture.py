"""The order of a mixture: which corpus gives element g, and which of its elements it is, in O(corpora + log phases).

Corpus 0 takes its share of the elements, corpus 1 its share of the others, and so on. Of the first x elements that reach corpus i,
floor(r x) go on to the corpora behind it, r = their weight / (their weight + that of i): this is the rule of Grain's mix, with the same
integer weights. At a change of the weights the counts and the fraction of floor() are kept, so that over any number of phases the
elements of a corpus are drawn in order, none is left out or repeated, and even phases of one step add up to their shares.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Split:
    """How one corpus takes from the elements that reach it during a phase. All integers, exact."""

    start: int
    """Elements that reached the corpus before the phase."""
    passed: int
    """Elements of those that went on."""
    carry: int
    """The fraction of floor() at the start of the phase, in 1 / whole."""
    rest: int
    """Weight of the corpora behind it."""
    whole: int
    """Its weight and that of the corpora behind it."""

    def passed_of(self, x: int) -> int:
        """Return how many of the first x elements went on; x within the phase."""
        return self.passed + (self.carry + (x - self.start) * self.rest) // self.whole

    def carry_at(self, x: int, whole: int) -> int:
        """Return the fraction of floor() after x elements, in 1 / whole."""
        return (self.carry + (x - self.start) * self.rest) % self.whole * whole // self.whole


class Mixture:
    """Elements of several corpora, interleaved by weights that change at given elements."""

    def __init__(self, phases: Sequence[tuple[int, Sequence[float]]]) -> None:
        """`phases`: (first element, weight of each corpus), the first one from element 0; weights >= 0, not all 0.

        Weights are kept in hundredths of the smallest that is not 0, as in Grain, so shares differ from them by at most 1 %.
        """
        self._starts = [start for start, _ in phases]
        self._phases: list[list[_Split]] = []
        for start, weights in phases:
            self._phases.append(self._splits(start, _integers(weights)))

    def _splits(self, start: int, kept: list[int]) -> list[_Split]:
        splits, x = [], start
        for index in range(len(kept) - 1):
            rest, whole = sum(kept[index + 1 :]), sum(kept[index:]) or 1  # without weight from here on, no element comes so far
            passed, carry = 0, 0
            if self._phases:
                before = self._phases[-1][index]
                passed, carry = before.passed_of(x), before.carry_at(x, whole)
            splits.append(_Split(x, passed, carry, rest, whole))
            x = passed
        return splits

    def find(self, element: int) -> tuple[int, int]:
        """Return the corpus of an element, and how many elements of that corpus come before it."""
        splits = self._phases[bisect.bisect_right(self._starts, element) - 1]
        x = element
        for index, split in enumerate(splits):
            passed = split.passed_of(x)
            if split.passed_of(x + 1) == passed:
                return index, x - passed
            x = passed
        return len(splits), x

    def counts(self, elements: int) -> list[int]:
        """Return how many of the first `elements` each corpus gives."""
        splits = self._phases[bisect.bisect_right(self._starts, elements) - 1]
        counts, x = [], elements
        for split in splits:
            passed = split.passed_of(x)
            counts.append(x - passed)
            x = passed
        return [*counts, x]


def _integers(weights: Sequence[float]) -> list[int]:
    """Return weights in hundredths of the smallest that is not 0, as Grain rounds them."""
    scale = 100 / min(weight for weight in weights if weight)
    return [int(weight * scale) for weight in weights]
