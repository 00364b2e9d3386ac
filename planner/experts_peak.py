"""Points in the experts of a layer's backward pass where memory can peak, beside those of any MLP (planner/layer_peak.py).

Read from the heaps of compiled steps (GPU backend, jax 0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner import delayed_experts, experts_over_tensor
from ridgeline.planner.live_buffers import LiveBuffers
from ridgeline.planner.recompute import waiting

Point = tuple[str, int, int, int, int, int]
"""Where it is, and there: hidden activations, streams, gathered weights, gradients before their reduction, and attention's workspace."""


@dataclass(frozen=True)
class ExpertsPeak(LiveBuffers):
    """What is live in the experts of a layer of a step of these sizes."""

    @property
    def experts_late(self) -> bool:
        """Whether weight gradients of experts come when the gradients of their rows are summed, in the loop over layers too.

        So it is where kernels are counted with constants (planner/experts_over_tensor.py), or the experts wait for their gradient.
        """
        waits = self.experts_wait and experts_over_tensor.applies(self.local) and not self.local.config.precision.eight_bit
        return waits or (self.overlap and experts_over_tensor.late(self.local, self.program))

    @property
    def plain_experts(self) -> bool:
        """Whether layers, one in a turn, have trained experts with 16-bit matmuls that are not over tensor."""
        local = self.local
        trained = local.model.moe is not None and not local.adapted
        return self.overlap and trained and self.turn.layers == 1 and local.tensor == 1 and local.config.precision.matmul == "compute"

    @property
    def groups_rows(self) -> bool:
        """Whether these are grouped matmuls, as experts have no capacity."""
        return self.plain_experts and self.local.config.compute.experts.capacity_factor is None

    @property
    def reduces_together(self) -> bool:
        """Whether the layers before the loop compute their weight gradients together, at the end of the last of them.

        So where kernels are counted with constants and no tokens are exchanged: these gradients, which nothing waits for, are put before
        the first reduction, and the next layer's weights are gathered after it. (Heaps of Mixtral on A100 with `full` and with values in
        host memory; it is most with few tokens and many devices, when stacks of gradients are smaller than the gradients of a layer.)
        """
        return self.groups_rows and self.local.expert == 1 and not self.program.measured_matmuls

    @property
    def sends_in_layers(self) -> bool:
        """Whether single layers send tokens by all_to_all without a capacity, under measured times, and do not reduce their own gradients;
        not looked at with latent attention."""
        sends = self.local.sends_uncapped and not self.reduces_in_turn and not self.local.latent_bytes
        return self.plain_experts and sends and self.program.measured_matmuls

    @property
    def sends_long(self) -> bool:
        """Whether such layers receive so much from other devices that weight gradients of layers before wait for an exchange.

        Bounds from heaps of Mixtral and Qwen3 30B: so with 201 MB (expert=4) and more, not with 134 MB (expert=2) and less.
        """
        return self.sends_in_layers and 2 * (self.local.expert - 1) * self.local.cut_stream_bytes > delayed_experts.LONG_GATHER

    @property
    def computes_after_sends(self) -> bool:
        """Whether such layers compute the weight gradients of their experts themselves, before the loop too.

        The sums of the gradients of norms of queries and keys hide short exchanges. Where gate and up are kept in a loop of microbatches,
        no second exchange of a layer follows. (Heaps of Qwen3 30B: expert=2 and 16, and expert=8 with `dots`, not with `none` and `full`.)
        """
        local = self.local
        kept = self.in_loop and self.turn.recomputes and not experts_over_tensor.recomputes_experts(local)
        return self.sends_in_layers and local.model.qk_norm and (not self.sends_long or kept)

    @property
    def pends_third(self) -> bool:
        """Whether the weight gradients of two such layers wait for the exchanges of the third one, which is computed again: without norms
        of queries and keys nothing else hides them (heaps of Mixtral with `dots` and `full`; `attention-only` has those of two)."""
        return self.sends_long and self.turn.recomputes and not self.local.model.qk_norm and not self.pends_fetching

    @property
    def pends_fetching(self) -> bool:
        """Whether the weight gradients of two such layers wait although values within blocks come from host memory: where these sends are
        long, and no norms of queries and keys hide them (heap of Mixtral over expert=4)."""
        return self.sends_long and delayed_experts.fetches_within_layers(self.local) and not self.local.model.qk_norm

    @property
    def gathers_after_mlp(self) -> bool:
        """Whether the gathers of the next layer's weights begin after the MLP of a layer with experts: what follows covers them.

        With values in host memory they begin before it, as there is less: the next layer waits for these copies. Where a device has few
        tokens they begin before it too, but then the end of the layer, with all weight gradients, needs more. Not looked at in a ring.
        """
        return self.plain_experts and not self.local.config.compute.remat.offloads and not self.local.ring

    @property
    def recomputes_at_once(self) -> bool:
        """Whether the layers before the loop compute their attention again beside the first one's exchange, with values in host memory.

        Nothing of them waits for a gradient. Counted with constants, only what is ready covers an exchange, and these are fusions.
        """
        local = self.local
        gathers = self.plain_experts and local.expert > 1 and not local.sends_uncapped and not local.latent_bytes
        return gathers and not self.program.measured_matmuls and delayed_experts.fetches_within_layers(local)

    @property
    def activates_in_place(self) -> bool:
        """Whether a kernel writes the gradients of gate and up and the input of down to the place of gate, up and that input's gradient.

        So where grouped matmuls without a capacity are kernels of their own. With all_to_all it is another point; latent attention and GPUs
        before Hopper were not looked at.
        """
        local = self.local
        return self.groups_rows and not local.sends_uncapped and not local.latent_bytes and self.program.adds_bfloat16

    @property
    def experts_wait(self) -> bool:
        """Whether experts over tensor, one layer in a turn, are recomputed only when their gradient is there, after an exchange that lasts.

        That is one over tensor and expert, or any where exchanges are counted with constants. Not looked at with latent attention.
        """
        lasts = self.local.expert > 1 or not self.program.measured_matmuls
        return lasts and self._over_tensor_wait and not self.local.latent_bytes

    @property
    def relays_in_attention(self) -> bool:
        """Whether a stack is copied, if at all, in attention, when less is live than in experts that are recomputed when their gradient is
        there (heaps of Mixtral, Qwen3 30B and DeepSeek V2 Lite over tensor). With a capacity it was not looked at (Qwen3 235B needs more).
        """
        return self._over_tensor_wait and not experts_over_tensor.capped(self.local)

    @property
    def _over_tensor_wait(self) -> bool:
        """Whether experts over tensor, one layer in a turn, are recomputed only when their gradient is there."""
        local = self.local
        alike = local.model.moe is not None and self.turn.layers == 1 and local.tensor > 1
        return self.overlap and alike and waiting(local.config, local.tensor, local.expert) == "mlp"

    @property
    def delays_over_tensor(self) -> int:
        """Layers with experts over tensor whose weight gradients are computed together at the start of the backward pass."""
        gathers = self.overlap and experts_over_tensor.applies(self.local)
        return experts_over_tensor.together(self.local, self.program) if gathers else 1

    def in_experts(self, matrices: int, streams: int, mask: int, *, at_start: bool) -> list[Point]:
        """Return the points in the experts of a layer; none without trained experts.

        matrices: gathered weights. streams: residual streams in the MLP. mask: of packed documents. at_start: in the layer that is first.
        """
        local = self.local
        if not self.overlap or local.model.moe is None or local.adapted:
            return []
        if self.turn.layers > 1:
            return self._of_pending_turns(mask, at_start=at_start)
        points = [*self._rows_by_gate_and_up(matrices, streams, mask), *(self._after_attention(mask) if at_start else [])]
        if self.activates_in_place:
            # before that kernel: gate, up, and the gradient of the input of down, whose matrix has just been read
            hidden = 3 * local.hidden_bytes + 2 * local.row_bytes
            points.append(("its MLP", hidden, streams * local.stream_bytes, matrices + local.mlp_matrix * local.matrix_itemsize, 0, mask))
        return points

    def at_end_of_experts(self, waiting: int, mask: int) -> list[Point]:
        """Return the points at the end of a layer where the weight gradients of its experts come last, that of down or that of up.

        Operands are left of the one that is computed, and of the one after it. (Heaps of Mixtral and Qwen3 30B; with latent attention those
        of shared experts come earlier.)

        waiting: unsharded gradients of the layer.
        """
        local = self.local
        if not self.plain_experts or local.latent_bytes:
            return []
        rows, streams = local.hidden_bytes + local.row_bytes, 3 * local.stream_bytes
        before = waiting - local.mlp_matrix * local.gradient_itemsize
        return [("its end", rows, streams, 0, waiting, mask), ("its end", 2 * rows, streams, 0, before, mask)]

    def _rows_by_gate_and_up(self, matrices: int, streams: int, mask: int) -> list[Point]:
        """Return the point in the experts of a layer where the gradients of their rows by gate and by up are summed into slots.

        Beside them are the inputs and the gradients of the results, and of the hidden activations the gradients of gate and up and the
        input of down. It is the peak where rows are wider than hidden activations. Over tensor and with all_to_all it is another one.
        (Heaps of DeepSeek V2 Lite and Qwen3 30B, also over data.)

        matrices: gathered weights. streams: residual streams in the MLP; `backward` adds one in float32.
        """
        local = self.local
        sends = local.sends_uncapped or delayed_experts.sends_capped(local)
        if sends or local.tensor > 1:
            return []
        others = streams * local.stream_bytes - 4 * local.tokens * local.model.embed_dim + self._zeros_of_ring()
        return [("its MLP", 3 * local.hidden_bytes + 4 * local.row_bytes + local.slot_bytes, others, matrices, 0, mask)]

    def _zeros_of_ring(self) -> int:
        """Return the size of the float32 zeros that the sums of a ring over context begin with: those of the gradients of queries and keys,
        which depend on nothing and are taken out of the loop over layers, a copy of them for this layer, and those of the results of half
        of the tokens. (Heap of Qwen3 30B; of layers without experts the peak is elsewhere.)
        """
        local = self.local
        wide = 4 // local.compute_itemsize
        return wide * (2 * (local.query_bytes + local.key_bytes) + local.context_bytes // 2) if local.ring and local.context > 2 else 0

    def _of_pending_turns(self, mask: int, *, at_start: bool) -> list[Point]:
        """Return the point in the experts of a layer where the weight gradients of the layers before it are delayed over its exchanges.

        What a layer recomputes when its gradient is there is exchanged then too: so many exchanges follow each other that all other
        matmuls of an iteration of the loop, which runs two turns, are put between the last ones. At the start one turn is not in the loop.
        Where a turn's gradients are larger than the slots of an exchange, their reductions begin within it (heaps of gpt-oss: 1.3 and 4.8
        times as large over context=4 and over data; they wait where they are a third of it).
        """
        local, turn = self.local, self.turn
        if not (self.waits and turn.recomputes and delayed_experts.delays_in_loop(local) and self.delays_over_exchanges):
            return []
        longer = turn.trained_weights * local.gradient_itemsize > local.slot_bytes  # the reductions than an exchange
        layers = turn.layers if at_start or longer else delayed_experts.pending_in_loop(turn.layers)
        return [("its MLP", layers * delayed_experts.operands(local, cut=True) + delayed_experts.current(local), 0, 0, 0, mask)]

    def _after_attention(self, mask: int) -> list[Point]:
        """Return the point in the experts of the layer that comes first, where MLPs alone wait for gradients.

        The attention of the three layers that are not in the loop is computed again at once (`delayed_experts.early_attention`). Where
        each turn reduces its gradients, one layer is not in the loop.
        """
        local = self.local
        if self.reduces_in_turn or not delayed_experts.recomputes_attention_early(local):
            return []
        # `backward` adds one stream in float32
        streams = delayed_experts.early_attention(local) - 4 * local.tokens * local.model.embed_dim
        rows = 3 * local.hidden_bytes + 4 * local.row_bytes + local.slot_bytes
        return [("its MLP", rows, streams, 0, 0, mask)]
