"""When to save and which steps to keep (runs, `ridge checkpoint prune`). The clock and the agreement of processes are passed in."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.configs.schema import CheckpointConfig
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint.seal import evaluation_loss

_CHECKS_PER_INTERVAL = 20
"""With several processes: how often process 0's clock is read per `every_minutes`. A save is late by at most 1/20 of the interval."""
_MAX_STEPS_BETWEEN_CHECKS = 10_000


def steps_to_delete(
    steps: Sequence[int],
    verified: Collection[int],
    *,
    keep_last: int,
    keep_every: int,
    kept: Collection[int] = (),
    newest_proven: bool = False,
) -> list[int]:
    """Return the complete steps to delete: those before the last `keep_last` verified ones, except multiples of `keep_every` and `kept`.

    Args:
      steps: all complete steps.
      verified: those that were verified to be finite before they were sealed. Only these count towards `keep_last`. Any other step
        (written by an earlier version, or imported) is kept until `keep_last` verified steps follow it.
      newest_proven: a finite step followed the newest verified one. Until then the one before it is kept, also with `keep_last` 1:
        finite parameters may still give a non-finite loss.
    """
    assert keep_last >= 1, "the newest checkpoint is never deleted"
    wanted = keep_last if newest_proven else max(keep_last, 2)
    counted = sorted(set(verified) & set(steps))
    if len(counted) < wanted:
        return []
    return [
        step for step in sorted(set(steps)) if step < counted[-wanted] and not (keep_every and step % keep_every == 0) and step not in kept
    ]


def best_steps(losses: Mapping[int, float], count: int) -> list[int]:
    """Return the `count` steps with the least loss, of equal ones the newer; a loss that is not a number counts as infinite."""
    return sorted(losses, key=lambda step: (math.inf if math.isnan(losses[step]) else losses[step], -step))[:count]


@dataclass(frozen=True)
class Retained:
    """What retention deletes in a checkpoint directory."""

    steps: list[int]
    expired: list[str]
    """Directory names of steps that were set aside long ago."""


def retention(root: Path, config: CheckpointConfig, verified: Collection[int], *, newest_proven: bool = False) -> Retained:
    """Return what a checkpoint directory no longer needs, for a run after a save and for `ridge checkpoint prune`. Raises OSError.

    verified, newest_proven: as in `steps_to_delete`.
    """
    complete = dirs.complete_steps(root)
    losses = {step: loss for step in complete if (loss := evaluation_loss(dirs.step_dir(root, step), config.best_set)) is not None}
    steps = steps_to_delete(
        complete,
        verified,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        kept=best_steps(losses, config.keep_best),
        newest_proven=newest_proven,
    )
    return Retained(steps, dirs.expired(root, config.keep_set_aside))


class Cadence:
    """Decides after each step whether to save. Call `due` once per step in every process, `saved` when a save begins.

    The cadence by steps needs no communication. For the cadence by minutes process 0 decides, since the clocks of processes differ. To
    avoid a network round trip per step, it decides only at agreed steps: with each decision it also sends the step of the next one,
    estimated from the step time.
    """

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float], agreement: Agreement) -> None:
        self._config, self._clock, self._agreement = config, clock, agreement
        self._saved_s = clock()
        self._next_check = 0
        self._last_check: tuple[int, float] | None = None

    def due(self, step: int, last: bool) -> bool:
        """Return whether to save after `step` (the number of steps taken); `last`: no step follows."""
        by_time = self._by_time(step)
        by_step = self._config.every > 0 and step % self._config.every == 0
        return by_step or by_time or (last and self._config.final)

    def saved(self) -> None:
        """Restart the interval in minutes."""
        self._saved_s = self._clock()

    def _by_time(self, step: int) -> bool:
        interval_s = self._config.every_minutes * 60
        if interval_s == 0:
            return False
        if self._agreement.count == 1:
            return self._clock() - self._saved_s >= interval_s
        if step < self._next_check:
            return False
        due, self._next_check = self._agreement.first(lambda: self._check_clock(step, interval_s))
        return due

    def _check_clock(self, step: int, interval_s: float) -> tuple[bool, int]:
        """Process 0: return whether a save is due, and the step of the next check."""
        now_s, gap = self._clock(), 1
        if self._last_check is not None and now_s > self._last_check[1]:
            steps_per_s = (step - self._last_check[0]) / (now_s - self._last_check[1])
            gap = max(1, min(_MAX_STEPS_BETWEEN_CHECKS, int(steps_per_s * interval_s / _CHECKS_PER_INTERVAL)))
        self._last_check = (step, now_s)
        return now_s - self._saved_s >= interval_s, step + gap
