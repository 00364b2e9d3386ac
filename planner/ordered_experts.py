"""What is live in the backward pass of a layer with experts whose turn is in order (models/backward_order.py): Llama 4.

The weight gradients of the layer before it are pending; at the start of the backward pass, where the inputs of matmuls are computed again,
those of two layers. They are still to be computed, so that all they are computed from is live, or wait for their reduction. Tokens of other
devices delay that: over `expert` those of the layer before it are still there when the layer's own have been computed.

Read from the heaps of compiled steps of Llama 4 Scout (GPU backend, jax 0.10.2): float8 with block inputs in host memory over tensor and
expert, in four microbatches; `full` in bfloat16 over fsdp and expert; `dots` over fsdp. Sizes are bytes of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner.local import LocalSizes


@dataclass(frozen=True)
class OrderedExperts:
    """The sizes of what is live for layers of these sizes."""

    local: LocalSizes

    @property
    def gradients(self) -> int:
        """Unsharded weight gradients of one layer."""
        return self.local.gathered_trained_weights * self.local.gradient_itemsize

    @property
    def shared(self) -> int:
        """One hidden activation of the shared experts."""
        local, moe = self.local, self.local.model.moe
        assert moe is not None
        return moe.shared_experts * local.tokens * local.model.expert_width * local.compute_itemsize // local.tensor

    @property
    def operands(self) -> int:
        """What the weight gradients of one layer are computed from.

        The inputs of attention and MLP, and the gradients of their results; in the rows of the experts the inputs, and the gradients of the
        results; of the hidden activations the gradients of gate and up and the input of down. With norms of queries and keys, their inputs
        and gradients. Float8: one byte each but for the inputs of attention and MLP, gate and up of shared experts have their gradients in
        both layouts; the gradient of the norm before the MLP needs its input in float32 and the gradient of its result.
        """
        local = self.local
        hidden = (3 if local.model.gated_mlp else 2) * local.hidden_bytes
        normed = 2 * (local.query_bytes + local.key_bytes) if local.model.qk_norm else 0
        attention = local.query_bytes + 2 * local.key_bytes + local.context_bytes
        if not local.config.precision.eight_bit:
            return hidden + 2 * local.row_bytes + 4 * local.stream_bytes + attention + normed
        narrow = hidden + 2 * self.shared + 2 * local.row_bytes + 2 * local.stream_bytes + 2 * attention
        of_norm = (4 // local.compute_itemsize + 1) * local.cut_stream_bytes
        return narrow // local.compute_itemsize + 2 * local.stream_bytes + of_norm + normed + local.query_bytes

    @property
    def in_mlp(self) -> int:
        """What is live beside that in the MLP of a layer, when the gradients of its rows have come.

        Tokens of all devices of `expert` and their gradients; in the rows of the experts both, in float8 also in the layout of the weight
        gradients; gate, up and their gradients (float8: of shared experts; those of the others are narrow by then); the inputs of attention
        and MLP of this layer and the next one.
        """
        local = self.local
        gates = 2 if local.model.gated_mlp else 1
        hidden = 2 * gates * (self.shared if local.config.precision.eight_bit else local.hidden_bytes)
        return 2 * local.slot_bytes + 2 * local.row_bytes + hidden + 4 * local.stream_bytes

    @property
    def at_end(self) -> int:
        """What is live at the end of a layer beside the gradients: the input of the experts' down, five streams and one in rows."""
        local = self.local
        return local.hidden_bytes + 5 * local.stream_bytes + local.row_bytes
