"""Bytes of parameters, gradients and optimizer state per device, by precision policy and ZeRO stage.

    stage 0   (w + g + o) * P               everything on every device
    stage 1   (w + g) * P + o * P/p         optimizer state (master weights included) sharded
    stage 2   w * P + (g + o) * P/p         and gradients
    stage 3   (w + g + o) * P/p             and parameters (FSDP)
with w, g, o bytes per parameter of working weights, gradients, and master weights with moments. adamw-mixed is 2 + 2 + 12: stage 1
4P + 12P/p, stage 2 2P + 14P/p, stage 3 16P/p. Source: ZeRO, arXiv 1910.02054, section 3.1 and figure 1.

This project's step keeps no 16-bit copy of the weights between steps; `planner.memory` counts its state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.planner.calculators.checks import count, positive


@dataclass(frozen=True)
class StatePolicy:
    """Bytes per parameter."""

    weights: int
    """Working weights of the forward and backward passes."""
    gradients: int
    """Gradients."""
    optimizer: int
    """Moments, and master weights where they are separate."""


POLICIES = {
    "adamw-mixed": StatePolicy(2, 2, 12),
    "adamw-float32": StatePolicy(4, 4, 8),
    "lion-mixed": StatePolicy(2, 2, 8),
    "sgd-momentum-mixed": StatePolicy(2, 2, 8),
}
ZERO_STAGES = (0, 1, 2, 3)


def state_bytes(*, params: float, policy: str, zero: int, shards: float) -> int:
    """Return the bytes of state on one device between steps.

    Raises UserError for an unknown policy or stage, values that are not positive, or more shards than parameters.
    """
    p, total = count("shards", shards), positive("params", params)
    if policy not in POLICIES:
        raise unknown_name("policy", policy, POLICIES)
    if zero not in ZERO_STAGES:
        raise UserError(f"zero={zero}: must be 0, 1, 2 or 3")
    if p > total:
        raise UserError(f"shards={p}: must be at most params={total:g}")
    each = POLICIES[policy]
    parts = (each.optimizer, each.gradients, each.weights)  # sharded in this order
    sharded = sum(parts[:zero])
    return math.ceil(total * (sum(parts) - sharded) + total * sharded / p)
