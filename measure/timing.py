"""Timing rounds of device work: several calls are dispatched per round and waited for once, as in a training step.

What the host needs to launch a call then hides behind the device. The first calls (compilation, first touches) are in no round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

ROUNDS = 5


class Timed:
    """Work that is timed a round at a time, with other work between its rounds.

    Args:
      make: returns a call that dispatches the work and returns its results. What it holds on to is let go after each round.
      least_s: so long a round should take at least; `most`: calls of a round at most.
      clock: of seconds; another than wall time for a CPU that others use too.
      anew: `make` makes its arguments anew for each round, so that the first call of each touches them first and is left out.
    """

    def __init__(
        self,
        make: Callable[[], Callable[[], Any]],
        *,
        least_s: float = 0.02,
        most: int = 20,
        anew: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._make, self._least_s, self._most, self._anew = make, least_s, most, anew
        self._calls: int | None = None
        self.rounds_s: list[float] = []
        """Seconds of one call, by round."""

    def round(self) -> None:
        """Time a round. The first call of all (compilation) is in none."""
        work = self._make()
        if self._anew or self._calls is None:
            jax.block_until_ready(work())
        if self._calls is None:
            self._calls = agreed(calls_for(lambda: jax.block_until_ready(work()), self._least_s, self._most))
        begun = self._clock()
        results = [work() for _ in range(self._calls)]
        jax.block_until_ready(results)
        self.rounds_s.append((self._clock() - begun) / self._calls)


def rounds_s(work: Callable[[], Any], *, rounds: int = ROUNDS, least_s: float = 0.02, most: int = 20) -> list[float]:
    """Return the seconds of one call, once per round (arguments as of `Timed`)."""
    timed = Timed(lambda: work, least_s=least_s, most=most, anew=False)
    for _ in range(rounds):
        timed.round()
    return timed.rounds_s


def calls_for(work: Callable[[], Any], least_s: float, most: int) -> int:
    """Time one finished call and return how many fill `least_s`: 1 to `most`."""
    begun = time.perf_counter()
    work()
    return max(1, min(most, round(least_s / max(time.perf_counter() - begun, 1e-7))))


def agreed(number: int) -> int:
    """Return process 0's number in every process: what communicates must be called equally often everywhere."""
    if jax.process_count() == 1:
        return number
    from ridgeline.trainer.agreement import Agreement

    return Agreement("bench").first(lambda: number)
