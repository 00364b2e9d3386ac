"""The first three turns of layers with experts in the backward pass, which are not in the loop, where each device has all experts.

Nothing is exchanged that weight gradients would hide. All of them come late: those of two turns together, and reductions of both start
after them. Turns of two layers are so short that the third one runs before; it is longer with four layers, and hides the reductions. Read
from heaps of compiled steps of gpt-oss and Llama 4 Scout over fsdp (GPU backend, jax 0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner import delayed_experts
from ridgeline.planner.activations import Component
from ridgeline.planner.live_buffers import DELAYED, LiveBuffers
from ridgeline.planner.recompute import recomputed

REDUCED = 2
"""Turns whose reductions start together."""


@dataclass(frozen=True)
class FirstWholeTurns(LiveBuffers):
    """What is live in these turns."""

    @property
    def whole_turns(self) -> bool:
        """Whether each device has all experts of turns of several layers, whole; with 8-bit matmuls it was not looked at."""
        local, turn = self.local, self.turn
        whole = local.expert * local.tensor * local.pipeline == 1 and not local.config.precision.eight_bit
        return self.overlap and whole and turn.layers > 1 and turn.pipelined and delayed_experts.reduces_late(local)

    def first_whole_turns(self) -> dict[str, Component]:
        """Return what is live at that of these points that needs most.

        * When the weight gradients begin: the operands of those of all three turns of two layers, or of two longer turns.
        * When those of gate and up of two turns are computed: operands of those of down are left, and with biases the gradients of gate and
          up padded to whole tiles, for a matmul. Where gate or up is computed again, they begin in the last layer, with such padded
          gradients of all layers; and where kernels are counted with constants and values come from host memory, in all layers.
        * When all gradients of the three turns wait for their reductions, with the results of the first; of longer turns those of two, and
          the first layer of the third one runs, whose attention has been computed again.
        """
        local, turn = self.local, self.turn
        short, layers, operands = turn.layers <= DELAYED, turn.layers, delayed_experts.operands(local)
        gates = 2 if local.model.gated_mlp else 1
        of_down = operands - local.row_bytes - gates * local.hidden_bytes + turn.padded_gradients()
        again = {"gate", "up"} & recomputed(local.model, local.config.compute.remat).weights
        within = delayed_experts.fetches_within_layers(local) and not self.program.measured_matmuls
        before = (REDUCED + 1 if within else REDUCED) * layers
        others = 0 if within or not short else layers * (operands + (turn.padded_gradients() if again else 0))
        two = REDUCED * turn.trained_weights * local.gradient_itemsize
        one, next_turn = self.gathered_layer(), self.next_layer_weights()
        current = layers * (delayed_experts.attention(local) + 4 * local.stream_bytes) + 3 * (local.hidden_bytes + local.row_bytes)
        points = {
            "before weight gradients": ((delayed_experts.TURNS if short else REDUCED) * layers * operands, one, 0),
            "before weight gradients of down": (
                before * of_down + others,
                one,
                before * gates * local.mlp_matrix * local.gradient_itemsize,
            ),
            "before reductions": (9 * local.stream_bytes, one, two * delayed_experts.TURNS // REDUCED + two // local.fsdp)
            if short
            else (current, next_turn, two),
        }
        where, (working, copies, waiting) = max(points.items(), key=lambda point: sum(point[1]))
        return {
            "activations": self.saved,
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + turn.kept_parameters() + copies, "transposed parameters of attention out; gathered weights"
            ),
            "working_activations": Component(working, f"backward pass of three turns, {where}: inputs of weight gradients"),
            "loss": self.unembedding_gradient(),
            "collective_buffers": Component(
                waiting, f"unsharded {local.config.precision.gradients} gradients of turns before their reduction"
            ),
        }
