"""Points in the layers with experts in 8 bits before the loop over layers, whose weight gradients come together.

What is live at them is in planner/narrow_experts.py. Sizes are bytes of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner import delayed_experts, eight_bits, narrow_experts
from ridgeline.planner.activations import Component, offloads_inputs, saved_arrays
from ridgeline.planner.live_buffers import DELAYED, LiveBuffers
from ridgeline.planner.recompute import recomputed


@dataclass(frozen=True)
class FirstNarrowExperts(LiveBuffers):
    """What is live in these layers of a step of these sizes."""

    @property
    def narrow_turns_wait(self) -> bool:
        """Whether these layers are in turns of several."""
        return self.turn.layers > 1 and narrow_experts.turns_wait(self.local)

    def copies_of_gates(self) -> dict[str, dict[str, Component]]:
        """Return the point where stacks of gate and up are copied to the layout in which the backward pass reads them; none: no copies.

        One after the other, before the last layer writes its own into the copies: between its forward pass and its experts' backward pass.
        What it writes is there, its weights and those of the next layer are gathered, and there are no gradients of layers yet. (Heaps of
        Mixtral over context with fp8_delayed, where the copies come after and before the loss, and of Qwen3 30B over tensor.) Where
        `narrow_experts.copies_both`, both are there until the second layer, beside the operands of the first one's weight gradients.
        """
        local = self.local
        copied = narrow_experts.copied_stack(local, self.backend) if self.overlap else 0
        if not copied:
            return {}
        kept = sum(count for count, size in saved_arrays(local, self.backend) if size == local.hidden_bytes)
        waits = 0
        if narrow_experts.copies_both(local) and kept > 1:
            waits = copied + narrow_experts.pending(local, measured=self.program.measured_matmuls, turns=DELAYED)
        text = "transposed parameters of MLP down and attention out; gathered weights of two layers"
        point = {
            "activations": self.saved,
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(self.layout_copies() + 2 * self.gathered_layer(), text),
            "working_activations": Component(
                copied + waits + kept * local.hidden_bytes, "saved values of all layers in another layout; those of the last layer"
            ),
            "loss": self.unembedding_gradient(),
        }
        return {"copies of gate and up": point}

    def none_reduced(self) -> dict[str, Component]:
        """Return what the start of the backward pass has in place of stacks of gradients and of weights of the next turn, in such turns."""
        if not self.narrow_turns_wait:
            return {}
        copies = self.layout_copies() + self.gathered_layer()
        return {
            "gradients": Component(0, "none yet: those of these turns are delayed"),
            "parameter_copies": Component(copies, "transposed parameters of attention out; gathered weights of one layer"),
        }

    def first_narrow_turns(self) -> dict[str, Component]:
        """Return what is live when the weight gradients of the three turns before the loop have been computed, and wait for their
        reductions (planner/narrow_experts.py)."""
        local = self.local
        waiting = delayed_experts.TURNS * self.turn.trained_weights * local.gradient_itemsize
        return {
            "activations": self.saved,
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + self.next_layer_weights(), "transposed parameters of attention out; gathered weights of a turn"
            ),
            "working_activations": Component(local.stream_bytes, "residual stream"),
            "loss": self.unembedding_gradient(),
            "collective_buffers": Component(
                waiting, f"unsharded {local.config.precision.gradients} gradients of three turns before their reduction"
            ),
        }

    def first_sent_turns(self) -> dict[str, Component]:
        """Return what is live in the turns before the loop that are `narrow_experts.sent_in_turns`.

        In the last layer of the first turn the attention and the zeros of all three turns are there; in the first layer of the second one
        those of two, with the stacks of gradients. With one microbatch the layer before still has the operands of its weight gradients.
        (Heaps of gpt-oss over expert=16, fp8 with one microbatch and fp8_delayed in a loop of microbatches.)
        """
        local, layers = self.local, self.turn.layers
        hidden, rows = narrow_experts.in_sent_rows(local, recomputed(local.model, local.config.compute.remat))
        gates = 2 if local.model.gated_mlp else 1
        if not self.in_loop:
            rows += eight_bits.one_byte(local, (gates + 1) * local.hidden_bytes + 2 * local.row_bytes)
        stacks = self.layer_gradients * self.stack_itemsize
        turns = delayed_experts.TURNS
        first, second = (narrow_experts.of_sent_turns(local, count * layers) for count in (turns, turns - 1))
        working, gradients = max((first, 0), (second, stacks), key=sum)
        return {
            "activations": self.saved,
            "gradients": Component(gradients, "of the layers, sharded as the parameters" if gradients else "none yet"),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + 2 * self.gathered_layer(), "transposed parameters of attention out; gathered weights of two layers"
            ),
            "working_activations": Component(
                hidden + rows + working + local.written_in_place[1], "experts of a layer; attention and zeros for the exchanges of turns"
            ),
            "loss": self.unembedding_gradient(),
        }

    def in_first_narrow_layers(self) -> int:
        """Return what is live in the experts of the last of these layers, one in a turn, with operands of the others; 0: no such layers."""
        if eight_bits.of_experts(self.local):
            return narrow_experts.pending_with_capacity(self.local) + self.in_narrow_experts()
        if narrow_experts.applies(self.local):
            return narrow_experts.pending(self.local, measured=self.program.measured_matmuls)
        return 0

    def in_narrow_experts(self) -> int:
        """Return what is live in the experts of a layer in 8 bits with a capacity, with its norm's input in float32 (eight_bits)."""
        local = self.local
        sizes = eight_bits.in_experts(local, recomputed(local.model, local.config.compute.remat))
        of_block = (4 // local.compute_itemsize + offloads_inputs(local)) * local.cut_stream_bytes
        return max(map(sum, sizes)) + of_block

    def late_down(self) -> dict[str, tuple[int, int, int]]:
        """Return the point where the third of the first layers, in 8 bits with a capacity, has computed its weight gradients of gate and up
        and those of both layers before it, but none of down."""
        local = self.local
        gates = 2 if local.model.gated_mlp else 1
        computed = (DELAYED + 1) * gates * local.mlp_matrix * local.gradient_itemsize
        return {"its MLP, before the gradient of down": (self.in_narrow_experts() + narrow_experts.before_down(local), 0, computed)}
