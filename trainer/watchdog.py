"""A process that makes no progress ends itself: a rank that is alive but stuck would hang all others in silence (jax#38503).

Each phase sets a bound and each step renews it. When it runs out, the stacks of all threads go to a file in the run directory, the event
log gets a `hang`, and the process ends with the exit code HANG, whatever its main thread is stuck in.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HANG_EXIT_CODE = 71
"""See launch/exit_codes.py."""
USUAL_STEPS = 20
"""A step may take this many times the usual one before it counts as stuck."""


class Watchdog:
    """Watches one process.

    Args:
      least_s: no bound of a step is shorter; None: off.
      stacks: file the stacks of all threads are written to.
      exit_code: of the process it ends.
      emit: writes an event (kind, fields).
      clock: monotonic seconds.
      end: ends the process.
    """

    def __init__(
        self,
        least_s: float | None,
        stacks: Path,
        exit_code: int,
        emit: Callable[..., Any],
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._least_s, self._stacks, self._exit_code = least_s, stacks, exit_code
        self._emit, self._clock, self._end = emit, clock, end
        self._wake = threading.Condition()
        self._last_s = clock()
        self._bound_s: float | None = None
        self._what = ""
        self._closed = False
        if least_s is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def step(self, usual_s: float | None) -> None:
        """Note a finished step; the next may take USUAL_STEPS usual ones, and never less than the least bound."""
        if self._least_s is not None:
            self._set("a step", max(self._least_s, USUAL_STEPS * (usual_s or 0.0)))

    @contextlib.contextmanager
    def phase(self, what: str, bound_s: float | None = None) -> Iterator[None]:
        """Bound a phase other than a step (None: ten times the least bound); what was bounded before starts anew after it."""
        if self._least_s is None:
            yield
            return
        before, bound_before_s = self._what, self._bound_s
        self._set(what, 10 * self._least_s if bound_s is None else bound_s)
        try:
            yield
        finally:
            self._set(before, bound_before_s)

    def close(self) -> None:
        """Stop watching."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def _set(self, what: str, bound_s: float | None) -> None:
        with self._wake:
            longer = self._bound_s is not None and bound_s is not None and bound_s >= self._bound_s
            self._what, self._bound_s, self._last_s = what, bound_s, self._clock()
            if not longer:
                self._wake.notify_all()

    def _watch(self) -> None:
        with self._wake:
            while not self._closed:
                if self._bound_s is None:
                    self._wake.wait()
                    continue
                left_s = self._last_s + self._bound_s - self._clock()
                if left_s > 0:
                    self._wake.wait(left_s)
                    continue
                self._bite(self._clock() - self._last_s)
                return

    def _bite(self, silent_s: float) -> None:
        where = f"no progress for {silent_s:.0f} s in {self._what}"
        with contextlib.suppress(OSError), self._stacks.open("a") as file:
            file.write(f"{where}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        with contextlib.suppress(Exception):
            self._emit("hang", silent_s=silent_s, phase=self._what, stacks=self._stacks.name)
        print(f"ridge: hang: {where}; the stacks of all threads are in {self._stacks}", file=sys.stderr, flush=True)
        self._end(self._exit_code)
