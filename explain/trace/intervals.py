"""Sets of times as sorted, disjoint half-open intervals: int64 arrays [n, 2] of start and end."""

from __future__ import annotations

import numpy as np

EMPTY = np.zeros((0, 2), np.int64)


def union(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the union of intervals [n], in any order; intervals of no length are dropped."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return EMPTY
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([np.flatnonzero(first)[1:] - 1, [len(start) - 1]])
    return np.stack([start[first], reach[last]], axis=1)


def join(*sets: np.ndarray) -> np.ndarray:
    """Return the union of several sets."""
    together = np.concatenate(sets) if sets else EMPTY
    return union(together[:, 0], together[:, 1])


def subtract(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the part of `a` outside `b`."""
    if not len(a) or not len(b):
        return a
    return intersect(a, _complement(b, min(a[0, 0], b[0, 0]) - 1, max(a[-1, 1], b[-1, 1]) + 1))


def intersect(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the part of `a` inside `b`."""
    if not len(a) or not len(b):
        return EMPTY
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    last = np.searchsorted(b[:, 0], a[:, 1], side="left")
    count = np.maximum(last - first, 0)
    which_a = np.repeat(np.arange(len(a)), count)
    offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    which_b = np.repeat(first, count) + offset
    start = np.maximum(a[which_a, 0], b[which_b, 0])
    end = np.minimum(a[which_a, 1], b[which_b, 1])
    keep = end > start
    return np.stack([start[keep], end[keep]], axis=1)


def clip(a: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return the part of `a` inside one interval."""
    return intersect(a, np.array([[start, end]], np.int64)) if end > start else EMPTY


def total(a: np.ndarray) -> int:
    """Return the length of a set."""
    return int((a[:, 1] - a[:, 0]).sum())


def covered(start: np.ndarray, end: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return for each interval [n] the length of its part inside the set `by`: int64 [n]."""
    if not len(by):
        return np.zeros(len(start), np.int64)
    return _filled(end, by) - _filled(start, by)


def _filled(times: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Length of the set before each time."""
    before = np.concatenate([[0], np.cumsum(by[:, 1] - by[:, 0])])
    index = np.searchsorted(by[:, 0], times, side="right")
    inside = np.where(index > 0, np.minimum(times, by[np.maximum(index - 1, 0), 1]) - by[np.maximum(index - 1, 0), 0], 0)
    return before[np.maximum(index - 1, 0)] + inside


def _complement(a: np.ndarray, start: int, end: int) -> np.ndarray:
    edges = np.concatenate([[start], a.ravel(), [end]]).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]
