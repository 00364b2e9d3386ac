"""Points in the experts of a layer's backward pass where memory can peak, beside those of any MLP (planner/layer_peak.py).

Read from the heaps of compiled steps (GPU backend, jax 0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner import expert_layers
from ridgeline.planner.experts import activates_in_place
from ridgeline.planner.live_buffers import LiveBuffers
from ridgeline.planner.recompute import waiting

MUCH_PER_TOKEN = 256_000
"""Gathered bytes of a layer's weights per token of a device from which its attention does not cover the gathers of the next layer."""

LATENT_STREAMS = 6
"""Streams beside the experts of a layer with latent attention over tensor (heaps of DeepSeek V2 Lite)."""

Point = tuple[str, int, int, int, int, int]
"""Where it is, and there: hidden activations, streams, gathered weights, gradients before their reduction, and attention's workspace."""


@dataclass(frozen=True)
class ExpertsPeak(LiveBuffers):
    """What is live in the experts of a layer of a step of these sizes."""

    @property
    def experts_late(self) -> bool:
        """Whether weight gradients of experts come when the gradients of their rows are summed, in the loop over layers too.

        So it is where kernels are counted with constants (planner/expert_layers.py), the experts wait for their gradient, or nothing does
        and they have no capacity (heaps of Mixtral, Qwen3 30B and 235B over tensor: names of attention, attention-only, dots, none, and
        values in host memory).
        """
        local = self.local
        nothing = waiting(local.config, local.tensor, local.expert) == "nothing" and not expert_layers.capped(local)
        waits = self.experts_wait or nothing
        late = waits and expert_layers.over_tensor(local) and not local.config.precision.eight_bit
        return self.overlap and (late or expert_layers.late_over_tensor(local, self.program))

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
    def gathers_after_mlp(self) -> bool:
        """Whether the gathers of the next layer's weights begin after the MLP of a layer with experts: what follows covers them.

        With values in host memory they begin before it, as there is less: the next layer waits for these copies. So they do where gate and
        up are computed again for few tokens (heap of Mixtral, fsdp=32 x expert=2, 4,096 tokens; not so with 16,384 over fsdp=32), and where
        `covers_little`.
        """
        local = self.local
        again = expert_layers.recomputes_experts(local) and not local.sends_uncapped
        again &= not (self.defers and local.expert == 1 and local.config.compute.remat.policy == "full")
        few = (again and self.gathered_layer() > MUCH_PER_TOKEN * local.tokens) or self.covers_little
        if self.defers and local.tensor > 1:
            return True
        return self.plain_experts and not local.config.compute.remat.offloads and not few

    @property
    def recomputes_at_once(self) -> bool:
        """Whether the layers before the loop compute their attention again beside the first one's exchange, with values in host memory.

        Nothing of them waits for a gradient. Counted with constants, only what is ready covers an exchange, and these are fusions.
        """
        local = self.local
        gathers = self.plain_experts and local.expert > 1 and not local.sends_uncapped and not local.latent_bytes
        return gathers and not self.program.measured_matmuls and expert_layers.fetches_within_layers(local)

    @property
    def activates_in_place(self) -> bool:
        """Whether a kernel writes the gradients of gate and up and the input of down to the place of gate, up and that input's gradient."""
        local = self.local
        alike = self.overlap and self.turn.layers == 1 and not local.adapted
        return alike and activates_in_place(local.model, local.config.precision)

    @property
    def rows_of_capacity(self) -> bool:
        """Whether at most three arrays in the rows of experts with a capacity are live (heaps of Mixtral).

        Rows are not wider than hidden activations, and weight gradients are computed within their layer. At the activation's kernel the
        inputs of the rows and the gradients of their results are there, also weighted; then the inputs and the gradients by gate and by up,
        as the weight gradients of down come before.
        """
        tied = self.local.ties_weight_gradients and not self.gradients_before_rows
        return self.activates_in_place and expert_layers.capped(self.local) and tied

    @property
    def reads_in_kernel(self) -> bool:
        """Whether a layer may need most when its activation's kernel runs (`in_experts`): without all_to_all and without a capacity.

        Latent attention was not looked at.
        """
        local = self.local
        return self.groups_rows and self.activates_in_place and not local.sends_uncapped and not local.latent_bytes

    @property
    def experts_wait(self) -> bool:
        """Whether experts over tensor, one layer in a turn, are recomputed only when their gradient is there, after an exchange that lasts.

        That is one over tensor and expert, or any where exchanges are counted with constants. Not looked at with latent attention.
        """
        lasts = self.local.expert > 1 or not self.program.measured_matmuls
        return lasts and self._over_tensor_wait and not self.local.latent_bytes

    @property
    def next_recomputed(self) -> int:
        """Bytes of the next layers' attention that are computed again in a layer with experts before the loop over layers.

        Where blocks are recomputed and nothing waits for a gradient, that of two layers, with values from host memory; with constants of
        three (`recomputes_at_once`). Where MLPs wait, none: the exchange hides it. But the weight gradients of experts with a capacity are
        measured matmuls, and those of latent attention are too: over tensor that of one layer is computed again beside them, in a loop of
        microbatches of the latter alone. Exchanges by all_to_all cover it all, with a capacity where tokens are not gathered over tensor
        too; without one and where nothing waits, the next layer's tokens are gathered over tensor. (Heaps of Qwen3 30B, DeepSeek V2 Lite
        and V3, and of Mixtral in fp8.)
        """
        local = self.local
        if not self.turn.recomputes or self.turn.layers > 1 or (expert_layers.sends_capped(local) and local.tensor == 1):
            return 0
        attention, nothing = expert_layers.attention(local), waiting(local.config, local.tensor, local.expert) == "nothing"
        if local.sends_uncapped:
            return local.slot_bytes if nothing and local.tensor > 1 else 0
        if self.recomputes_at_once:
            return 3 * attention + 7 * local.stream_bytes + local.slot_bytes + expert_layers.fetched_early(local)
        if nothing and self.gradients_before_rows:  # values of the next layers come later; without an exchange their attention too
            later = expert_layers.fetches_within_layers(local) and local.expert * local.tensor == 1
            return 0 if later else 2 * attention
        if nothing:
            return 2 * attention + expert_layers.fetched_early(local)
        measured = expert_layers.capped(local) and self.program.measured_matmuls and not self.in_loop
        return attention + 2 * local.stream_bytes if local.tensor > 1 and (measured or local.latent_bytes) else 0

    @property
    def computes_before_sum(self) -> bool:
        """Whether weight gradients of experts are computed before the gradients of their rows by gate and by up are summed: with a capacity
        they are matmuls that XLA has measured times of. Then three arrays in the rows of the experts are there, the two parts and one that
        is selected for the tokens' slots, and one hidden activation, over tensor two (heaps of Qwen3 30B and 235B)."""
        local = self.local
        plain = self.overlap and local.config.precision.matmul == "compute" and self.turn.layers == 1
        return plain and local.ties_weight_gradients and expert_layers.capped(local) and self.program.measured_matmuls

    @property
    def rows_hold_tokens(self) -> bool:
        """Whether tokens of other devices are in the rows of the experts when these are computed, and their slots are free.

        So it is with a capacity where tokens are gathered (heaps of Mixtral).
        """
        local = self.local
        gathers = expert_layers.capped(local) and not expert_layers.sends_capped(local)
        return self.overlap and gathers and not self.experts_late

    @property
    def _over_tensor_wait(self) -> bool:
        """Whether experts over tensor, one layer in a turn, are recomputed only when their gradient is there."""
        local = self.local
        alike = local.model.moe is not None and self.turn.layers == 1 and local.tensor > 1
        return self.overlap and alike and waiting(local.config, local.tensor, local.expert) == "mlp"

    def in_experts(self, matrices: int, streams: int, mask: int) -> list[Point]:
        """Return the points in the experts of a layer; none without trained experts.

        matrices: gathered weights. streams: residual streams in the MLP. mask: of packed documents.
        """
        local = self.local
        if not self.overlap or local.model.moe is None or local.adapted or self.turn.layers > 1:
            return []
        if self.gradients_before_rows:
            return self._after_weight_gradients(matrices, mask)
        if self.beside_attention:
            return self._beside_attention(mask)
        points = self._rows_by_gate_and_up(matrices, streams, mask)
        if self.reads_in_kernel:
            # before that kernel: gate, up, and the gradient of the input of down, whose matrix has just been read
            hidden = 3 * local.hidden_bytes + 2 * local.row_bytes
            points.append(("its MLP", hidden, streams * local.stream_bytes, matrices + local.mlp_matrix * local.matrix_itemsize, 0, mask))
        return points

    @property
    def gradients_before_rows(self) -> bool:
        """Whether layers, one in a turn, compute the weight gradients of gate and up before the gradients of the rows."""
        return self.overlap and self.turn.layers == 1 and not self.turn.in_order and self.local.weight_gradients_first

    def _after_weight_gradients(self, matrices: int, mask: int) -> list[Point]:
        """Return the points in the experts of such a layer.

        First one kernel reads gate, up and the gradient of the input of down and writes their gradients and that input in their place. The
        rows have their inputs and the gradients of their results. Then the weight gradients of gate and up are there, and the gradients of
        the rows by both: of the hidden activations the input of down, and one of the gradients, or the sum in slots. The weight gradient of
        down comes later, beside the exchange; with a capacity and no exchange, or over tensor=2 alone, first. Tokens that are gathered for
        experts with a capacity are there until the rows are, with their gradients.
        (Heaps of Qwen3 30B and 235B, DeepSeek V2 Lite and V3, and of Mixtral over tensor=4 and 8.)
        """
        local, gates = self.local, 2 if self.local.model.gated_mlp else 1
        beside = self._beside_experts()
        computed = gates * local.mlp_matrix * local.gradient_itemsize
        routed = local.expert_rows * local.model.expert_width // local.tensor * local.compute_itemsize
        hidden = routed + (local.padded_hidden_bytes - local.hidden_bytes if local.pads_hidden else 0)
        beside += 2 * (local.hidden_bytes - routed)  # of shared experts
        capped = expert_layers.capped(local)
        in_kernel = (gates + 1) * hidden + 2 * local.row_bytes
        summed = 3 * local.row_bytes + hidden + max(hidden, local.slot_bytes or local.stream_bytes)
        points = [("its MLP", in_kernel, beside, matrices, 0, mask), ("its MLP", summed, beside, matrices, computed, mask)]
        over_two = local.tensor == 2 and not local.latent_bytes and not (capped and local.context == 1)  # its exchange is short
        if local.expert == 1 and (over_two or (capped and local.tensor == 1)):
            points = [("its MLP", in_kernel, beside, matrices, local.mlp_matrix * local.gradient_itemsize, mask)]
        if capped and local.expert > 1 and not expert_layers.sends_capped(local):
            rows = 2 * local.row_bytes if local.tensor == 1 else 0
            points.append(("its MLP", expert_layers.gathered_twice(local) + rows, beside, matrices, 0, mask))
        return points

    def _beside_attention(self, mask: int) -> list[Point]:
        """Return the points in the experts of a layer with few tokens whose collectives run while attention does.

        First gate and up, the gradient of the input of down, and the matrices of all three; in the rows their inputs and the gradients of
        their results. Then the gradients of the rows by gate and by up are there too, and one matrix is left: no weights of another layer
        come meanwhile. (Heaps of DeepSeek V3 over tensor=2 and 4, expert=2 and 4.)
        """
        local, matrix = self.local, self.local.mlp_matrix * self.local.matrix_itemsize
        of_hidden, others = 3 * local.hidden_bytes, self._beside_experts()
        summed = others - 4 * local.tokens * local.model.embed_dim // local.tensor  # `backward` adds one stream in float32
        return [
            ("its MLP", of_hidden + 2 * local.row_bytes, others, 3 * matrix, 0, mask),
            ("its MLP", of_hidden + 4 * local.row_bytes + local.slot_bytes, summed, matrix, 0, mask),
        ]

    def _beside_experts(self) -> int:
        """Return what is live beside rows and hidden activations of a layer's experts (`expert_layers.beside_experts`), with the streams of
        latent attention over tensor: where collectives run beside attention, they are there beside its arrays."""
        local, found = self.local, expert_layers.beside_experts(self.local, self.program)
        if not (local.latent_bytes and local.tensor > 1):
            return found
        streams = LATENT_STREAMS * local.stream_bytes
        return found + streams if self.beside_attention else max(found, streams)

    def _rows_by_gate_and_up(self, matrices: int, streams: int, mask: int) -> list[Point]:
        """Return the point in the experts of a layer where the gradients of their rows by gate and by up are summed into slots.

        Beside them are the inputs and the gradients of the results, and of the hidden activations the gradients of gate and up and the
        input of down. Where rows are wider and weight gradients within their layer these come first (`_after_weight_gradients`); over
        tensor and with all_to_all it is another point. (Heaps of Mixtral and Qwen3 30B with few tokens.)

        matrices: gathered weights. streams: residual streams in the MLP; `backward` adds one in float32.
        """
        local = self.local
        if local.sends_uncapped or expert_layers.sends_capped(local) or local.tensor > 1:
            return []
        others = streams * local.stream_bytes - 4 * local.tokens * local.model.embed_dim
        in_rows = 3 * local.hidden_bytes + (3 if self.rows_of_capacity else 4) * local.row_bytes + local.slot_bytes
        return [("its MLP", in_rows, others, matrices, 0, mask)]
