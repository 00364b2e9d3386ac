"""Best-fit packing ahead of time: whole documents in rows of one length, with little padding (arXiv 2404.10830)."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into bins of `capacity` by best-fit decreasing; return the item indices of each bin, in order.

    Deterministic: ties go to the earlier item and the bin that was opened first. Every length must be in 1..capacity.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free space, bin), ascending
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[item]
        assert 0 < length <= capacity, (length, capacity)
        at = bisect.bisect_left(room, (length, -1))
        if at == len(room):
            bins.append([])
            free, index = capacity, len(bins) - 1
        else:
            free, index = room.pop(at)
        bins[index].append(item)
        bisect.insort(room, (free - length, index))
    return [sorted(items) for items in bins]
