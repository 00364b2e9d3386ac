"""Read `*.xplane.pb` into columns, a line at a time.

jax.profiler.ProfileData reads the same files and is the reference of the tests, but it builds the whole message in memory (several times
the file size) and creates Python objects for every statistic of every event. The limit for a trace of 1 GB is 4 GB and a minute
(benchmarks/analyze.py). Here the file is memory-mapped, the message framing is read in place, and events are parsed in batches as numpy
columns.

The schema is XSpace of openxla/xla, xla/tsl/profiler/protobuf/xplane.proto.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import open_regular
from ridgeline.explain.trace.protobuf import Value, decode_stat, map_entry, module_entry
from ridgeline.hlo.protobuf import Buffer, Damaged, decode_text, fields, varint, varints

BATCH_BYTES = 8 << 20
MISSING = -1
"""Value of a statistic that an event does not have."""

SHARES, MILLION = frozenset({"fragmentation"}), 10**6
"""Statistics between 0 and 1, which are kept in millionths."""

__all__ = ["MILLION", "MISSING", "Damaged", "Line", "Plane", "Space", "parse_space", "read_space"]


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
    """Statistic -> int32 or int64 [n]; texts are indices into Plane.strings; MISSING where an event has none."""

    def stat(self, *keys: str) -> np.ndarray:
        """Return a statistic of every event: the first of several that an event has, else MISSING."""
        column = np.full(len(self.names), MISSING, np.int32)
        for key in keys:
            if key in self.stats:
                column = np.where(column == MISSING, self.stats[key], column)  # widens the type where needed
        return column


@dataclass
class Plane:
    """A device or a host."""

    name: str
    lines: list[Line] = field(default_factory=list)
    stats: dict[str, Value] = field(default_factory=dict)
    modules: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Program id -> start and end of its HloProto in the file."""


@dataclass
class Space:
    """One file."""

    base_ns: int
    """Zero of all times, nanoseconds since 1970 (or of whatever clock the file uses)."""
    planes: list[Plane]
    strings: list[str]
    """Every text that events refer to, once."""
    hostnames: list[str]
    problems: list[str] = field(default_factory=list)
    """Errors and warnings of the profiler, such as dropped events."""


