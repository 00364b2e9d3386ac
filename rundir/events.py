"""The append-only event log of a run: events and phases of each process with their times.

One file per process (`events.jsonl` for process 0, `events.<p>.jsonl` for the others), one writer per file, one JSON object per line.
A line is one `write` on an `O_APPEND` descriptor, so a kill at any byte leaves at most one incomplete line, the last one. The reader
drops that line; the next writer of the file removes it and records its size in its `open` event. Any other unreadable line is damage.

Every event holds: `time` (wall clock, s since 1970), `mono` (monotonic clock, s), `run` (run id), `process`, `restart` (0, 1, ...), `kind`.
A phase is two events, `phase_start` and `phase_end` (which repeats the name and adds `duration_s` and `outcome`), or one `phase_total` for
many short intervals summed before they are written (waiting for data, once per log line) or an interval before the log was open (launch).
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
from ridgeline.rundir.event_types import NUMBERS, OWN, PHASES, check_event
from ridgeline.rundir.jsonl import TAIL_BYTES, LineFile, dump_json, read_jsonl, read_last_jsonl

COMPILED, JAX_CACHE, LOADED = "compiled", "jax cache", "loaded"
"""Origin of a program: compiled by XLA; lowered and read from JAX's cache; or loaded compiled (trainer/program_cache.py)."""
COMPILE_PARTS = ("trace_s", "lower_s", "compile_s", "load_s")
"""Fields of a compile phase; absent when the part did not happen."""


@dataclass(frozen=True)
class Event:
    """One line of an event log."""

    kind: str
    time_s: float
    """Wall clock, seconds since 1970: comparable across hosts and restarts, but may jump."""
    mono_s: float
    """Monotonic clock, seconds: exact differences within one (process, restart)."""
    run: str
    process: int
    restart: int
    fields: Mapping[str, Any] = field(default_factory=dict)


def event_file(run_dir: Path, process: int) -> Path:
    """Return the event log of one process of a run."""
    return run_dir / ("events.jsonl" if process == 0 else f"events.{process}.jsonl")


def event_files(run_dir: Path) -> list[Path]:
    """Return the event logs of all processes of a run, process 0 first."""
    others = (p for p in run_dir.glob("events.*.jsonl") if p.name.split(".")[1].isdigit())
    first = [run_dir / "events.jsonl"] if (run_dir / "events.jsonl").exists() else []
    return first + sorted(others, key=lambda p: int(p.name.split(".")[1]))


class EventLog:
    """The writer of one process's event log. Safe to use from several threads; phases nest per thread.

    Opening a file that has events continues it: an incomplete last line is removed and `restart` is one more than the last one in the file.
    Events that cannot be written (full disk) are dropped with one warning, and the next event is preceded by a `dropped` event with their
    number: the run goes on without its log.

    Args:
      path: the file; its directory is created.
      process: index of this process.
      run: id of the run, the same over all restarts and processes.
      restart: number of the start; None: derived from the file. Pass the number of process 0 to the others.
      clock, monotonic: seconds; tests pass their own.
      guard: called before each write (Lease.check_log).

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
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = Path(path)
        self.process, self.run = process, run
        self._clock, self._monotonic = clock, monotonic
        self.observer: Callable[[str, float, Mapping[str, Any]], None] | None = None
        """Called with each event when it is written: kind, monotonic time, fields."""
        self._stack = threading.local()
        self._ids = itertools.count()
        self._file = LineFile(self.path, guard)
        self.start_byte = self._file.size
        """Where the events of this start begin in the file."""
        self.restart = _next_restart(self.path) if restart is None else restart
        self._prefix = f',"run":{json.dumps(run)},"process":{process},"restart":{self.restart},"kind":'
        self.emit("open", pid=os.getpid(), torn_bytes=self._file.torn_bytes)

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event. Fields are JSON values; NaN and infinities are written as the strings "NaN", "Infinity", "-Infinity"."""
        assert not OWN.keys() & fields.keys(), f"event fields {sorted(OWN.keys() & fields.keys())} are reserved"
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
        """Record a phase from entry to exit; the end event holds the entries of the yielded dict.

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
        """Number of open phases on this thread."""
        return len(self._stack.__dict__.get("ids", ()))

    def total(self, name: str, duration_s: float, count: int = 1, *, ago_s: float = 0.0, **fields: Any) -> None:
        """Record `count` intervals of a phase, `duration_s` in total, that ended `ago_s` ago (in the enclosing phase, if any)."""
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
      UserError: a file cannot be read, or a line before its last one is damaged.
    """
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(p) for p in paths]
    keyed: list[tuple[float, Event]] = []
    for path in files:
        latest_s = -math.inf  # the wall clock may step back: within one file the order of the lines counts
        for number, record in read_jsonl(path):
            event = _event(record, f"{path}:{number}")
            latest_s = max(latest_s, event.time_s)
            keyed.append((latest_s, event))
    return [event for _, event in sorted(keyed, key=lambda pair: pair[0])]


def read_events_from(path: Path, from_byte: int) -> list[Event]:
    """Return the events of one log from a byte on, where a line begins. Raises UserError as `read_events`."""
    return [_event(record, str(path)) for _, record in read_jsonl(path, from_byte=from_byte)]


def read_last_events(path: Path, tail_bytes: int = TAIL_BYTES) -> list[Event]:
    """Return the events in the last bytes of a log; [] without a log. Raises UserError when a line is damaged."""
    return [_event(record, str(path)) for record in read_last_jsonl(path, tail_bytes)]


def _event(record: dict[str, Any], place: str) -> Event:
    """Return the event of a line, its types checked."""
    check_event(record, place)
    if record["kind"] == "step":
        record.update({name: float(record[name]) for name in NUMBERS if type(record.get(name)) is str})  # "NaN"
    own = {key: record.pop(key) for key in OWN}
    return Event(own["kind"], own["time"], own["mono"], own["run"], own["process"], own["restart"], record)


def _next_restart(path: Path) -> int:
    """Return one more than the restart number of the log's last event; 0 for a new log."""
    last = -1
    for number, record in read_jsonl(path):
        if type(record.get("restart")) is not int:
            raise UserError(f"{path}:{number}: not an event log")
        last = record["restart"]
    return last + 1
