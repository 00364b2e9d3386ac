"""Weights of experts are gathered, and gradients of experts reduced, while attention runs.

The collectives of a device run one after another. Tokens on their way to their experts, or gathered over `tensor`, wait for a gather or a
reduction of experts that began before, and XLA's scheduler, which has no times for attention in blocks, begins it right before them
(DeepSeek V3 on 1,024 H100s, fsdp=512 x tensor=2: 33 s of a simulated step of 111). So the program says when they run:

* Forward pass, and where it is computed again: the weights of the layer's experts are gathered when the queries of its attention are there,
  and attention's result is not used before they have come. No weights of another layer are there.
* Backward pass: the gradients of the layer before (models/deferred_gradients.py) are reduced when the gradient of attention's result is
  there; the gradients of queries, keys and values are not used before. The weight gradient of the matmul after attention comes before
  (`Execution.after_attention`): XLA would take it to hide them.

launch/environment.py disables XLA's pass that moves gathers into the turn before (collective-pipeliner-backward): it moves these too, as it
looks at one array of an optimization barrier at a time (jax 0.10.2).

Legend: B batch, T sequence, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from ridgeline.models.moe.experts import together
from ridgeline.models.params import set_gathered

if TYPE_CHECKING:
    from ridgeline.models.attention.layer import AttendWith
    from ridgeline.models.deferred_gradients import HandOver
    from ridgeline.models.moe.layer import MixtureOfExperts


class BesideAttention:
    """The attention of a layer with experts, whose collectives run meanwhile."""

    def __init__(self, attend: AttendWith, mlp: MixtureOfExperts, hand_over: HandOver | None) -> None:
        """attend: attention itself. hand_over: to the next layer; None: gradients are reduced within the layer."""
        self.attend, self.mlp, self.hand_over = attend, mlp, hand_over

    def __call__(self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
        """Return the result of attention [B, T, N, H]."""
        if self.hand_over is not None:
            q_BTNH, k_BTKH, v_BTKH = self.hand_over.end(q_BTNH, k_BTKH, v_BTKH)
        q_BTNH, gathered = self.mlp.gather(q_BTNH)
        context_BTNH = self.attend(q_BTNH, k_BTKH, v_BTKH, sinks_N)
        context_BTNH, gathered = together(context_BTNH, gathered)
        for param, each in zip(self.mlp.matrices, gathered, strict=True):
            set_gathered(param, each)
        return context_BTNH if self.hand_over is None else self.hand_over.begin(context_BTNH)
