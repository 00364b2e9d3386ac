"""When to save and what to keep: pure policies, with the clock and the agreement between processes passed in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ridgeline.configs.schema import CheckpointConfig
from ridgeline.trainer.agreement import Agreement

_CHECKS_PER_INTERVAL = 20
"""With several processes: how often, per `every_minutes`, process 0's clock is asked. A save is late by at most 1/20 of the interval."""
_MAX_STEPS_BETWEEN_CHECKS = 10_000


def steps_to_delete(
    steps: Sequence[int], judged: Collection[int], *, keep_last: int, keep_every: int, newest_tried: bool = False
) -> list[int]:
    """Return the complete steps that may be deleted: those before the last `keep_last` judged ones, less the multiples of `keep_every`.

    Args:
      steps: all complete steps.
      judged: those that were found finite before they were sealed. Only these count: a step without a judgement (written by an earlier
        version, or imported) lets no other step go, and is itself kept until `keep_last` judged steps follow it.
      newest_tried: a finite step was made from the newest judged one. Until then the one before it stays, also with `keep_last` 1:
        finite parameters may still give a loss that is not.
    """
    assert keep_last >= 1, "the newest checkpoint is never deleted"
    wanted = keep_last if newest_tried else max(keep_last, 2)
    counted = sorted(set(judged) & set(steps))
    if len(counted) < wanted:
        return []
    return [step for step in sorted(set(steps)) if step < counted[-wanted] and not (keep_every and step % keep_every == 0)]


class Cadence:
    """Decides after each step whether to save. Call `due` once per step in every process, `saved` when a save begins.

    By steps every process decides alone. By minutes the clocks of several processes would disagree, so process 0 decides; not at every
    step, which would put a network round trip into each, but at agreed steps: with each answer it also names the next step to ask at,
    from the step time it has seen.
    """

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float], agreement: Agreement) -> None:
        self._config, self._clock, self._agreement = config, clock, agreement
        self._saved_s = clock()
        self._next_check = 0
        self._last_check: tuple[int, float] | None = None

    def due(self, step: int, last: bool) -> bool:
        """Whether to save after `step` (the number of steps taken); `last`: no step follows."""
        by_time = self._by_time(step)
        by_step = self._config.every > 0 and step % self._config.every == 0
        return by_step or by_time or (last and self._config.final)

    def saved(self) -> None:
        """Start the minutes anew."""
        self._saved_s = self._clock()

    def _by_time(self, step: int) -> bool:
        interval_s = self._config.every_minutes * 60
        if interval_s == 0:
            return False
        if self._agreement.count == 1:
            return self._clock() - self._saved_s >= interval_s
        if step < self._next_check:
            return False
        due, self._next_check = self._agreement.first(lambda: self._ask_clock(step, interval_s))
        return due

    def _ask_clock(self, step: int, interval_s: float) -> tuple[bool, int]:
        """Process 0: whether a save is due, and the next step to ask at."""
        now_s, gap = self._clock(), 1
        if self._last_check is not None and now_s > self._last_check[1]:
            steps_per_s = (step - self._last_check[0]) / (now_s - self._last_check[1])
            gap = max(1, min(_MAX_STEPS_BETWEEN_CHECKS, int(steps_per_s * interval_s / _CHECKS_PER_INTERVAL)))
        self._last_check = (step, now_s)
        return now_s - self._saved_s >= interval_s, step + gap
