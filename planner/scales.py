"""Which elements of a matrix share a scale when its moments are kept in 8 bits: the same on every mesh, whole on every device.

A block lies along the side that fsdp does not cut: the width of a head, else the hidden width of the MLP. So a device has all of a block
and its largest element is found without asking another, unless `tensor` cuts the hidden width finer than TENSOR ways.
"""

from __future__ import annotations

BLOCK = 128
"""Elements that share a scale where that divides the dim into whole blocks per device."""
LEAST_BLOCK = 16
"""Fewer elements than this do not get a scale of their own: it would take as many bits as they."""
TENSOR = 8
"""Devices that a hidden width is expected to be cut over at most: those of a node."""


def block_width(size: int, *, divided: bool) -> int:
    """Return how many elements of a dim of this size share a scale; `divided`: devices may cut it (heads' widths are never cut)."""
    if not divided:
        return BLOCK if size % BLOCK == 0 else size
    width = BLOCK
    while width >= LEAST_BLOCK:
        if size % (width * TENSOR) == 0:
            return width
        width //= 2
    return BLOCK if size % BLOCK == 0 else size
