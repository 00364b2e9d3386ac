"""Bytes of parameters, gradients and optimiser state per device, by policy and ZeRO stage: the classic table.

    stage 0   (w + g + o) * P               everything on every device
    stage 1   (w + g) * P + o * P/p         optimiser state (master weights included) sharded
    stage 2   w * P + (g + o) * P/p         and gradients
    stage 3   (w + g + o) * P/p             and parameters (FSDP)
with w, g, o bytes per parameter of working weights, gradients, and master weights with moments. adamw-mixed is 2 + 2 + 12: stage 1
4P + 12P/p, stage 2 2P + 14P/p, stage 3 16P/p. Source: ZeRO, arXiv 1910.02054, section 3.1 and figure 1.

This project's own step keeps no 16-bit copy between steps; `planner.memory` counts that exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.planner.checks import count, positive


@dataclass(frozen=True)
class StatePolicy:
    """Bytes per parameter."""

    weights: int
    """Used by the forward and backward passes."""
    gradients: int
    optimizer: int
    """Master weights, when kept apart, and moments."""


POLICIES = {
    "adamw-mixed": StatePolicy(2, 2, 12),
    "adamw-float32": StatePolicy(4, 4, 8),
    "lion-mixed": StatePolicy(2, 2, 8),
    "sgd-momentum-mixed": StatePolicy(2, 2, 8),
}
ZERO_STAGES = (0, 1, 2, 3)


def state_bytes(*, params: float, policy: str, zero: int, shards: float) -> int:
    """Return the bytes one device holds between steps.

    Raises UserError: an unknown policy or stage, values that are not positive, more shards than parameters.
    """
    p, total = count("shards", shards), positive("params", params)
    if policy not in POLICIES:
        raise unknown_name("policy", policy, POLICIES)
    if zero not in ZERO_STAGES:
        raise UserError(f"zero={zero}: must be 0, 1, 2 or 3")
    if p > total:
        raise UserError(f"shards={p}: more than the {total:g} parameters there are")
    each = POLICIES[policy]
    parts = (each.optimizer, each.gradients, each.weights)  # sharded in this order
    sharded = sum(parts[:zero])
    return math.ceil(total * (sum(parts) - sharded) + total * sharded / p)
