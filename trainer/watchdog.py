"""The watchdog ends a process that makes no progress. A rank that hangs would silently block all others (jax#38503).

Each phase sets a time limit and each step resets it. When it expires, the stacks of all threads are written to a file in the run
directory, the event log gets a `hang` event, and the process ends with exit code HANG, even if its main thread is blocked in C++.
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

from ridgeline.planner.policy import step_limit_s

HANG_EXIT_CODE = 71
"""See launch/exit_codes.py."""


class Watchdog:
    """Watches one process.

    Args:
      least_s: minimum limit of a step; None: the watchdog is off.
      stacks: file for the stacks of all threads.
      exit_code: of the process.
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
        self._limit_s: float | None = None
        self._what = ""
        self._closed = False
        if least_s is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def step(self, usual_s: float | None) -> None:
        """Record a finished step. The next may take as long as planner.policy.step_limit_s allows."""
        if self._least_s is not None:
            self._set("a step", step_limit_s(self._least_s, usual_s))

    @contextlib.contextmanager
    def phase(self, what: str, limit_s: float | None = None) -> Iterator[None]:
        """Limit a phase other than a step (`limit_s` None: ten times `least_s`). The previous limit restarts after it."""
        if self._least_s is None:
            yield
            return
        before, limit_before_s = self._what, self._limit_s
        self._set(what, 10 * self._least_s if limit_s is None else limit_s)
        try:
            yield
        finally:
            self._set(before, limit_before_s)

    def close(self) -> None:
        """Stop watching."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def _set(self, what: str, limit_s: float | None) -> None:
        with self._wake:
            longer = self._limit_s is not None and limit_s is not None and limit_s >= self._limit_s
            self._what, self._limit_s, self._last_s = what, limit_s, self._clock()
            if not longer:
                self._wake.notify_all()

    def _watch(self) -> None:
        with self._wake:
            while not self._closed:
                if self._limit_s is None:
                    self._wake.wait()
                    continue
                left_s = self._last_s + self._limit_s - self._clock()
                if left_s > 0:
                    self._wake.wait(left_s)
                    continue
                self._expire(self._clock() - self._last_s)
                return

    def _expire(self, silent_s: float) -> None:
        where = f"no progress for {silent_s:.0f} s in {self._what}"
        with contextlib.suppress(OSError), self._stacks.open("a") as file:
            file.write(f"{where}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        with contextlib.suppress(Exception):
            self._emit("hang", silent_s=silent_s, phase=self._what, stacks=self._stacks.name)
        print(f"ridge: hang: {where}; the stacks of all threads are in {self._stacks}", file=sys.stderr, flush=True)
        self._end(self._exit_code)
