"""Stopping a run: the first SIGINT or SIGTERM is a request on which all processes agree; and whether the save fits into the grace period.

One `Stop` per process is installed before anything slow happens. Before training begins there is nothing to save, so a request ends the
process immediately (`raising`). The loop polls (`agreed`), in every process in the same order. With several processes, the one that
receives the signal sends it to the others through the coordination service; each process publishes the number of polls it has made; all
stop at the same later poll. A poll sends no message: a thread waits for the request.

`jax.experimental.multihost_utils.reached_preemption_sync_point` does the same for SIGTERM, but its handler hides the signal from Python
(nothing outside the loop can react to it), and it does not handle Ctrl-C. This module does not import JAX.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import open_regular

T = TypeVar("T")

NO_REQUEST = "nobody"
"""Published at the end of a run, so that the listeners stop waiting."""
_GO, _STOP = "go", "stop"
WAIT_MS = 24 * 3600 * 1000
END_S = 10.0
AGREE_MS = 120_000
"""Every process responds within this time, from a thread of its own, unless it is dead."""
TAIL_BYTES = 1 << 20
"""`last_write_s` reads this much of the end of an event log."""


class StopRequested(BaseException):
    """A stop was requested while there is nothing to save. Not an Exception, so that no handler for errors swallows it."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


