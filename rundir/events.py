"""The append-only event log of a run: what happened, when, in which process, and for how long.

One file per process (`events.jsonl` for process 0, `events.<p>.jsonl` for the others), one writer per file, one JSON object per line.
A line goes to the kernel in one `write` on an `O_APPEND` descriptor, so a kill at any byte leaves at most one torn line, the last one.
The reader drops that line; the next writer of the file cuts it off and says so in its `open` event. Any other unreadable line is damage.

Every event holds: `time` (wall clock, s since 1970), `mono` (monotonic clock, s), `run` (run id), `process`, `restart` (0, 1, ...), `kind`.
Phases are two events, `phase_start` and `phase_end` (which repeats the name and adds `duration_s` and `outcome`), or one `phase_total`
where many short stretches are summed before they are written (waiting for data, once per log line), or a stretch ended before the log
was open (launch).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.rundir.jsonl import LineFile, dump_json, read_jsonl

PHASES = (
    "launch",
    "import",
    "rendezvous",
    "init",
    "restore",
    "compile",
    "first_step",
    "train",
    "data_wait",
    "evaluation",
    "save",
    "profile",
    "teardown",
)
"""The closed set of phase names: later accounting sums over exactly these."""
COMPILED, JAX_CACHE, LOADED = "compiled", "jax cache", "loaded"
"""Where a program comes from: XLA compiled it; it was lowered and found in JAX's cache; it was loaded whole (trainer/program_cache.py)."""
COMPILE_PARTS = ("trace_s", "lower_s", "compile_s", "load_s")
"""Fields of a compile phase, absent where the part did not take place."""

_OWN_KEYS = frozenset({"time", "mono", "run", "process", "restart", "kind"})


@dataclass(frozen=True)
class Event:
    """One line of an event log."""

    kind: str
    time_s: float
    """Wall clock, seconds since 1970: compares across hosts and restarts, but may jump."""
    mono_s: float
    """Monotonic clock, seconds: exact differences, only within one (process, restart)."""
    run: str
    process: int
    restart: int
    fields: Mapping[str, Any] = field(default_factory=dict)


def event_file(run_dir: Path, process: int) -> Path:
    """Name the event log of one process of a run."""
    return run_dir / ("events.jsonl" if process == 0 else f"events.{process}.jsonl")


def event_files(run_dir: Path) -> list[Path]:
    """List the event logs of all processes of a run, process 0 first."""
    others = (p for p in run_dir.glob("events.*.jsonl") if p.name.split(".")[1].isdigit())
    first = [run_dir / "events.jsonl"] if (run_dir / "events.jsonl").exists() else []
    return first + sorted(others, key=lambda p: int(p.name.split(".")[1]))


