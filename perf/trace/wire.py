"""Read `*.xplane.pb` into columns, a line at a time.

jax.profiler.ProfileData reads the same files and is what the tests compare with, but builds the whole message in memory (several times
the file) and makes Python objects of every statistic of every event; a trace of 1 GB would need more than the 4 GB and the minute it may
take (tests/bench/analyze.py). Here the file is mapped, framing is walked in place, and events are parsed in batches by protobuf's C
parser under a schema that leaves statistics as bytes: most of them repeat, so they are decoded once.

The schema is XSpace of openxla/xla, xla/tsl/profiler/protobuf/xplane.proto.
"""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import UserError

BATCH_BYTES = 8 << 20
MISSING = -1
"""Value of a statistic an event does not have."""

Buffer = bytes | mmap.mmap
Value = int | float | str


@dataclass
class Line:
    """The events of one line (a stream or a thread) that were kept, in file order."""

    name: str
    names: np.ndarray
    """int32 [n]: index into Plane.strings."""
    start_ps: np.ndarray
    """int64 [n]: since `Space.base_ns`."""
    duration_ps: np.ndarray
    """int64 [n]."""
    stats: dict[str, np.ndarray]
    """Statistic -> int64 [n]; texts are indices into Plane.strings; MISSING where an event has none."""


@dataclass
class Plane:
    """A device or a host."""

    name: str
    lines: list[Line] = field(default_factory=list)
    stats: dict[str, Value] = field(default_factory=dict)


@dataclass
class Space:
    """One file."""

    base_ns: int
    """Zero of all times, nanoseconds since 1970 (or of whatever clock the file uses)."""
    planes: list[Plane]
    strings: list[str]
    """Every text that events refer to, once."""
    hostnames: list[str]


class Damaged(ValueError):
    """Not a whole XSpace message."""


def read_space(path: Path, wanted: frozenset[str], drop: Callable[[str], bool]) -> Space:
    """Read a profile.

    Args:
      path: an `*.xplane.pb` file.
      wanted: names of the statistics to keep.
      drop: tells from an event's name that it is of no use.

    Raises:
      UserError: the file is missing, empty, truncated or no profile.
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise UserError(f"{path} is empty: the profile was not written")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return parse_space(data, wanted, drop)
    except Damaged as error:
        raise UserError(f"{path} is not a whole xplane profile: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def parse_space(data: Buffer, wanted: frozenset[str], drop: Callable[[str], bool]) -> Space:
    """Parse a serialized XSpace; see read_space. Raises Damaged."""
    space = Space(0, [], [], [])
    strings = _Strings(space.strings)
    pending: list[tuple[Line, int]] = []
    for number, _, start, end in _fields(data, 0, len(data)):
        if number == 1:
            space.planes.append(_plane(data, start, end, wanted, drop, strings, pending))
        elif number == 4:
            space.hostnames.append(_text(data, start, end))
        elif number not in (2, 3):
            raise Damaged(f"unknown field {number}")
    if not space.planes:
        raise Damaged("it holds no planes")
    used = [base_ns for line, base_ns in pending if len(line.names)]
    if used and max(used) - min(used) > _LONGEST_NS:
        used = [base_ns for base_ns in used if base_ns]  # lines without a time of their own
    space.base_ns = min(used, default=0)
    if used and max(used) - space.base_ns > _LONGEST_NS:
        raise Damaged("its lines lie years apart")
    for line, base_ns in pending:
        line.start_ps += (max(base_ns, space.base_ns) - space.base_ns) * 1000
    return space


_LONGEST_NS = 10**15
"""Eleven days: no capture is longer, and 64-bit picoseconds hold it."""


class _Strings:
    """Each text once."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self._index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        found = self._index.get(text)
        if found is None:
            found = self._index[text] = len(self.texts)
            self.texts.append(text)
        return found


