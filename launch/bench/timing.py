"""Timing rounds of device work: several calls are dispatched per round and waited for once, as in a training step.

What the host needs to launch a call then hides behind the device. The first calls (compilation, first touches) are in no round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

ROUNDS = 5


def rounds_s(work: Callable[[], Any], *, rounds: int = ROUNDS, least_s: float = 0.02, most: int = 20) -> list[float]:
    """Return the seconds of one call, once per round.

    Args:
      work: dispatches the work and returns its results.
      least_s: so long a round should take at least; `most`: calls of a round at most.
    """
    jax.block_until_ready(work())
    calls = agreed(calls_for(lambda: jax.block_until_ready(work()), least_s, most))

    def one_round() -> float:
        begun = time.perf_counter()
        results = [work() for _ in range(calls)]
        jax.block_until_ready(results)
        return (time.perf_counter() - begun) / calls

    return [one_round() for _ in range(rounds)]


def calls_for(work: Callable[[], Any], least_s: float, most: int) -> int:
    """Time one finished call and return how many fill `least_s`: 1 to `most`."""
    begun = time.perf_counter()
    work()
    return max(1, min(most, round(least_s / max(time.perf_counter() - begun, 1e-7))))


def agreed(number: int) -> int:
    """Return process 0's number in every process: what communicates must be called equally often everywhere."""
    if jax.process_count() == 1:
        return number
    from trainer.agreement import Agreement

    return Agreement("bench").first(lambda: number)
