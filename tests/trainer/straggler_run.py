"""A process of a run that may be slowed: `python straggler_run.py SHARE FROM_STEP -m ridgeline train ...`.

From a step on, each step of the process has SHARE of its usual CPU time in addition.
"""

from __future__ import annotations

import statistics
import sys
import time

from ridgeline.cli.main import main
from ridgeline.trainer.loop import StepResult
from ridgeline.trainer.stragglers import Stragglers


def slow_down(share: float, from_step: int) -> None:
    """Have each step followed by CPU work in the main thread."""
    on_result, usual_s = Stragglers.on_result, list[float]()

    def slowed(self: Stragglers, result: StepResult) -> None:
        on_result(self, result)
        if result.step < from_step:
            usual_s.extend(own[0] for step, own in list(self._own)[-1:])
            return
        start_s = time.thread_time()
        while time.thread_time() - start_s < share * statistics.median(usual_s):
            pass

    Stragglers.on_result = slowed  # type: ignore[method-assign]


if __name__ == "__main__":
    share, from_step, *arguments = sys.argv[1:]
    slow_down(float(share), int(from_step))
    sys.exit(main(arguments[2:]))
