"""The layers with experts of the backward pass that are not in the loop over layers: they come first.

XLA takes them out of the loop, which it unrolls by two. Nothing waits for weight gradients and their reductions there, and attention is
computed again as early as its inputs are there. So in turns of several layers, and in stages; elsewhere alike layers defer their reductions
(models/deferred_gradients.py), and those outside of the loop are as the others. Read from the heaps of compiled steps (GPU backend, jax
0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.configs.remat import POLICIES
from ridgeline.planner import eight_bits, expert_layers, narrow_experts
from ridgeline.planner.activations import Component, offloads_inputs
from ridgeline.planner.layer_peak import SLOTS_IN_FLIGHT, STREAMS_IN_FLIGHT, LayerPeak
from ridgeline.planner.live_buffers import DELAYED
from ridgeline.planner.recompute import waiting

Components = dict[str, Component]
LAYERS, TURNS = "reductions of the first layers", "first turns of the backward pass"
"""Names of the points: of layers that are alike, and of turns of several layers."""
REDUCED = 2
"""Turns whose reductions start together."""


@dataclass(frozen=True)
class FirstExperts(LayerPeak):
    """What is live in these layers of a step of these sizes."""

    def first_experts(self, points: Mapping[str, Components]) -> dict[str, Components]:
        """Return the point in these layers that needs most; none without trained experts, or where it is as in the loop.

        points: with those of the start and of the backward pass.
        """
        local, turn = self.local, self.turn
        if turn.layers == 1:
            # where gradients are deferred, one is not in the loop, and as those that are
            if not (self.delays_experts and self.reduced) or self.defers:
                return {}
            return {LAYERS: self._after_start(points) if local.ties_weight_gradients else self._reductions_of_layers()}
        if local.ties_weight_gradients and self.overlap:
            return {TURNS: self._after_start(points)}
        if self.whole_turns:
            return {TURNS: self._whole_turns()}
        if turn.pipelined and turn.recomputes and expert_layers.reduces_late(local):
            return {TURNS: self._reductions_of_turns()}
        return {}

    @property
    def _layers_not_reduced(self) -> int:
        """Layers whose weight gradients wait for their reduction in the layer, or turn, that is outside of the loop and comes last.

        The one before. Alike layers without an exchange of tokens, gathers over tensor or values in host memory: both before (heaps of
        Mixtral and Qwen3 30B over fsdp=128). Where tokens are sent without a capacity and blocks wait, none: the reduction comes before
        the next exchange (heap of DeepSeek V3).
        """
        local = self.local
        if self.turn.layers > 1 or local.tensor > 1 or local.config.compute.remat.offloads:
            return 1
        if local.expert == 1:
            return DELAYED
        return 0 if local.sends_uncapped and waiting(local.config, local.tensor, local.expert) == "block" else 1

    def _after_start(self, points: Mapping[str, Components]) -> Components:
        """Return what is live where weight gradients of experts are computed within their layers (models/moe/experts.py).

        As the start of the backward pass, with the gradients of the layer before, which wait for their reduction; what of the next layers'
        attention is computed again early, and in turns what the weight gradients of attention wait with.
        """
        local, alike = self.local, self.turn.layers == 1
        late = not alike and local.expert == 1 and not local.config.precision.eight_bit
        names = ("start of the backward pass", *(["backward pass"] if late else []))
        point = max((points[name] for name in names), key=lambda parts: sum(part.bytes for part in parts.values()))
        working, collectives = point["working_activations"], point["collective_buffers"]
        layer = local.gathered_trained_weights * local.gradient_itemsize
        before = layer * min(self._layers_not_reduced, local.model.moe_layers - 1)
        pending = max(collectives.bytes, layer + before) if alike and local.latent_bytes else collectives.bytes + before
        operands = 0
        if eight_bits.exchanges_nothing(local):  # no stacks of gradients yet
            point = point | {"gradients": Component(self.early_table(), "none yet: those of the first layers wait")}
            operands = eight_bits.of_attention_before(local, waits=self.waits)
        return point | {
            "working_activations": Component(
                working.bytes + operands + (self.next_recomputed if alike else self.pending_attention),
                f"{working.assumption}; attention of the next layers",
            ),
            "collective_buffers": Component(pending, f"{collectives.assumption}, and those of the layer before"),
        }

    def _reductions_of_layers(self) -> Components:
        """Return what is live in the third of these layers, where weight gradients are not computed within their layer.

        It is the last of them. The gradients of the two layers before wait for their reduction, or what they are computed from, where that
        is more (heaps of DeepSeek V2 Lite and Mixtral over fsdp=128 and 256); with latent attention also the gradients of the results of
        their attention's matmuls. In the MLP of the third layer its inputs, the gradients of its results and the parts by gate and by up
        are live; at its end, its own weight gradients. Counted with constants, and without exchanges, those of all three come together, at
        its end.
        """
        local = self.local
        layer = local.gathered_trained_weights * local.gradient_itemsize
        narrow = narrow_experts.applies(local)  # their gradients come together, after this layer's MLP
        # by constants a reduction ends within the next layer
        waits = (self.program.measured_matmuls or narrow) and not self.reduces_in_turn
        before = min(DELAYED, local.model.moe_layers - 1) if waits else 0
        latent = local.model.latent_attention is not None
        of_attention = local.query_bytes + local.up_bytes + local.stream_bytes if latent else 0
        at_mlp = 4 if POLICIES[local.config.compute.remat.policy].recomputes_block else 3
        in_mlp = at_mlp * local.hidden_bytes + 4 * local.row_bytes
        if self.program.adds_bfloat16:  # the parts by gate and by up come when gate and up are gone
            in_mlp = max(in_mlp - 2 * local.row_bytes, 3 * local.hidden_bytes + 4 * local.row_bytes)
        in_mlp += SLOTS_IN_FLIGHT * local.slot_bytes + STREAMS_IN_FLIGHT * local.stream_bytes
        in_mlp += self.next_recomputed if offloads_inputs(local) else 0
        # of the weight gradients of a layer's routed experts, whose kernels have no times
        operands = 3 * local.expert_rows * local.model.expert_width * local.compute_itemsize // local.tensor + 2 * local.row_bytes
        late = self.groups_rows and operands > layer and not self.reduces_in_turn
        pending = min(DELAYED, local.model.moe_layers - 1) * operands if late else before * layer
        # the result of a kernel, which is multiplied by its scale next
        eight_bit = local.config.precision.eight_bit
        unscaled = local.mlp_matrix * local.gradient_itemsize if eight_bit and not self.reduces_in_turn else 0
        # Latent attention of the next layer, or one with values in host memory, needs its weights while the gradients of this one wait; and
        # XLA has no times for grouped matmuls, by which they would cover that gather. With a capacity they are there as early (Mixtral).
        fetches = expert_layers.fetches_within_layers(local)
        early = latent or narrow or fetches or self.plain_experts
        gathered, streams = self.gathered_layer() + self.outside.weights, 5 if latent else 3
        together = min(DELAYED + 1, local.model.moe_layers) if self.reduces_together else before + 1
        together -= self.groups_rows and not self.turn.recomputes
        # weight gradients of attention that is computed again wait, too
        waits_too = self.reduces_together and waiting(local.config, local.tensor, local.expert) == "block"
        of_attentions = together * (expert_layers.attention(local) + 3 * local.stream_bytes) if waits_too else 0
        points = {
            **({} if narrow else {"its MLP": (in_mlp, gathered, pending)}),
            "its end": (
                local.hidden_bytes + streams * local.stream_bytes + of_attentions,
                gathered if early and not self.reduces_together else 0,
                together * layer + unscaled,
            ),
        }
        where, (working, copies, gradients) = max(points.items(), key=lambda point: sum(point[1]))
        working += before * of_attention + self.recomputed_attention() + self.outside.activations
        return {
            "activations": self.saved,
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + copies,
                "transposed parameters of attention out" + ("; gathered weights of one layer" if copies else ""),
            ),
            "working_activations": Component(working, f"backward pass of the third layer, at {where}"),
            "loss": self.unembedding_gradient(),
            "collective_buffers": Component(
                gradients, f"unsharded {local.config.precision.gradients} gradients of layers before their reduction"
            ),
        }

    def _reductions_of_turns(self) -> Components:
        """Return what is live in the last layer of the third of these turns, the last one, over tensor.

        The gradients of two turns wait for their reductions, and those of the third turn's other layers; the weight gradients of the last
        layer are computed when the gradients of its attention's input by queries, keys and values are summed.
        """
        local = self.local
        waiting = (expert_layers.TURNS * self.turn.layers - 1) * self.turn.trained_weights // self.turn.layers
        return {
            "activations": self.saved,
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + self.next_layer_weights(),
                "transposed parameters of attention out; gathered weights of the next turn",
            ),
            "working_activations": Component(
                expert_layers.operands(local) + 3 * local.stream_bytes,
                "backward pass of the third turn's last layer: inputs of weight gradients, gradients of attention's input",
            ),
            "loss": self.unembedding_gradient(),
            "collective_buffers": Component(
                waiting * local.gradient_itemsize, f"unsharded {local.config.precision.gradients} gradients of turns before their reduction"
            ),
        }

    @property
    def whole_turns(self) -> bool:
        """Whether each device has all experts of turns of several layers, whole; with 8-bit matmuls it was not looked at."""
        local, turn = self.local, self.turn
        whole = local.expert * local.tensor * local.pipeline == 1 and not local.config.precision.eight_bit
        return self.overlap and whole and turn.layers > 1 and turn.pipelined and expert_layers.reduces_late(local)

    def _whole_turns(self) -> dict[str, Component]:
        """Return what is live at that of these points that needs most.

        * When the weight gradients begin: the operands of those of all three turns of two layers, or of two longer turns.
        * When those of gate and up of two turns are computed: operands of those of down are left. Where kernels are counted with constants
          and values come from host memory, of all layers.
        * When all gradients of the three turns wait for their reductions, with the results of the first; of longer turns those of two, and
          the first layer of the third one runs, whose attention has been computed again.
        """
        local, turn = self.local, self.turn
        short, layers, operands = turn.layers <= DELAYED, turn.layers, expert_layers.operands(local)
        gates = 2 if local.model.gated_mlp else 1
        of_down = operands - local.row_bytes - gates * local.hidden_bytes
        within = expert_layers.fetches_within_layers(local) and not self.program.measured_matmuls
        before = (REDUCED + 1 if within else REDUCED) * layers
        others = 0 if within or not short else layers * operands
        two = REDUCED * turn.trained_weights * local.gradient_itemsize
        one, next_turn = self.gathered_layer(), self.next_layer_weights()
        current = layers * (expert_layers.attention(local) + 4 * local.stream_bytes) + 3 * (local.hidden_bytes + local.row_bytes)
        points = {
            "before weight gradients": ((expert_layers.TURNS if short else REDUCED) * layers * operands, one, 0),
            "before weight gradients of down": (
                before * of_down + others,
                one,
                before * gates * local.mlp_matrix * local.gradient_itemsize,
            ),
            "before reductions": (9 * local.stream_bytes, one, two * expert_layers.TURNS // REDUCED + two // local.fsdp)
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