def _plane(
    data: Buffer,
    start: int,
    end: int,
    wanted: frozenset[str],
    drop: Callable[[str], bool],
    strings: _Strings,
    pending: list[tuple[Line, int]],
) -> Plane:
    plane = Plane("")
    lines: list[tuple[int, int]] = []
    events: dict[int, str] = {}
    stats: dict[int, str] = {}
    own: list[bytes] = []
    for number, _, begin, stop in _fields(data, start, end):
        if number == 2:
            plane.name = _text(data, begin, stop)
        elif number == 3:
            lines.append((begin, stop))
        elif number == 4:
            key, name = _map_entry(data, begin, stop)
            events[key] = name
        elif number == 5:
            key, name = _map_entry(data, begin, stop)
            stats[key] = name
        elif number == 6:
            own.append(bytes(data[begin:stop]))
    for raw in own:
        key, value = _stat(raw, stats)
        plane.stats[stats.get(key, str(key))] = value
    reader = _Events(events, stats, wanted, drop, strings)
    for begin, stop in lines:
        line, base_ns = _line(data, begin, stop, reader)
        plane.lines.append(line)
        pending.append((line, base_ns))
    return plane


def _line(data: Buffer, start: int, end: int, reader: _Events) -> tuple[Line, int]:
    """Read a line and the time its events count from. Events are handed to the parser in batches of adjacent ones."""
    name, base_ns = "", 0
    parts: list[_Columns] = []
    position = start
    while position < end:
        if data[position] == _EVENT:
            stop = position
            limit = min(end, position + BATCH_BYTES)
            while stop < limit and data[stop] == _EVENT:
                length = data[stop + 1] if stop + 1 < end else 0
                if length < 128:
                    stop += 2 + length
                else:
                    length, after = _varint(data, stop + 1)
                    stop = after + length
            if stop > end:
                raise Damaged("it is cut off inside an event")
            parts.append(reader.read(bytes(data[position:stop])))
            position = stop
            continue
        number, _, begin, stop = next(_fields(data, position, end))
        if number == 2:
            name = _text(data, begin, stop)
        elif number == 3:
            base_ns, _ = _varint(data, begin)
        elif number == 11 and not name:
            name = _text(data, begin, stop)
        position = stop
    return _joined(name, parts, reader.wanted), base_ns


_EVENT = 0x22
"""Tag of XLine.events: field 4, length-delimited."""


@dataclass
class _Columns:
    """A batch of events; arrays, since lists of Python integers would take five times the memory."""

    names: np.ndarray
    start_ps: np.ndarray
    duration_ps: np.ndarray
    stats: dict[str, tuple[np.ndarray, np.ndarray]]
    """Statistic -> rows that have it, and its values."""


class _Events:
    """Parses batches of events of one plane."""

    def __init__(
        self, events: dict[int, str], stats: dict[int, str], wanted: frozenset[str], drop: Callable[[str], bool], strings: _Strings
    ) -> None:
        self.wanted = wanted
        self._stats = stats
        self._slots = {key: name for key, name in stats.items() if name in wanted}
        self._names = {key: strings(name) for key, name in events.items() if not drop(name)}
        self._dropped = {key for key, name in events.items() if drop(name)}
        self._strings = strings
        self._cache: dict[bytes, int] = {}
        self._line = _line_message()

    def read(self, raw: bytes) -> _Columns:
        """Parse adjacent XLine.events fields."""
        try:
            events = self._line.FromString(raw).events
        except Exception as error:  # protobuf's DecodeError, whose module is not typed
            raise Damaged("it holds an event that cannot be parsed") from error
        names: list[int] = []
        starts: list[int] = []
        durations: list[int] = []
        stats: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in self.wanted}
        slots, cache, dropped, known = self._slots, self._cache, self._dropped, self._names
        for event in events:
            key = event.metadata_id
            if key in dropped:
                continue
            row = len(names)
            names.append(known[key] if key in known else self._nameless(key))
            starts.append(event.offset_ps)
            durations.append(event.duration_ps)
            for stat in event.stats:
                which = stat[1] if len(stat) > 1 and stat[0] == 8 and stat[1] < 128 else _key(stat)
                slot = slots.get(which)
                if slot is None:
                    continue
                value = cache.get(stat)
                if value is None:
                    value = self._value(stat, slot)
                rows, values = stats[slot]
                rows.append(row)
                values.append(value)
        arrays = {name: (np.array(rows, np.int64), np.array(values, np.int64)) for name, (rows, values) in stats.items() if rows}
        return _Columns(np.array(names, np.int32), np.array(starts, np.int64), np.array(durations, np.int64), arrays)

    def _nameless(self, key: int) -> int:
        """Events whose metadata the file lacks get their number for a name."""
        self._names[key] = self._strings(f"event {key}")
        return self._names[key]

    def _value(self, stat: bytes, slot: str) -> int:
        _, value = _stat(stat, self._stats)
        number = self._strings(value) if isinstance(value, str) else int(value)
        number = (number + 2**63) % 2**64 - 2**63  # hashes are unsigned: keep their bits
        if slot not in UNIQUE:
            self._cache[stat] = number
        return number


