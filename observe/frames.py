"""Samples of the source line of the main thread during a profile, a few hundred per second, to locate its waits.

XLA's Python tracer records every call of every thread, which floods the trace and slows the loop. A wait that matters lasts
milliseconds, so samples find it. They are stored beside the profile in `<name>.frames.json`: a list of [begin, end, "file:line"] in
nanoseconds since 1970, one per run of samples at the same line.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from types import FrameType

from ridgeline import PACKAGE

PERIOD_S = 0.002
_OWN = f"{PACKAGE}/"
_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")))


def own_line(frame: FrameType | None) -> str | None:
    """Return `file:line` of the innermost frame outside of libraries (this project is not a library, wherever it is installed)."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN) or not file.startswith(("<", *_LIBRARIES)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


class Sampler:
    """Samples the thread that calls `start`, until `stop`."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._found: list[tuple[int, int, str]] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start sampling."""
        self._thread = threading.Thread(target=self._run, args=(threading.get_ident(),), name="ridge-frames", daemon=True)
        self._thread.start()

    def _run(self, watched: int) -> None:
        while not self._done.wait(self._period_s):
            now_ns = time.time_ns()
            line = own_line(sys._current_frames().get(watched))
            if line is None:
                continue
            if self._found and self._found[-1][2] == line:
                self._found[-1] = (self._found[-1][0], now_ns, line)
            else:
                self._found.append((now_ns, now_ns, line))

    def stop(self) -> list[tuple[int, int, str]]:
        """Stop sampling; return (begin ns, end ns, line) of each run of samples at the same line."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        return self._found
