"""Packing documents whole into rows of a fixed length, ahead of time, so that rows stay addressable by one integer."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

WINDOW = 8192
"""Documents considered together; more gives less padding and takes more memory."""


def best_fit(lengths: Sequence[int], capacity: int, window: int = WINDOW) -> list[list[int]]:
    """Place items into rows by best-fit decreasing within windows of `window` consecutive items; returns item indices per row.

    Every item lies in exactly one row and no row exceeds `capacity`. Inside a row the items keep their input order. An item goes to the
    fullest row it fits (the lowest-numbered of equals), so the result is deterministic. Raises ValueError for an item above `capacity`.
    """
    rows: list[list[int]] = []
    for start in range(0, len(lengths), window):
        rows += _pack_window(range(start, min(start + window, len(lengths))), lengths, capacity)
    return rows


def _pack_window(indices: range, lengths: Sequence[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"item {index} of length {length} does not fit a row of {capacity}")
        place = bisect_left(free, (length, -1))
        if place < len(free):
            left, row = free.pop(place)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if left > length:
            insort(free, (left - length, row))
    return [sorted(row) for row in rows]
