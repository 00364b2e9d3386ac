"""A process of a run that may be slowed: `python straggler_run.py SHARE FROM_STEP RECORD -m ridgeline train ...`.

From a step on, each step of the process has SHARE of its own time in addition. RECORD is a JSON file, or "": [step, own time in seconds,
what of it was added] of every step with an own time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ridgeline.cli.main import main
from ridgeline.trainer.loop import StepResult
from ridgeline.trainer.stragglers import Stragglers


def slow_down(share: float, from_step: int, record: Path | None = None) -> None:
    """Have each step end with work of the main thread: SHARE of the whole step's own time, as `Stragglers` measures it."""
    on_result, close = Stragglers.on_result, Stragglers.close
    steps: list[tuple[int, float, float]] = []

    def slowed(self: Stragglers, result: StepResult) -> None:
        added_s = 0.0
        if result.step >= from_step and share and self._last_s is not None and not result.first:
            start_s = time.thread_time()
            # XLA's threads go on meanwhile, and what they do is a part of this step's own time
            while (added_s := time.thread_time() - start_s) < share * (self.cpu_clock() - self._last_s - added_s):
                pass
        on_result(self, result)
        if self._own and self._own[-1][0] == result.step:
            steps.append((result.step, self._own[-1][1][0], added_s))

    def recorded(self: Stragglers, step: int) -> None:
        close(self, step)
        if record is not None:
            record.write_text(json.dumps(steps))

    Stragglers.on_result, Stragglers.close = slowed, recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    share, from_step, record, *arguments = sys.argv[1:]
    slow_down(float(share), int(from_step), Path(record) if record else None)
    sys.exit(main(arguments[2:]))
