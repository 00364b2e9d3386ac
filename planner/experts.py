"""Sizes of the experts' buffers on one device: how many rows the grouped matmuls have.

Each device sorts the assignments of tokens to its experts. The matmul kernel for GPUs pads the rows of each expert to whole blocks
(models/moe/grouped_matmul.py uses the same numbers).
"""

from __future__ import annotations

import math

from ridgeline.configs.schema import MoEConfig

MANY_EXPERTS = 32
"""Number of experts from which a block has 64 rows, not 128: each expert's rows are padded to whole blocks."""


def block_rows(experts: int) -> int:
    """Return the rows of a block of the kernel for GPUs."""
    return 64 if experts >= MANY_EXPERTS else 128


def padded_rows(assignments: int, experts: int, block: int) -> int:
    """Return the rows that are enough for any loads of the experts: A + E * (block - 1), in whole blocks."""
    return (assignments + experts * (block - 1)) // block * block


def capacity(assignments: int, experts: int, factor: float) -> int:
    """Return the most rows of one expert with compute.experts.capacity_factor."""
    return min(assignments, math.ceil(factor * assignments / experts))


def buffer_rows(tokens: int, moe: MoEConfig, expert: int, factor: float | None) -> int:
    """Return the rows of the buffer of the experts of a GPU.

    Args:
      tokens: tokens of the device.
      moe: the experts.
      expert: size of the mesh axis; a device processes tokens of all its devices. Without a capacity factor, all of them may choose its
        experts.
      factor: compute.experts.capacity_factor.
    """
    experts = moe.experts // expert
    if factor is not None:
        return experts * capacity(tokens * moe.experts_per_token, experts, factor)
    return padded_rows(tokens * expert * min(moe.experts_per_token, experts), experts, block_rows(moe.experts))
