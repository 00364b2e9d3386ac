"""The protobuf wire format: numbers, texts, the fields of a message, and the small messages of an XSpace that are read one by one."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator

import numpy as np

Buffer = bytes | mmap.mmap
Value = int | float | str


class Damaged(ValueError):
    """Not a complete XSpace message."""


def varints(data: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read a varint at each position: values int64 [n] and the positions after them."""
    byte = data[np.minimum(position, len(data) - 1)]
    value = (byte & 127).astype(np.uint64)
    after = position + 1
    rows = np.flatnonzero(byte > 127)
    shift = 7
    while len(rows):
        if shift > 63:
            break  # ten bytes have at most 64 bits; a longer one ends beyond its message, which is detected there
        byte = data[np.minimum(after[rows], len(data) - 1)]
        value[rows] |= (byte & 127).astype(np.uint64) << np.uint64(shift)
        after[rows] += 1
        rows = rows[byte > 127]
        shift += 7
    return value.view(np.int64), after


def fields(data: Buffer, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, start of the tag, start of the value, end of the value) of the fields of a message."""
    position = start
    while position < end:
        tag, begin = varint(data, position)
        wire = tag & 7
        if wire == 2:
            length, begin = varint(data, begin)
            stop = begin + length
        elif wire == 0:
            _, stop = varint(data, begin)
        elif wire in (1, 5):
            stop = begin + (8 if wire == 1 else 4)
        else:
            raise Damaged(f"unknown wire type {wire}")
        if stop > end or not tag >> 3:
            raise Damaged("the file is truncated")
        yield tag >> 3, position, begin, stop
        position = stop


def varint(data: Buffer, position: int) -> tuple[int, int]:
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
        raise Damaged("the file is truncated") from None


def decode_text(data: Buffer, start: int, end: int) -> str:
    return bytes(data[start:end]).decode(errors="replace")


def map_entry(data: Buffer, start: int, end: int) -> tuple[int, str]:
    """Read an entry of the event or statistic metadata: key, and the name in the value."""
    key, name = 0, ""
    for number, _, begin, stop in fields(data, start, end):
        if number == 1:
            key, _ = varint(data, begin)
        elif number == 2:
            for inner, _, first, last in fields(data, begin, stop):
                if inner == 2:
                    name = decode_text(data, first, last)
                elif inner == 1 and not key:
                    key, _ = varint(data, first)
    return key, name


def decode_stat(stat: bytes, names: dict[int, str]) -> tuple[int, Value]:
    """Decode an XStat: key and value; a reference becomes the text it refers to."""
    key, value = 0, 0  # type: tuple[int, Value]
    for number, _, begin, stop in fields(stat, 0, len(stat)):
        if number == 1:
            key, _ = varint(stat, begin)
        elif number == 2:
            value = float(struct.unpack("<d", stat[begin:stop])[0])
        elif number in (3, 4):
            value, _ = varint(stat, begin)
            if number == 4 and value >= 2**63:
                value -= 2**64
        elif number in (5, 6):
            value = decode_text(stat, begin, stop)
        elif number == 7:
            value = names.get(varint(stat, begin)[0], "")
    return key, value