UNIQUE = frozenset({"correlation_id"})
"""Statistics whose values do not repeat: remembering them would only cost memory."""


def _joined(name: str, parts: list[_Columns], wanted: frozenset[str]) -> Line:
    count = sum(len(part.names) for part in parts)

    def column(key: str, dtype: type) -> np.ndarray:
        return np.concatenate([getattr(part, key) for part in parts] or [np.zeros(0, dtype)])

    line = Line(name, column("names", np.int32), column("start_ps", np.int64), column("duration_ps", np.int64), {})
    for stat in wanted:
        if any(stat in part.stats for part in parts):
            values = np.full(count, MISSING, np.int64)
            first = 0
            for part in parts:
                if stat in part.stats:
                    rows, found = part.stats[stat]
                    values[rows + first] = found
                first += len(part.names)
            line.stats[stat] = values
    return line


def _fields(data: Buffer, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, start of the tag, start of the value, end of the value) of the fields of a message."""
    position = start
    while position < end:
        tag, begin = _varint(data, position)
        wire = tag & 7
        if wire == 2:
            length, begin = _varint(data, begin)
            stop = begin + length
        elif wire == 0:
            _, stop = _varint(data, begin)
        elif wire in (1, 5):
            stop = begin + (8 if wire == 1 else 4)
        else:
            raise Damaged(f"unknown wire type {wire}")
        if stop > end or not tag >> 3:
            raise Damaged("it is cut off")
        yield tag >> 3, position, begin, stop
        position = stop


def _varint(data: Buffer, position: int) -> tuple[int, int]:
    """Return a varint and the position after it."""
    value = shift = 0
    try:
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, position
            shift += 7
            if shift > 63:
                raise Damaged("a number is too long")
    except IndexError:
        raise Damaged("it is cut off") from None


def _text(data: Buffer, start: int, end: int) -> str:
    return bytes(data[start:end]).decode(errors="replace")


def _map_entry(data: Buffer, start: int, end: int) -> tuple[int, str]:
    """Read an entry of the event or statistic metadata: key, and the name in the value."""
    key, name = 0, ""
    for number, _, begin, stop in _fields(data, start, end):
        if number == 1:
            key, _ = _varint(data, begin)
        elif number == 2:
            for inner, _, first, last in _fields(data, begin, stop):
                if inner == 2:
                    name = _text(data, first, last)
                elif inner == 1 and not key:
                    key, _ = _varint(data, first)
    return key, name


def _key(stat: bytes) -> int:
    for number, _, begin, _ in _fields(stat, 0, len(stat)):
        if number == 1:
            return _varint(stat, begin)[0]
    return 0


def _stat(stat: bytes, names: dict[int, str]) -> tuple[int, Value]:
    """Decode an XStat: key and value; a reference becomes the text it refers to."""
    key, value = 0, 0  # type: tuple[int, Value]
    for number, _, begin, stop in _fields(stat, 0, len(stat)):
        if number == 1:
            key, _ = _varint(stat, begin)
        elif number == 2:
            value = float(struct.unpack("<d", stat[begin:stop])[0])
        elif number in (3, 4):
            value, _ = _varint(stat, begin)
            if number == 4 and value >= 2**63:
                value -= 2**64
        elif number in (5, 6):
            value = _text(stat, begin, stop)
        elif number == 7:
            value = names.get(_varint(stat, begin)[0], "")
    return key, value


@functools.cache
def _line_message() -> Any:
    """The part of XLine that is parsed by protobuf: events with statistics left as bytes."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="ridgeline_xplane.proto", package="ridgeline", syntax="proto3")
    event = file.message_type.add(name="Event")
    for name, number in (("metadata_id", 1), ("offset_ps", 2), ("duration_ps", 3)):
        event.field.add(name=name, number=number, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    event.field.add(name="stats", number=4, type=kinds.TYPE_BYTES, label=kinds.LABEL_REPEATED)
    line = file.message_type.add(name="Line")
    line.field.add(name="events", number=4, type=kinds.TYPE_MESSAGE, type_name=".ridgeline.Event", label=kinds.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ridgeline.Line"))
