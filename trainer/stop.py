"""Asking a run to stop: the first SIGINT or SIGTERM is a request that every phase honours and that all processes agree on. No JAX here.

One `Stop` per process is installed before anything slow happens. Until training begins there is nothing to save, so a request ends the
process at once (`raising`). In the loop it is a question asked at polls, which every process makes in the same order (`agreed`); with
several processes the one that was asked tells the others through the coordination service, all report the poll they have reached, and
all stop at the same later one. Asking costs no message: a thread waits for the news.

JAX has the same in `reached_preemption_sync_point`, but its handler takes SIGTERM away from Python, so that nothing outside the loop could
see it, and it knows nothing of Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

FAREWELL = "nobody"
"""What ends the wait for news when a run ends."""
_GO, _STOP = "go", "stop"
WAIT_MS = 24 * 3600 * 1000
END_S = 10.0
AGREE_MS = 120_000
"""All processes answer within this time, from a thread of their own, or one of them is dead."""


class StopAsked(BaseException):
    """Raised where a run stands when it is asked to stop and has nothing to save. No Exception: nothing on the way may swallow it."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


class KeyValueStore(Protocol):
    """The part of JAX's coordination client that is needed; usable from any thread."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


class Stop:
    """The request to stop, of one process."""

    def __init__(self, say: Callable[[str], None] = lambda text: print(f"ridge: {text}", file=sys.stderr, flush=True)) -> None:
        self._say = say
        self.asked: signal.Signals | None = None
        """The signal this process got, or heard of from another."""
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
        self._votes: Callable[[], list[str]] = list

    def __call__(self) -> bool:
        """Tell whether this process was asked."""
        return self.asked is not None

    def install(self) -> Stop:
        """Take over SIGINT and SIGTERM. Main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def uninstall(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def say_through(self, say: Callable[[str], None]) -> None:
        """Print through something else from now on (a progress bar)."""
        self._say = say

    def check(self) -> None:
        """Raise StopAsked when asked."""
        if self.asked is not None:
            raise StopAsked(self.asked)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise StopAsked in the main thread, wherever it stands in the block, as soon as a request comes."""
        self.check()
        self._raising = True
        try:
            yield
            self._raising = False
        finally:
            self._raising = False

    def share(self, store: KeyValueStore, process: int, processes: int, name: str) -> None:
        """Join the processes of a run: from now on a request to any of them is one to all.

        Args:
          store: JAX's coordination client.
          process: index of this process.
          processes: their number; 1 changes nothing.
          name: tells starts of a run apart.
        """
        if processes == 1 or self._shared:
            return
        self._shared = True
        prefix = f"ridge/stop/{name}"
        self._pipe = os.pipe()
        threading.Thread(target=self._tell, args=(store, prefix, self._pipe[0]), name="stop-tell", daemon=True).start()
        listener = threading.Thread(target=self._listen, args=(store, prefix, process, processes), name="stop-listen", daemon=True)
        listener.start()

        def end() -> None:
            with contextlib.suppress(Exception):  # somebody was first, or the service is gone
                store.key_value_set(f"{prefix}/asked", FAREWELL)
            listener.join(END_S)

        self._end = end
        self._vote = lambda vote: store.key_value_set(f"{prefix}/vote/{process}", vote)
        self._votes = lambda: [store.blocking_key_value_get(f"{prefix}/vote/{other}", WAIT_MS) for other in range(processes)]
        if self.asked is not None:
            os.write(self._pipe[1], b"!")

    def begin_together(self) -> None:
        """Let all processes go on to the loop or none: raise StopAsked in all of them when any was asked to stop during start-up.

        Otherwise one that leaves early would let the others wait for it in their first step. Every process calls this once, or `give_up`.
        """
        self._vote(_GO if self.asked is None else _STOP)
        if _STOP in self._votes():
            raise StopAsked(self.asked or signal.SIGTERM)
        if not self._shared:
            self.check()
        self._saves = True

    def give_up(self) -> None:
        """Tell the others that this process leaves before the loop."""
        with contextlib.suppress(Exception):  # it has voted, or the service is gone
            self._vote(_STOP)

    def unshare(self) -> None:
        """Stop listening, before the coordination service goes: a thread that waited for it inside C++ would abort the process."""
        self._end()
        self._end = lambda: None

    def agreed(self) -> signal.Signals | None:
        """Poll: return the signal all processes stop for at this poll, or None. All of them must poll in the same order."""
        if not self._shared:
            return self.asked
        with self._lock:  # held by the listener while the processes find the poll to stop at
            self._polls += 1
            return self._agreed if self._stop_at is not None and self._polls >= self._stop_at else None

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        again, self.asked = self.asked, self.asked or signal.Signals(number)
        if again is not None and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        if again is None:
            what = "saving after this step (Ctrl-C again to stop without saving)" if self._saves else "nothing to save yet"
            self._say(f"{self.asked.name} received: {what}")
            if self._pipe is not None:
                os.write(self._pipe[1], b"!")  # the teller's thread: no message may be sent from inside a handler
        if self._raising:
            self._raising = False
            raise StopAsked(self.asked)

    def _tell(self, store: KeyValueStore, prefix: str, pipe: int) -> None:
        os.read(pipe, 1)
        assert self.asked is not None
        with contextlib.suppress(Exception):  # the service is gone: so are the others
            store.key_value_set(f"{prefix}/asked", self.asked.name, allow_overwrite=True)

    def _listen(self, store: KeyValueStore, prefix: str, process: int, processes: int) -> None:
        try:
            name = store.blocking_key_value_get(f"{prefix}/asked", WAIT_MS)
            if name == FAREWELL:
                return
            heard = signal.Signals[name]
            with self._lock:
                store.key_value_set(f"{prefix}/at/{process}", str(self._polls), allow_overwrite=True)
                if process == 0:
                    reached = [int(store.blocking_key_value_get(f"{prefix}/at/{other}", AGREE_MS)) for other in range(processes)]
                    store.key_value_set(f"{prefix}/stop_at", str(max(reached) + 1), allow_overwrite=True)
                self._stop_at = int(store.blocking_key_value_get(f"{prefix}/stop_at", 2 * AGREE_MS))
                self._agreed = heard
        except Exception:  # the run ends: the service goes before its threads do
            return
        if self.asked is None:
            # the main thread's own handler, wherever that thread waits
            os.kill(os.getpid(), heard)


def in_thread(work: Callable[[], T]) -> T:
    """Run work in a thread and wait for it: the main thread still hears signals while the work is inside C++, however long."""
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
