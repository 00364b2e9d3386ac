"""The first turns of layers with experts in the backward pass where all of their layers is kept and tokens are sent by all_to_all.

Nothing of the next layers is computed again while tokens are exchanged, so that the weight gradients of the layers before are left to hide
it. Read from heaps of compiled steps of gpt-oss (GPU backend, jax 0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner import delayed_experts
from ridgeline.planner.activations import Component
from ridgeline.planner.live_buffers import LiveBuffers
from ridgeline.planner.local import LocalSizes

EXCHANGED_AGAIN = 3
"""Arrays of tokens that have been or are being sent once more, for the weight gradients of gate and up."""


@dataclass(frozen=True)
class FirstKeptTurns(LiveBuffers):
    """What is live in these turns, which are not in the loop over layers."""

    def first_kept_turns(self) -> dict[str, Component]:
        """Return what is live at the end of two turns, with the weight gradients of both pending.

        Over tensor tokens are gathered after each exchange, which lasts as much longer: these are pending in the experts of the third
        turn's first layer, beside its own, the parts of its rows' gradients and their sum. Else the first of them are computed meanwhile:
        its hidden activations and rows take the place of these, with one array more, and the zeros of that turn are all there. (Over
        expert=8 the first begin before it, and two operands of the gradients of biases, padded to whole tiles, are there instead.)
        """
        local = self.local
        layer = _operands(local)
        if local.tensor == 1:
            current = 2 * local.hidden_bytes + local.row_bytes + self.turn.zeros_of_turn
        else:
            current = layer + delayed_experts.current(local)
        working = 2 * self.turn.layers * layer + current + EXCHANGED_AGAIN * local.slot_bytes
        return {
            "activations": self.saved,
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + self.turn.kept_parameters() + self.gathered_layer(),
                "transposed parameters of attention out, parameters of each kind of layers; gathered weights of one layer",
            ),
            "working_activations": Component(
                working + self.turn.zeroed_slots(),
                "backward pass of two turns of layers: inputs of their weight gradients, which are computed later",
            ),
            "loss": self.unembedding_gradient(),
        }


def _operands(local: LocalSizes) -> int:
    """Return the bytes that the weight gradients of one of these layers are computed from.

    In the rows of the experts the gradients of their results; of the hidden activations those of gate and up, which one kernel writes with
    the input of down. Where they are padded to whole tiles, for matmuls, that input is computed later, from gate and up in the stacks, and
    both gradients are there twice. The inputs of gate and up are sent to the rows again later. Of attention the gradients of queries, keys
    and values. Of streams the gradients of both updates and the input of the MLP; sharded, the gradients of both norms before their sums
    over tokens, in float32, and their inputs.
    """
    gates, hidden = 2 if local.model.gated_mlp else 1, local.hidden_bytes
    of_mlp = gates * (hidden + local.padded_hidden_bytes) if local.pads_hidden else (gates + 1) * hidden
    return of_mlp + local.row_bytes + local.query_bytes + 2 * local.key_bytes + 3 * local.stream_bytes + 7 * local.cut_stream_bytes
