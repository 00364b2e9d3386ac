"""The layers with experts of the backward pass that are not in the loop over layers: they come first.

XLA takes them out of the loop, which it unrolls by two. Nothing waits for weight gradients and their reductions there, and attention is
computed again as early as its inputs are there. So in stages; elsewhere layers defer their reductions (models/deferred_gradients.py), and
those outside of the loop are as the others. Read from the heaps of compiled steps (GPU backend, jax 0.10.2). Sizes are bytes of one device.
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
LAYERS = "reductions of the first layers"
"""Name of the point."""


@dataclass(frozen=True)
class FirstExperts(LayerPeak):
    """What is live in these layers of a step of these sizes."""

    def first_experts(self, points: Mapping[str, Components]) -> dict[str, Components]:
        """Return the point in these layers that needs most; none without trained experts, or where it is as in the loop.

        points: with those of the start and of the backward pass.
        """
        # where gradients are deferred, one is not in the loop, and as those that are
        if not (self.delays_experts and self.reduced) or self.defers:
            return {}
        return {
            LAYERS: self._after_start(points["start of the backward pass"])
            if self.local.ties_weight_gradients
            else self._reductions_of_layers()
        }

    @property
    def _layers_not_reduced(self) -> int:
        """Layers whose weight gradients wait for their reduction in the layer, or turn, that is outside of the loop and comes last.

        The one before. Layers without an exchange of tokens, gathers over tensor or values in host memory: both before (heaps of
        Mixtral and Qwen3 30B over fsdp=128). Where tokens are sent without a capacity and blocks wait, none: the reduction comes before
        the next exchange (heap of DeepSeek V3).
        """
        local = self.local
        if local.tensor > 1 or local.config.compute.remat.offloads:
            return 1
        if local.expert == 1:
            return DELAYED
        return 0 if local.sends_uncapped and waiting(local.config, local.tensor, local.expert) == "block" else 1

    def _after_start(self, point: Components) -> Components:
        """Return what is live where weight gradients of experts are computed within their layers (models/moe/experts.py).

        As the start of the backward pass, `point`, with the gradients of the layer before, which wait for their reduction, and what of the
        next layers' attention is computed again early.
        """
        local = self.local
        working, collectives = point["working_activations"], point["collective_buffers"]
        layer = local.gathered_trained_weights * local.gradient_itemsize
        before = layer * min(self._layers_not_reduced, local.model.moe_layers - 1)
        pending = max(collectives.bytes, layer + before) if local.latent_bytes else collectives.bytes + before
        operands = 0
        if eight_bits.exchanges_nothing(local):  # no stacks of gradients yet
            point = point | {"gradients": Component(self.early_table(), "none yet: those of the first layers wait")}
            operands = eight_bits.of_attention_before(local, waits=self.waits)
        return point | {
            "working_activations": Component(
                working.bytes + operands + self.next_recomputed,
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
