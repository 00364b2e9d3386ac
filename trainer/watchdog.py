"""The watchdog ends a process that makes no progress. A rank that hangs would silently block all others (jax#38503).

Each phase sets a time limit and each step resets it. When it expires, the Python and native stacks of all threads, and the Python stacks of
the worker process that the loader waits for, are written to a file in the run directory, every process is asked what it is doing
(trainer/hang_report.py), the event log gets a `hang` event, and the process ends with exit code HANG, even if its main thread is blocked in
C++, or what is to be written is on a file system that hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ridgeline.configs.schema import DeadlinesConfig
from ridgeline.planner.policy import step_limit_s
from ridgeline.trainer.hang_report import MOST, OUTSIDE, Position, python_frames
from ridgeline.trainer.kernel_waits import file_waits, worker_state

HANG_EXIT_CODE = 71
"""See launch/exit_codes.py."""
WRITE_S, NATIVE_S = 5.0, 10.0
"""Time for each file that is written about a hang; for the native stacks."""
SURVEY_S = 45.0
"""Time for the survey of the processes, its report, and the stacks of the others."""
FALLBACK_S = 60.0
"""After the limit: faulthandler's thread, which needs no lock of Python, ends a process whose watchdog cannot run (exit code 1)."""
_DEADLINES = DeadlinesConfig()
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)


