"""Rollouts: what a policy update trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rollout:
    """One sampled completion."""

    prompt: Sequence[int]
    completion: Sequence[int]
    """Token ids, with the end-of-sequence token where the model sampled it."""
    reward: float
    group: int | str
    """Rewards are compared within a group: the completions of one prompt."""
    log_probs: Sequence[float] | None = None
    """Log-probability of each token of the completion by the model that sampled it; None: computed with the weights before the update."""
