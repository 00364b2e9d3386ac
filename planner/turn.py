"""One turn of the loop over layers, and what XLA keeps in memory for a turn of several layers.

Where kinds of layers alternate (with and without a window: Gemma 2 and 3, OLMo 3, gpt-oss), a turn runs one layer of each kind. The
scheduler interleaves the layers of a turn: it gathers their weights together, and delays their weight gradients to the end of the turn.
Read from the heaps of compiled steps (GPU backend, jax 0.10.2). Sizes are bytes of one device. Turns of one layer add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.remat import POLICIES
from ridgeline.planner.local import LocalSizes

NORMS = {"pre": 2, "post": 2, "both": 4}
"""Norms of residual streams in a layer, by model.norm_position."""


@dataclass(frozen=True)
class Turn:
    """A turn of the loop over layers."""

    local: LocalSizes
    overlap: bool
    """Compiled with the latency-hiding scheduler."""
    in_loop: bool
    """Microbatches run in a loop."""

    @property
    def layers(self) -> int:
        """Layers that are scheduled together."""
        return self.local.model.layer_period if self.overlap else 1

    @property
    def trained_weights(self) -> int:
        """Matrix elements of these layers that are trained, gathered over fsdp and sharded over tensor and expert."""
        return self.local.period_weights if self.layers > 1 else self.local.gathered_trained_weights

    @property
    def first(self) -> int:
        """Turns at the start of the backward pass that are not in the loop, which XLA unrolls by two."""
        return 1 + self.local.model.num_layers // self.local.model.layer_period % 2

    @property
    def in_loss(self) -> int:
        """Turns of the backward pass whose gathers and recomputation may start in the loss; none in a loop of microbatches."""
        return 0 if self.layers == 1 or self.in_loop else self.first

    def kept_parameters(self) -> int:
        """Return the size of the parameters of each kind of layers, which are kept for the backward pass where no layer is recomputed.

        Where layers are left after the last whole turn, those of the whole turns are cut out of the stack of all, by any policy.
        """
        model = self.local.model
        recomputes = POLICIES[self.local.config.compute.remat.policy].recomputes_block
        several = model.layer_period > 1 and (not recomputes or model.num_layers % model.layer_period > 0)
        return self.local.layer_matrices * self.local.weight_itemsize if several else 0

    def gradients_left_over(self) -> int:
        """Return the size of the unsharded gradients of the layers after the last whole turn, which wait while the turns run."""
        local = self.local
        left = local.model.num_layers % local.model.layer_period if self.layers > 1 and local.fsdp > 1 else 0
        return left * local.gathered_trained_weights * local.gradient_itemsize

    def slices_of_kept(self, saved_bytes: int) -> int:
        """Return the size of the slices of what a turn kept, which are cut out of the stacks together where no layer is recomputed.

        saved_bytes: of all layers.
        """
        recomputes = POLICIES[self.local.config.compute.remat.policy].recomputes_block
        return 0 if self.layers == 1 or recomputes else self.layers * saved_bytes // self.local.model.num_layers

    def norm_gradients(self) -> int:
        """Return the size of the float32 gradients of the norms of a turn before their sums over tokens, which wait for its end."""
        local = self.local
        norms = 0 if self.layers == 1 else self.layers * NORMS[local.model.norm_position]
        return norms * local.tokens * local.model.embed_dim * 4 // local.tensor

    def before_weight_gradients(self) -> int:
        """Return the size of what the weight gradients of a turn are computed from: inputs of matmuls and gradients of their results."""
        local = self.local
        hidden = (3 if local.model.gated_mlp else 2) * local.hidden_bytes
        attention = local.query_bytes + 2 * local.key_bytes + local.context_bytes
        normed = 2 * (local.query_bytes + local.key_bytes) if local.model.qk_norm else 0  # inputs, and gradients of the results
        return self.layers * (hidden + 4 * local.stream_bytes + attention + normed)
