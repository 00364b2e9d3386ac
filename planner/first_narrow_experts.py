"""Points in the layers with experts in 8 bits before the loop over layers, whose weight gradients come together.

What is live at them is in planner/narrow_experts.py. Sizes are bytes of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner import narrow_experts
from ridgeline.planner.activations import Component, saved_arrays
from ridgeline.planner.live_buffers import DELAYED, LiveBuffers


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
            waits = copied + narrow_experts.pending(local, DELAYED, measured=self.program.measured_matmuls)
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
