"""Does a save fit into the time between the request to stop and the end? Known from the first save on, also to later starts of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 1 << 20
"""How far from the end of an event log the last save is looked for."""


@dataclass
class Grace:
    """Compares what stopping takes (the step in flight, the save, its writing) with the grace period of the job.

    Args:
      grace_s: from the request to the end; None: unknown, nothing is compared.
      note: prints a line.
      write_s: tells how long the last finished write took from its start to its seal; None: none has finished.
    """

    grace_s: float | None
    note: Callable[[str], None]
    write_s: Callable[[], float | None] = lambda: None
    step_s: float = 0.0
    """The last step's time."""
    blocking_s: float = 0.0
    """How long the last save held up the loop."""
    warned: bool = False

    def begin(self, earlier_write_s: float | None) -> None:
        """Warn at the start when the last save of an earlier start would not fit (None: there is none)."""
        if earlier_write_s is not None:
            self.saved(earlier_write_s)

    def saved(self, blocking_s: float) -> None:
        """Note a save, and warn once when stopping would not fit."""
        self.blocking_s = blocking_s
        needed_s = self.needed_s()
        if self.grace_s is not None and needed_s > self.grace_s and not self.warned:
            self.warned = True
            self.note(
                f"WARNING: stopping takes about {needed_s:.0f} s (step {self.step_s:.1f} s, save {needed_s - self.step_s:.1f} s), "
                f"but the job has {self.grace_s:.0f} s of grace: raise slurm.signal_grace_s, or checkpoint.every_minutes loses less"
            )

    def needed_s(self) -> float:
        """Seconds from a request to a sealed checkpoint, by what was measured."""
        return self.step_s + max(self.blocking_s, self.write_s() or 0.0)


def last_write_s(log: Path) -> float | None:
    """Return how long the last finished save that an event log tells of took; None where its end tells of none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        if b'"kind":"checkpoint_saved"' in line and line.startswith(b"{"):
            return float(json.loads(line)["total_s"])
    return None