def read_space(path: Path, wanted: frozenset[str], drop: Callable[[str], bool]) -> Space:
    """Read a profile.

    Args:
      path: an `*.xplane.pb` file.
      wanted: names of the statistics to keep.
      drop: whether an event of this name is not needed.

    Raises:
      UserError: the file is missing, empty, truncated or not a profile.
    """
    try:
        with open_regular(path) as file:
            if not path.stat().st_size:
                raise UserError(f"{path} is empty: the profile was not written")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return parse_space(data, wanted, drop)
    except Damaged as error:
        raise UserError(f"{path} is not a complete xplane profile: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def parse_space(data: Buffer, wanted: frozenset[str], drop: Callable[[str], bool]) -> Space:
    """Parse a serialized XSpace; see read_space. Raises Damaged."""
    space = Space(0, [], [], [])
    strings = _Strings(space.strings)
    pending: list[tuple[Line, int]] = []
    for number, _, start, end in fields(data, 0, len(data)):
        if number == 1:
            space.planes.append(_plane(data, start, end, wanted, drop, strings, pending))
        elif number == 4:
            space.hostnames.append(decode_text(data, start, end))
        elif number in (2, 3):
            space.problems.append(decode_text(data, start, end))
        else:
            raise Damaged(f"unknown field {number}")
    if not space.planes:
        raise Damaged("it contains no planes")
    used = [base_ns for line, base_ns in pending if len(line.names)]
    if used and max(used) - min(used) > _LONGEST_NS:
        used = [base_ns for base_ns in used if base_ns]  # lines without a time of their own
    space.base_ns = min(used, default=0)
    if used and max(used) - space.base_ns > _LONGEST_NS:
        raise Damaged("its lines are years apart")
    for line, base_ns in pending:
        line.start_ps += (max(base_ns, space.base_ns) - space.base_ns) * 1000
    return space


_LONGEST_NS = 10**15
"""Eleven days: longer than any capture, and small enough for 64-bit picoseconds."""


class _Strings:
    """Interned texts."""

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
    entries: list[tuple[int, int]] = []
    for number, _, begin, stop in fields(data, start, end):
        if number == 2:
            plane.name = decode_text(data, begin, stop)
        elif number == 3:
            lines.append((begin, stop))
        elif number == 4:
            key, name = map_entry(data, begin, stop)
            events[key] = name
            entries.append((begin, stop))
        elif number == 5:
            key, name = map_entry(data, begin, stop)
            stats[key] = name
        elif number == 6:
            own.append(bytes(data[begin:stop]))
    for raw in own:
        key, value = decode_stat(raw, stats)
        plane.stats[stats.get(key, str(key))] = value
    if plane.name == "/host:metadata":
        plane.modules = dict(found for span in entries if (found := module_entry(data, *span, stats)) is not None)
    reader = _Events(events, stats, wanted, drop, strings)
    for begin, stop in lines:
        line, base_ns = _line(data, begin, stop, reader)
        plane.lines.append(line)
        pending.append((line, base_ns))
    return plane


def _line(data: Buffer, start: int, end: int, reader: _Events) -> tuple[Line, int]:
    """Read a line and the zero of its times. Adjacent events are parsed in batches."""
    name, base_ns = "", 0
    parts: list[_Columns] = []
    position = start
    while position < end:
        if data[position] == _EVENT:
            raw = bytes(data[position : min(end, position + BATCH_BYTES)])
            starts, stops = _messages(raw)
            if not starts:  # one event longer than a batch, or truncated
                length, begin = varint(data, position + 1)
                if begin + length > end:
                    raise Damaged("the file is truncated inside an event")
                raw, starts, stops = bytes(data[position : begin + length]), [begin - position], [begin + length - position]
            parts.append(reader.read(raw, starts, stops))
            position += stops[-1]
            continue
        number, _, begin, stop = next(fields(data, position, end))
        if number == 2:
            name = decode_text(data, begin, stop)
        elif number == 3:
            base_ns, _ = varint(data, begin)
        elif number == 11 and not name:
            name = decode_text(data, begin, stop)
        position = stop
    return _joined(name, parts, reader.wanted), base_ns


def _messages(raw: bytes) -> tuple[list[int], list[int]]:
    """Return the starts and ends of the complete events at the start of `raw`."""
    starts: list[int] = []
    stops: list[int] = []
    position = 0
    while position + 1 < len(raw) and raw[position] == _EVENT:
        length, begin = raw[position + 1], position + 2
        if length > 127:
            try:
                length, begin = varint(raw, position + 1)
            except Damaged:
                break
        position = begin + length
        if position > len(raw):
            break
        starts.append(begin)
        stops.append(position)
    return starts, stops


_EVENT = 0x22
"""Tag of XLine.events: field 4, length-delimited."""


@dataclass
class _Columns:
    """A batch of events, as arrays: lists of Python integers would need five times the memory."""

    names: np.ndarray
    start_ps: np.ndarray
    duration_ps: np.ndarray
    stats: dict[str, tuple[np.ndarray, np.ndarray]]
    """Statistic -> rows that have it, and its values."""


class _Events:
    """Parses batches of events of one plane, all events of a batch at once."""

    def __init__(
        self, events: dict[int, str], stats: dict[int, str], wanted: frozenset[str], drop: Callable[[str], bool], strings: _Strings
    ) -> None:
        self.wanted = wanted
        self._stats = stats
        self._slots = {name: key for key, name in stats.items() if name in wanted}
        self._names = {key: strings(name) for key, name in events.items() if not drop(name)}
        self._dropped = np.array([key for key, name in events.items() if drop(name)], np.int64)
        self._strings = strings
        self._references: dict[int, int] = {}

    def read(self, raw: bytes, starts: list[int], stops: list[int]) -> _Columns:
        """Parse the XEvent messages at `starts` to `stops` in `raw`."""
        data = np.frombuffer(raw + bytes(_LONGEST_VARINT), np.uint8)
        begin, end = np.array(starts, np.int64), np.array(stops, np.int64)
        values = {number: np.zeros(len(begin), np.int64) for number in (1, 2, 3)}
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        rows = np.arange(len(begin))
        rows, position = rows[end > begin], begin[end > begin]
        while len(rows):
            tag, position = varints(data, position)
            wire, number = tag & 7, tag >> 3
            if not np.isin(wire, (0, 1, 2, 5)).all():
                raise Damaged("an event cannot be parsed")
            value, after = varints(data, position)
            after = np.where(wire == 1, position + 8, np.where(wire == 5, position + 4, after))
            after = np.where(wire == 2, after + np.clip(value, 0, len(data)), after)
            if (after > end[rows]).any():
                raise Damaged("an event cannot be parsed")
            for field_number, column in values.items():
                here = (number == field_number) & (wire == 0)
                column[rows[here]] = value[here]
            here = (number == 4) & (wire == 2)
            found.append((rows[here], (after - value)[here], after[here]))
            more = after < end[rows]
            rows, position = rows[more], after[more]
        keep = ~np.isin(values[1], self._dropped)
        row_of = np.cumsum(keep) - 1
        which, first, last = (np.concatenate([part[i] for part in found] or [np.zeros(0, np.int64)]) for i in range(3))
        kept = keep[which]
        stats = self._read_stats(raw, data, row_of[which[kept]], first[kept], last[kept])
        names = _mapped(values[1][keep], lambda key: self._names[key] if key in self._names else self._nameless(key))
        return _Columns(names.astype(np.int32), values[2][keep], values[3][keep], stats)

    def _read_stats(
        self, raw: bytes, data: np.ndarray, rows: np.ndarray, start: np.ndarray, stop: np.ndarray
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return for each wanted statistic the rows that have it and its values. Messages are at `start` to `stop`."""
        usual = (stop > start) & (data[start] == _STAT_KEY)
        key, after = varints(data, np.where(usual, start + 1, start))
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name, wanted in self._slots.items():
            here = np.flatnonzero(usual & (key == wanted))
            if not len(here):
                continue
            kind = data[after[here]]
            value, end = varints(data, after[here] + 1)
            value = np.where(kind == _REFERENCE, _mapped(np.where(kind == _REFERENCE, value, 0), self._reference), value)
            odd = (end != stop[here]) | ~np.isin(kind, (_REFERENCE, _UNSIGNED, _SIGNED)) | (name in SHARES)
            for index in np.flatnonzero(odd).tolist():
                at = here[index]
                value[index] = self._value(raw[start[at] : stop[at]], name)
            found[name] = (rows[here], value)
        for at in np.flatnonzero(~usual).tolist():  # fields in another order: allowed, but no known writer does it
            stat_key, _ = decode_stat(raw[start[at] : stop[at]], self._stats)
            name = self._stats.get(stat_key, "")
            if name in self.wanted:
                more = found.get(name, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
                value = np.array([self._value(raw[start[at] : stop[at]], name)])
                found[name] = (np.append(more[0], rows[at]), np.append(more[1], value))
        return found

    def _nameless(self, key: int) -> int:
        """Name an event without metadata by its number."""
        self._names[key] = self._strings(f"event {key}")
        return self._names[key]

    def _reference(self, key: int) -> int:
        if key not in self._references:
            self._references[key] = self._strings(self._stats.get(key, ""))
        return self._references[key]

    def _value(self, stat: bytes, name: str) -> int:
        """Decode one statistic: texts become string indices, hashes keep their bits, shares become millionths."""
        _, value = decode_stat(stat, self._stats)
        if isinstance(value, float) and not math.isfinite(value):
            return MISSING
        if name in SHARES and not isinstance(value, str):
            return round(min(max(value, 0), 1) * MILLION)
        number = self._strings(value) if isinstance(value, str) else int(value)
        return (number + 2**63) % 2**64 - 2**63


_LONGEST_VARINT = 10
_STAT_KEY, _UNSIGNED, _SIGNED, _REFERENCE = 0x08, 0x18, 0x20, 0x38
"""Tags of XStat: metadata_id, uint64_value, int64_value, ref_value."""


def _mapped(values: np.ndarray, function: Callable[[int], int]) -> np.ndarray:
    """Apply a function to each value, once per distinct one: int64 [n]."""
    distinct, inverse = np.unique(values, return_inverse=True)
    return np.array([function(value) for value in distinct.tolist()], np.int64)[inverse] if len(values) else np.zeros(0, np.int64)


def _joined(name: str, parts: list[_Columns], wanted: frozenset[str]) -> Line:
    count = sum(len(part.names) for part in parts)

    def column(key: str, dtype: type) -> np.ndarray:
        return np.concatenate([getattr(part, key) for part in parts] or [np.zeros(0, dtype)])

    line = Line(name, column("names", np.int32), column("start_ps", np.int64), column("duration_ps", np.int64), {})
    for stat in wanted:
        if any(stat in part.stats for part in parts):
            small = all(len(f) == 0 or _fits(f) for part in parts for f in [part.stats.get(stat, (_NONE, _NONE))[1]])
            values = np.full(count, MISSING, np.int32 if small else np.int64)
            first = 0
            for part in parts:
                if stat in part.stats:
                    rows, found = part.stats[stat]
                    values[rows + first] = found
                first += len(part.names)
            line.stats[stat] = values
    return line


_NONE = np.zeros(0, np.int64)


def _fits(values: np.ndarray) -> bool:
    """Whether all values fit 32 bits; most are indices, and large traces have many."""
    return bool(values.min() >= -(2**31) and values.max() < 2**31)