class KeyValueStore(Protocol):
    """The part of JAX's coordination client that `Stop` uses, from any thread."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


class Stop:
    """The stop request of one process. `log` receives one line when a signal arrives; it may be replaced (a progress bar)."""

    def __init__(self, log: Callable[[str], object] = lambda text: sys.stderr.write(f"ridge: {text}\n")) -> None:
        self.log = log
        self.requested: signal.Signals | None = None
        """The signal that this process, or another one, received."""
        self._raising = False
        self._saves = False
        self._previous: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._polls = 0
        self._stop_at: int | None = None
        self._agreed: signal.Signals | None = None
        self._shared = False
        self._end: Callable[[], None] = lambda: None
        self._vote: Callable[[str], None] = lambda vote: None
        self._decided: Callable[[], str] = lambda: _GO
        self._decide: Callable[[str], None] | None = None
        """Process 0 of several: publishes what the votes say."""
        self._votes: Callable[[], list[str]] = list

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self.requested is not None

    def install(self) -> Stop:
        """Install the handlers of SIGINT and SIGTERM. Main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def uninstall(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def check(self) -> None:
        """Raise StopRequested when a stop was requested."""
        if self.requested is not None:
            raise StopRequested(self.requested)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise StopRequested in the main thread, at any point of the block, as soon as a request arrives."""
        self.check()
        self._raising = True
        try:
            yield
            self._raising = False
        finally:
            self._raising = False

    def share(self, store: KeyValueStore, process: int, processes: int, name: str) -> None:
        """Connect the processes of a run: from now on a request to one process is a request to all.

        Args:
          store: JAX's coordination client.
          process: index of this process.
          processes: their number; 1 changes nothing.
          name: unique to this start of the run.
        """
        if processes == 1 or self._shared:
            return
        self._shared = True
        prefix = f"ridge/stop/{name}"
        self._pipe = os.pipe()
        threading.Thread(target=self._publish, args=(store, prefix, self._pipe[0]), name="stop-publish", daemon=True).start()
        listener = threading.Thread(target=self._listen, args=(store, prefix, process, processes), name="stop-listen", daemon=True)
        listener.start()

        def end() -> None:
            with contextlib.suppress(Exception):  # the key exists, or the service is gone
                store.key_value_set(f"{prefix}/asked", NO_REQUEST)
            listener.join(END_S)

        self._end = end
        self._vote = lambda vote: store.key_value_set(f"{prefix}/vote/{process}", vote)
        self._decided = lambda: store.blocking_key_value_get(f"{prefix}/begin", WAIT_MS)
        if process == 0:  # it alone reads all votes: with thousands of processes, a vote read by each would be millions of messages
            self._decide = lambda vote: store.key_value_set(f"{prefix}/begin", vote)
            self._votes = lambda: [store.blocking_key_value_get(f"{prefix}/vote/{other}", WAIT_MS) for other in range(processes)]
        if self.requested is not None:
            os.write(self._pipe[1], b"!")

    def begin_together(self) -> None:
        """Raise StopRequested in every process if one of them received a request during start-up.

        Otherwise the others would wait in their first step for the process that ended. Every process calls either this or `abandon`.
        """
        self._vote(_GO if self.requested is None else _STOP)
        if self._decide is not None:
            self._decide(_STOP if _STOP in self._votes() else _GO)
        if self._decided() == _STOP:
            raise StopRequested(self.requested or signal.SIGTERM)
        if not self._shared:
            self.check()
        self._saves = True

    def abandon(self) -> None:
        """Announce that this process ends before the loop."""
        with contextlib.suppress(Exception):  # it has voted already, or the service is gone
            self._vote(_STOP)
            if self._decide is not None:
                self._decide(_STOP)

    def unshare(self) -> None:
        """Stop listening. Call it before the coordination service shuts down: a thread waiting in its C++ code would abort the process.

        A later start in this process may share again.
        """
        self._end()
        self._end = lambda: None
        self._shared, self._saves, self._polls, self._stop_at = False, False, 0, None
        if self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            os.close(pipe[1])  # ends the publishing thread

    def agreed(self) -> signal.Signals | None:
        """Poll: return the signal on which all processes stop at this poll, or None. All of them must poll in the same order."""
        if not self._shared:
            return self.requested
        with self._lock:  # held by the listener while the processes find the poll to stop at
            self._polls += 1
            return self._agreed if self._stop_at is not None and self._polls >= self._stop_at else None

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        again, self.requested = self.requested, self.requested or signal.Signals(number)
        if again is not None and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        if again is None:
            what = "saving after this step (Ctrl-C again to stop without saving)" if self._saves else "nothing to save yet"
            self.log(f"{self.requested.name} received: {what}")
            if self._pipe is not None:
                os.write(self._pipe[1], b"!")  # wakes the publishing thread: a handler must not send messages
        if self._raising:
            self._raising = False
            raise StopRequested(self.requested)

    def _publish(self, store: KeyValueStore, prefix: str, pipe: int) -> None:
        asked = os.read(pipe, 1)
        os.close(pipe)
        if not asked or self.requested is None:
            return
        with contextlib.suppress(Exception):  # the service is gone, and so are the others
            store.key_value_set(f"{prefix}/asked", self.requested.name, allow_overwrite=True)

    def _listen(self, store: KeyValueStore, prefix: str, process: int, processes: int) -> None:
        try:
            name = store.blocking_key_value_get(f"{prefix}/asked", WAIT_MS)
            if name == NO_REQUEST:
                return
            received = signal.Signals[name]
            with self._lock:
                store.key_value_set(f"{prefix}/at/{process}", str(self._polls), allow_overwrite=True)
                if process == 0:
                    reached = [int(store.blocking_key_value_get(f"{prefix}/at/{other}", AGREE_MS)) for other in range(processes)]
                    store.key_value_set(f"{prefix}/stop_at", str(max(reached) + 1), allow_overwrite=True)
                self._stop_at = int(store.blocking_key_value_get(f"{prefix}/stop_at", 2 * AGREE_MS))
                self._agreed = received
        except Exception:  # the run ends: the service shuts down before its threads
            return
        if self.requested is None:
            # runs the main thread's handler, wherever that thread waits
            os.kill(os.getpid(), received)


def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread and wait for it, so that the main thread handles signals while the work is inside C++ code."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="worker", daemon=True).start()
    return future.result()


@dataclass
class GracePeriod:
    """Compares the time a stop takes (the step in flight, the save, its write) with the grace period of the job.

    Args:
      grace_s: from the signal to the end of the job; None: unknown, nothing is compared.
      log: receives the warning.
      write_s: returns how long the last background write took, from its start to its seal; None: none has finished.
      step_s: duration of the last step.
    """

    grace_s: float | None
    log: Callable[[str], None]
    write_s: Callable[[], float | None] = lambda: None
    step_s: float = 0.0
    blocking_s: float = 0.0
    """How long the last save paused training."""
    warned: bool = False

    def saved(self, blocking_s: float) -> None:
        """Record a save, and warn once if a stop would take longer than the grace period."""
        self.blocking_s = blocking_s
        needed_s = self.needed_s()
        if self.grace_s is not None and needed_s > self.grace_s and not self.warned:
            self.warned = True
            self.log(
                f"WARNING: stopping takes about {needed_s:.0f} s (step {self.step_s:.1f} s, save {needed_s - self.step_s:.1f} s), "
                f"but the job has {self.grace_s:.0f} s of grace: raise slurm.signal_grace_s, or save more often (checkpoint.every_minutes)"
            )

    def needed_s(self) -> float:
        """Return the measured time from a signal to a sealed checkpoint."""
        return self.step_s + max(self.blocking_s, self.write_s() or 0.0)


def last_write_s(log: Path) -> float | None:
    """Return the duration of the last finished save in an event log; None when the last TAIL_BYTES of the log contain none.

    Lines that cannot be read are skipped: a damaged log ends no run.
    """
    try:
        with open_regular(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")
    except (UserError, OSError):
        return None
    for line in reversed(lines):
        if b'"kind":"checkpoint_saved"' in line:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                duration_s = json.loads(line)["total_s"]
                if type(duration_s) in (int, float) and 0 <= duration_s < math.inf:
                    return float(duration_s)
    return None
