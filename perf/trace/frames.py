"""Where the main thread is while a profile is taken, sampled a few hundred times a second: the source lines of its waits.

XLA's own Python tracer records every call of every thread, which swamps the trace and slows the loop. A wait that costs a step anything
lasts milliseconds, so samples find it. They lie beside the profile: `<name>.frames.json`, a list of [begin, end, "file:line"] in
nanoseconds since 1970, one per stretch of samples at the same line.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from configs.errors import UserError

SUFFIX = ".frames.json"
PERIOD_S = 0.002
ROOT = str(Path(__file__).resolve().parents[2])
_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")))


def own_line(frame: FrameType | None) -> str | None:
    """Return `file:line` of the innermost frame outside of libraries (this project counts as none, wherever it is installed)."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT + "/") and "/site-packages/" not in file[len(ROOT) :]:
            return f"{file}:{frame.f_lineno}"
        if not file.startswith(("<", *_LIBRARIES)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


class Sampler:
    """Samples the thread that starts it until `stop`."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._found: list[tuple[int, int, str]] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
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
        """End; return the stretches."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        return self._found


@dataclass(frozen=True)
class Frames:
    """Stretches of samples in order of time."""

    stretches: list[tuple[int, int, str]]

    def most_often(self, low_ns: int, high_ns: int) -> str | None:
        """Return the line where the thread was longest between two moments; None without a sample in it."""
        spent = Counter[str]()
        for begin_ns, end_ns, line in self.stretches:
            inside_ns = min(end_ns, high_ns) - max(begin_ns, low_ns)
            if inside_ns >= 0:
                spent[line] += inside_ns + 1
        return spent.most_common(1)[0][0] if spent else None


def read_frames(path: Path) -> Frames | None:
    """Read the samples beside a profile (`path` of the profile); None without any. Raises UserError when the file is damaged."""
    file = path.with_name(path.name.removesuffix(".xplane.pb") + SUFFIX)
    if not file.is_file():
        return None
    try:
        return Frames([(int(begin), int(end), str(line)) for begin, end, line in json.loads(file.read_bytes())])
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
