"""Batches that a run leaves out: those of loss spikes, after which it went back to an earlier state (docs/guides/numerics.md).

Batch b has the rows b * B to (b + 1) * B - 1 of the training order, B = data.batch_size. Step s + 1 trains on the batch number s of those
that are not left out. RUN/skipped_batches.json has them for every later start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from ridgeline.rundir.files import Record, read_record, write_record

SKIPPED_BATCHES = "skipped_batches.json"


class SkippedRange(Record):
    """Consecutive batches that are left out."""

    first: NonNegativeInt
    end: PositiveInt
    """The batch after the last one."""
    spike_step: PositiveInt
    """First step of the loss spike for which the run went back."""


class SkippedBatches(Record):
    """The ranges in the order in which they were added."""

    ranges: list[SkippedRange] = []

    def batch_of(self, step: int) -> int:
        """Return the batch that is trained on after `step` steps."""
        return batch_of_step(step, [(each.first, each.end) for each in self.ranges])


NOTHING_SKIPPED = SkippedBatches()


def read_skipped_batches(run_dir: Path) -> SkippedBatches:
    """Return what a run leaves out. Raises UserError for a damaged file: without it the data would be others."""
    return read_record(run_dir / SKIPPED_BATCHES, SkippedBatches) or NOTHING_SKIPPED


def write_skipped_batches(run_dir: Path, skipped: SkippedBatches) -> None:
    """Replace the file. Raises OSError."""
    write_record(run_dir / SKIPPED_BATCHES, skipped)


def batch_of_step(step: int, skipped: Sequence[tuple[int, int]]) -> int:
    """Return the batch that is trained on after `step` steps. `skipped`: (first, end) of what is left out; ranges may overlap."""
    batch, done = step, 0
    for first, end in sorted(skipped):
        first = max(first, done)
        if batch < first:
            break
        if end > first:
            batch, done = batch + end - first, end
    return batch
