"""The protobuf wire format: numbers, texts and the fields of a message. Readers decode only the fields that they need, without a schema."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np

Buffer = bytes | mmap.mmap


class Damaged(ValueError):
    """Not a complete message."""


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
    """Decode a text field; invalid bytes are replaced."""
    return bytes(data[start:end]).decode(errors="replace")


def integers(data: Buffer, tag: int, start: int, end: int) -> list[int]:
    """Decode one field of a repeated integer, packed or not; `tag` is the position of its tag. Negative numbers keep their sign."""
    if varint(data, tag)[0] & 7 == 0:
        return [signed(varint(data, start)[0])]
    found = []
    while start < end:
        value, start = varint(data, start)
        found.append(signed(value))
    return found


def signed(value: int) -> int:
    """Return the 64-bit integer whose bits a varint has."""
    return value - 2**64 if value >= 2**63 else value


def numbers(data: bytes, start: int, end: int) -> dict[int, int]:
    """Return the single integers of a message by field; other fields are skipped."""
    return {number: signed(varint(data, begin)[0]) for number, tag, begin, _ in fields(data, start, end) if varint(data, tag)[0] & 7 == 0}


def repeated(data: bytes, start: int, end: int) -> dict[int, list[int]]:
    """Return the integers of a message by field, repeated or single."""
    found: dict[int, list[int]] = {}
    for number, tag, begin, stop in fields(data, start, end):
        if varint(data, tag)[0] & 7 in (0, 2):
            found.setdefault(number, []).extend(integers(data, tag, begin, stop))
    return found
