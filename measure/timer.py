"""The device timer: how all measurements of this package time work that runs on a device.

A round dispatches several calls and waits once for the results, as a training step does, so that the host's dispatch time overlaps with the
device's work. Compilation and the first execution are never part of a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

ROUNDS = 5


class DeviceTimer:
    """Times one piece of work, one round at a time, so that rounds of several pieces can alternate.

    Args:
      make: returns a function that dispatches the work and returns its results. The function and its arguments are freed after each round.
      least_s: minimum duration of a round.
      most: maximum calls in a round. With 1, every call is waited for, and `least_s` has no effect.
      anew: call `make` for every round; its first call, which touches new arguments for the first time, is then not timed.
      clock: seconds. Pass `time.process_time` on a CPU that other programs also use.
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
        self._make, self._least_s, self._most, self._anew, self._clock = make, least_s, most, anew, clock
        self._work: Callable[[], Any] | None = None
        self._calls: int | None = None
        self.rounds_s: list[float] = []
        """Seconds per call, one entry per round."""

    @classmethod
    def of(cls, work: Callable[[], Any], **options: Any) -> DeviceTimer:
        """Time the same call, with the same arguments, in every round. `options` are those of the constructor."""
        return cls(lambda: work, anew=False, **options)

    def warm_up(self) -> None:
        """Compile and run the work once, and choose how many calls fill a round. `round` does this if it has not been done."""
        if self._calls is None:
            self._work = self._prepare()
            self._calls = self._calls_per_round(self._work)

    def round(self) -> None:
        """Time one round."""
        self.warm_up()
        assert self._calls is not None
        work = self._work or self._prepare()
        begun = self._clock()
        results = [work() for _ in range(self._calls)]
        jax.block_until_ready(results)
        self.rounds_s.append((self._clock() - begun) / self._calls)
        self._work = None if self._anew else work

    def _prepare(self) -> Callable[[], Any]:
        work = self._make()
        jax.block_until_ready(work())
        return work

    def _calls_per_round(self, work: Callable[[], Any]) -> int:
        if self._most == 1:
            return 1
        return agreed(calls_for(lambda: jax.block_until_ready(work()), self._least_s, self._most))


def rounds_s(work: Callable[[], Any], *, rounds: int = ROUNDS, least_s: float = 0.02, most: int = 20, rest_s: float = 0.0) -> list[float]:
    """Return the seconds per call of each round. `rest_s`: pause before each round; the other arguments are those of `DeviceTimer`."""
    timer = DeviceTimer.of(work, least_s=least_s, most=most)
    for _ in range(rounds):
        timer.warm_up()
        time.sleep(rest_s)
        timer.round()
    return timer.rounds_s


def median_s(work: Callable[[], Any], *, rounds: int = ROUNDS, least_s: float = 0.02, most: int = 20, rest_s: float = 0.0) -> float:
    """Return the seconds per call: the median of the rounds. The arguments are those of `rounds_s`."""
    return statistics.median(rounds_s(work, rounds=rounds, least_s=least_s, most=most, rest_s=rest_s))


def calls_for(work: Callable[[], Any], least_s: float, most: int) -> int:
    """Time one call of `work`, which must wait for its result; return how many calls take `least_s`, from 1 to `most`."""
    begun = time.perf_counter()
    work()
    return max(1, min(most, round(least_s / max(time.perf_counter() - begun, 1e-7))))


def agreed(number: int) -> int:
    """Return process 0's number in every process: all processes must call a collective equally often."""
    if jax.process_count() == 1:
        return number
    from ridgeline.trainer.agreement import Agreement

    return Agreement("bench").first(lambda: number)
