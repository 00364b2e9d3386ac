"""Append-only files of JSON lines that a kill at any byte cannot spoil: one writer, one `write` per line, a torn last line dropped."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError

_log = logging.getLogger("ridgeline")


class LineFile:
    """Appends lines, each whole or not at all. Safe to use from several threads.

    A line that cannot be written (full disk) is dropped with one warning: losing a log must not lose the run. `dropped` counts the lines
    lost since the last good one.

    Raises:
      UserError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        self.torn_bytes = self._cut_torn_line()
        """Bytes of a line that a killed writer left unfinished, now cut off."""

    def _cut_torn_line(self) -> int:
        size = os.fstat(self._fd).st_size
        tail_bytes = min(size, 1 << 20)
        tail = os.pread(self._fd, tail_bytes, size - tail_bytes)
        torn_bytes = len(tail) - (tail.rfind(b"\n") + 1)
        if torn_bytes:
            os.ftruncate(self._fd, size - torn_bytes)
        self._size = size - torn_bytes
        return torn_bytes

    def append(self, line: bytes) -> bool:
        """Append one line (its newline included); return whether it was written."""
        assert line.endswith(b"\n")
        with self._lock:
            if self._fd < 0:
                return False  # a thread that outlived the run has nowhere to write
            try:
                written = os.write(self._fd, line)
                if written < len(line):  # a disk that becomes full takes a part of the line
                    os.ftruncate(self._fd, self._size)
                    raise OSError(0, "no space for a whole line")
            except OSError as error:
                if not self.dropped:
                    _log.warning("lines are being lost: cannot write %s: %s", self.path, error.strerror)
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


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object), dropping a last line without its newline.

    Raises:
      UserError: the file cannot be read, or a whole line is not a JSON object (the file was edited or damaged).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise UserError(f"{path}:{number}: unreadable line in an append-only log ({error})") from error
        yield number, value


def dump_json(value: Any) -> str:
    """Dump to strict, compact JSON; non-finite floats become the strings "NaN", "Infinity" and "-Infinity" (as in protobuf's JSON),
    numpy and jax scalars numbers, paths and other objects strings."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"), default=_plain)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if not isinstance(value, str | int | float | bool | None):
        value = _plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