class EventLog:
    """The writer of one process's event log. Safe to use from several threads; phases nest per thread.

    Opening a file that already has events continues it: a torn last line is cut off and `restart` is one more than the file's last.
    Events that cannot be written (full disk) are dropped with one warning, and the next one that can be is preceded by a `dropped` event
    with their number: losing the log must not lose the run.

    Args:
      path: the file; its directory is made.
      process: index of this process.
      run: id of the run, the same over all restarts and processes.
      restart: None derives it from the file. Process 0 knows best: give the others its number.
      clock, monotonic: seconds; passed in by tests.

    Raises:
      UserError: the file cannot be opened for writing, or is damaged before its last line.
    """

    def __init__(
        self,
        path: str | Path,
        process: int = 0,
        *,
        run: str = "",
        restart: int | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self.process, self.run = process, run
        self._clock, self._monotonic = clock, monotonic
        self.observer: Callable[[str, float, Mapping[str, Any]], None] | None = None
        """Is told of every event as it is written: kind, moment by the monotonic clock, fields."""
        self._stack = threading.local()
        self._ids = itertools.count()
        self._file = LineFile(self.path)
        self.restart = _next_restart(self.path) if restart is None else restart
        self._prefix = f',"run":{json.dumps(run)},"process":{process},"restart":{self.restart},"kind":'
        self.emit("open", pid=os.getpid(), torn_bytes=self._file.torn_bytes)

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event. Fields are JSON values; NaN and infinities are written as the strings "NaN", "Infinity", "-Infinity"."""
        assert not _OWN_KEYS & fields.keys(), f"event fields {sorted(_OWN_KEYS & fields.keys())} belong to the log itself"
        self._write(kind, self._monotonic(), fields)

    def _write(self, kind: str, mono_s: float, fields: dict[str, Any], ago_s: float = 0.0) -> None:
        head = f'{{"time":{self._clock() - ago_s:.6f},"mono":{mono_s:.6f}{self._prefix}"{kind}"'
        line = head + ("," + dump_json(fields)[1:] if fields else "}") + "\n"
        if dropped := self._file.dropped:
            line = f'{head[: head.rindex(":")]}:"dropped","count":{dropped}}}\n' + line
        self._file.append(line.encode())
        if self.observer is not None:
            self.observer(kind, mono_s, fields)

    @contextlib.contextmanager
    def phase(self, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Record a phase from entry to exit; what the block puts into the yielded dict goes into the end event.

        The end is written on an exception too, with outcome "error" (or "interrupted" for KeyboardInterrupt and SystemExit) and its type.
        """
        assert name in PHASES, f"'{name}' is not a phase; phases are {PHASES}"
        stack: list[int] = self._stack.__dict__.setdefault("ids", [])
        key = next(self._ids)
        where = {"phase": name, "id": key, "parent": stack[-1] if stack else None}
        start_s = self._monotonic()
        self._write("phase_start", start_s, {**where, **fields})
        stack.append(key)
        outcome: dict[str, Any] = {"outcome": "ok"}
        results: dict[str, Any] = {}
        try:
            yield results
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
            outcome = {"outcome": "interrupted" if interrupted else "error", "error": type(error).__name__}
            raise
        finally:
            stack.pop()
            end_s = self._monotonic()
            self._write("phase_end", end_s, {**where, "duration_s": end_s - start_s, **outcome, **results})

    @property
    def depth(self) -> int:
        """How many phases are open on this thread."""
        return len(self._stack.__dict__.get("ids", ()))

    def total(self, name: str, duration_s: float, count: int = 1, *, ago_s: float = 0.0, **fields: Any) -> None:
        """Record `count` stretches of a phase, `duration_s` in all, that ended by now, or `ago_s` ago (in the enclosing phase, if any)."""
        assert name in PHASES, f"'{name}' is not a phase; phases are {PHASES}"
        stack: list[int] = self._stack.__dict__.get("ids", [])
        parent = stack[-1] if stack else None
        values = {"phase": name, "parent": parent, "duration_s": duration_s, "count": count, **fields}
        self._write("phase_total", self._monotonic() - ago_s, values, ago_s)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._file.close()


def read_events(paths: str | Path | Iterable[str | Path]) -> list[Event]:
    """Read one or more event logs, merged by wall clock (the order within a file is kept).

    Raises:
      UserError: a file cannot be read or is damaged before its last line.
    """
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(p) for p in paths]
    keyed: list[tuple[float, Event]] = []
    for path in files:
        latest_s = -math.inf  # wall clocks may step back: within one file the order of lines is the truth
        for number, record in read_jsonl(path):
            try:
                own = {key: record.pop(key) for key in _OWN_KEYS}
            except KeyError as error:
                raise UserError(f"{path}:{number}: event without {error}") from error
            event = Event(own["kind"], own["time"], own["mono"], own["run"], own["process"], own["restart"], record)
            latest_s = max(latest_s, event.time_s)
            keyed.append((latest_s, event))
    return [event for _, event in sorted(keyed, key=lambda pair: pair[0])]


def _next_restart(path: Path) -> int:
    """Return one more than the restart number of the log's last event; 0 for a new log."""
    last = -1
    for number, record in read_jsonl(path):
        if "restart" not in record:
            raise UserError(f"{path}:{number}: not an event of Ridgeline's log")
        last = record["restart"]
    return last + 1
