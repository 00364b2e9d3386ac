"""Append-only files of JSON lines that survive a kill at any byte: one writer, one `write` per line, an incomplete last line is dropped."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import open_regular
from ridgeline.rundir.files import first_problem, refuse_link

T = TypeVar("T")
MAX_LOG_BYTES = 2 << 30
"""Largest log that is read."""
TAIL_BYTES = 1 << 20
"""How much of the end of a log is read to find its newest lines."""
_log = logging.getLogger("ridgeline")


class LineFile:
    """Appends lines, each completely or not at all. Safe to use from several threads.

    A line that cannot be written (full disk) is dropped with one warning: the run goes on without it. `dropped` counts the lines dropped
    since the last written one. `guard` is called before each write; what it raises is not caught.

    Raises:
      UserError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path, guard: Callable[[], None] = lambda: None) -> None:
        self.path, self._guard = path, guard
        self.dropped = 0
        self._lock = threading.RLock()  # a signal handler may log in the thread that is writing a line
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            refuse_link(path)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o644)
            self.torn_bytes = self._cut_torn_line()
        except OSError as error:  # of a FIFO, there is no end to read
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        """Bytes of an incomplete last line of a killed writer, now removed."""

    def _cut_torn_line(self) -> int:
        size = os.fstat(self._fd).st_size
        tail_bytes = min(size, 1 << 20)
        tail = os.pread(self._fd, tail_bytes, size - tail_bytes)
        torn_bytes = len(tail) - (tail.rfind(b"\n") + 1)
        if torn_bytes:
            os.ftruncate(self._fd, size - torn_bytes)
        self._size = size - torn_bytes
        return torn_bytes

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def append(self, line: bytes) -> bool:
        """Append one line (its newline included); return whether it was written."""
        assert line.endswith(b"\n")
        with self._lock:
            if self._fd < 0:
                return False  # a thread that runs on after the end of the run
            self._guard()
            try:
                written = os.write(self._fd, line)
                if written < len(line):  # a full disk may store a part of the line
                    os.ftruncate(self._fd, self._size)
                    raise OSError(0, "no space for a whole line")
            except OSError as error:
                if not self.dropped:
                    _log.warning("cannot write %s: %s; lines are dropped", self.path, error.strerror)
                self.dropped += 1
                return False
            self._size += written
            self.dropped = 0
            return True

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def read_jsonl(path: Path, tail_bytes: int | None = None, from_byte: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object), dropping a last line without its newline.

    Args:
      path: the file.
      tail_bytes: read only the whole lines in this many bytes at the end of the file, numbered from there; None: the whole file.
      from_byte: read only the lines from here on, the beginning of a line, numbered from there; with tail_bytes None.

    Raises:
      UserError: the file cannot be read or is too large, or a whole line is not a JSON object (the file was edited or damaged).
    """
    for number, line in _whole_lines(path, tail_bytes, from_byte):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("not an object")
            if b"\\ud" in line.lower():
                json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            place = f"{path}:{number}" if tail_bytes is None and not from_byte else str(path)
            raise UserError(f"{place}: unreadable line in an append-only log ({_short(error)})") from error
        yield number, value


def read_last_jsonl(path: Path, tail_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the objects in the last `tail_bytes` bytes of a file; [] without a file. Raises UserError when a line is damaged."""
    return [value for _, value in read_jsonl(path, tail_bytes)] if path.exists() else []


def read_typed_jsonl(path: Path, kind: type[T]) -> list[T]:
    """Return the lines as dataclasses or records, their types checked, dropping a last line without its newline.

    Raises:
      UserError: the file cannot be read or is too large; or a line is not JSON, lacks a key, or has a value of another type.
    """
    adapter = TypeAdapter(kind)
    found = []
    for number, line in _whole_lines(path):
        try:
            found.append(adapter.validate_json(line, strict=True))
        except ValidationError as error:
            raise UserError(f"{path}:{number}: {first_problem(error)}") from None
    return found


def _whole_lines(path: Path, tail_bytes: int | None = None, from_byte: int = 0) -> Iterator[tuple[int, bytes]]:
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            start = min(from_byte, size) if tail_bytes is None else max(0, size - tail_bytes)
            if size - start > MAX_LOG_BYTES:
                raise UserError(f"{path} has {size:,} bytes; at most {MAX_LOG_BYTES:,} are read")
            file.seek(start)
            data = file.read(size - start)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if start and tail_bytes is not None:
        data = data[data.find(b"\n") + 1 :]
    yield from enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1)


def _short(error: Exception) -> str:
    return str(error) if len(str(error)) <= 200 else f"{str(error)[:200]}..."


def dump_json(value: Any) -> str:
    """Dump to strict, compact JSON; non-finite floats become the strings "NaN", "Infinity" and "-Infinity" (as in protobuf's JSON),
    numpy and jax scalars numbers, paths and other objects strings."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"), default=_plain)
    except ValueError:
        return json.dumps(finite_json(value), allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else str(value)


def finite_json(value: Any) -> Any:
    """Return a value as `dump_json` writes it: without non-finite floats."""
    if isinstance(value, Mapping):
        return {k: finite_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(v) for v in value]
    if not isinstance(value, str | int | float | bool | None):
        value = _plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