class Watchdog:
    """Watches one process.

    Args:
      least_s: minimum limit of a step; None: the watchdog is off.
      deadlines: limits of the phases, and of a step in usual steps.
      stacks: file for the stacks of all threads.
      exit_code: of the process.
      emit: writes an event (kind, fields).
      survey: has it reported what all processes are doing.
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
        deadlines: DeadlinesConfig = _DEADLINES,
        survey: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._least_s, self._stacks, self._exit_code = least_s, stacks, exit_code
        self.deadlines = deadlines
        self._emit, self._survey, self._clock, self._end = emit, survey, clock, end
        self._steps, self._begun, self._armed_s = 0, 0, math.inf
        self.awaited: Callable[[], tuple[int, int] | None] = lambda: None
        """Returns the number and the process id of the worker that the loader waits for."""
        self.collective: Callable[[], str | None] = lambda: None
        """Returns the collective that this process waits in, where its stacks tell (trainer/native_waits.py)."""
        self._wake = threading.Condition()
        self._last_s = clock()
        self._limit_s: float | None = None
        self._what = ""
        self._closed = self._expired = False
        self._written = threading.Event()
        if least_s is not None:
            with contextlib.suppress(OSError, AttributeError):  # py-spy is a child; some kernels let only parents read a process's memory
                ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY, 0, 0, 0)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def step(self, usual_s: float | None, steps: int | None = None) -> None:
        """Record a finished step. The next may take as long as planner.policy.step_limit_s allows. `steps`: finished in total."""
        self._steps = self._steps if steps is None else steps
        if self._least_s is not None:
            self._set("a step", step_limit_s(self._least_s, usual_s, self.deadlines.step_factor))

    def begin(self, step: int) -> None:
        """Record that a step is about to be dispatched; `step`: its number, from 1."""
        self._begun = step

    def evaluation(self) -> contextlib.AbstractContextManager[None]:
        """Limit each batch of an evaluation."""
        return self.phase("evaluation", self.deadlines.evaluation_s)

    def evaluation_batch(self) -> None:
        """Record that an evaluation begins its next batch."""
        if self._least_s is not None:
            self._set("evaluation", self.deadlines.evaluation_s)

    def position(self) -> Position:
        """Return what this process is doing. Takes kernel_waits.SAMPLE_S at most twice."""
        worker, silent_s = self.awaited(), self._clock() - self._last_s
        return Position(
            step=self._steps,
            begun=self._begun,
            phase=self._what,
            silent_s=silent_s,
            threads=python_frames(),
            files=[name[-MOST:] for name in file_waits(os.getpid())[:OUTSIDE]],
            collective=self.collective(),
            worker=None if worker is None else f"loader worker {worker[0]} (pid {worker[1]}), which {worker_state(worker[1])}"[:MOST],
        )

    def asked(self) -> dict[str, object]:
        """Return what this process is doing, for another process that makes no progress. asked_stacks follows: py-spy stops the process."""
        return self.position().model_dump()

    def asked_stacks(self) -> None:
        """Write the stacks for another process that makes no progress, or wait until they are written."""
        if self._expired:
            self._written.wait(WRITE_S + NATIVE_S)
        else:
            within(WRITE_S + NATIVE_S, lambda: self.write_stacks("another process makes no progress"))

    def write_stacks(self, headline: str) -> None:
        """Append the Python and the native stacks of all threads to this process's file."""
        with contextlib.suppress(OSError), self._stacks.open("a") as file:
            file.write(f"{headline}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            if (worker := self.awaited()) is not None:
                file.write(f"\nloader worker {worker[0]}:\n{python_stacks(worker[1])}\n")
                file.flush()
            file.write(f"\nnative stacks:\n{native_stacks()}\n")

    @contextlib.contextmanager
    def phase(self, what: str, limit_s: float) -> Iterator[None]:
        """Limit a phase other than a step. The previous limit restarts after it."""
        if self._least_s is None:
            yield
            return
        before, limit_before_s = self._what, self._limit_s
        self._set(what, limit_s)
        try:
            yield
        finally:
            self._set(before, limit_before_s)

    def close(self) -> None:
        """Stop watching."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._least_s is not None:
            faulthandler.cancel_dump_traceback_later()

    def _set(self, what: str, limit_s: float | None) -> None:
        with self._wake:
            longer = self._limit_s is not None and limit_s is not None and limit_s >= self._limit_s
            self._what, self._limit_s, self._last_s = what, limit_s, self._clock()
            if not longer:
                self._wake.notify_all()
            self._arm()

    def _arm(self) -> None:
        """Let faulthandler end the process FALLBACK_S to 2 FALLBACK_S after the limit, if the watchdog does not."""
        end_s = math.inf if self._limit_s is None else self._last_s + self._limit_s + 2 * FALLBACK_S
        if end_s == math.inf:
            faulthandler.cancel_dump_traceback_later()
        elif not 0 <= end_s - self._armed_s < FALLBACK_S:
            with contextlib.suppress(ValueError, OSError):  # no standard error
                faulthandler.dump_traceback_later(end_s - self._clock(), exit=True, file=2)  # sys.stderr is no file in a notebook
        else:
            return
        self._armed_s = end_s

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
                faulthandler.cancel_dump_traceback_later()
                return

    def _expire(self, silent_s: float) -> None:
        self._expired = True
        where = f"no progress for {silent_s:.0f} s in {self._what}"
        fields = {"silent_s": silent_s, "phase": self._what, "stacks": self._stacks.name}
        within(WRITE_S + NATIVE_S, lambda: self.write_stacks(where))
        self._written.set()
        within(SURVEY_S, self._survey)
        within(WRITE_S, lambda: self._emit("hang", **fields))
        said = f"ridge: hang: {where}; the stacks of all threads are in {self._stacks}\n"
        within(WRITE_S, lambda: sys.stderr.write(said))
        self._end(self._exit_code)


def within(limit_s: float, work: Callable[[], Any]) -> None:
    """Run `work` in a thread, and go on without it after a time: its file system may be what hangs. Its errors are dropped."""

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=run, name="hang", daemon=True)
    thread.start()
    thread.join(limit_s)


def native_stacks() -> str:
    """Return the stacks of this process's threads with their C and C++ frames by py-spy, or why there are none."""
    return _stacks(["--native", "--pid", str(os.getpid())])


def python_stacks(process: int) -> str:
    """Return the Python stacks of another process, which may be stopped, by py-spy, or why there are none."""
    return _stacks(["--nonblocking", "--pid", str(process)])


def _stacks(options: Sequence[str]) -> str:
    command = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if command is None:
        return "none: py-spy is not installed"
    dump = [command, "dump", *options]
    try:
        done = subprocess.run(dump, capture_output=True, text=True, timeout=NATIVE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none: {error}"
    return done.stdout if done.returncode == 0 else f"none: {(done.stderr.strip().splitlines() or ['py-spy failed'])[0]}"
