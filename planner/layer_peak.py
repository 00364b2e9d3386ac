"""The point of a layer's backward pass that needs most memory: in its MLP, in its attention, or at its end.

Read from the heaps of compiled steps (GPU backend, jax 0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.configs.remat import POLICIES
from ridgeline.planner import block_scaled, constant_costs, eight_bits, expert_layers, narrow_experts, ordered_dense, ordered_experts
from ridgeline.planner.activations import attention_workspace, mask_bytes, offloads_inputs
from ridgeline.planner.experts_peak import Point
from ridgeline.planner.mlp_peak import MlpPeak
from ridgeline.planner.recompute import FROM_BLOCK_INPUTS, Recomputed, recomputed

STREAMS_IN_FLIGHT = 8
"""Full-sequence residual streams [R, T, D] that are live in the backward pass of one layer (inputs, cotangents and their transposes)."""

SLOTS_IN_FLIGHT = 2
"""Arrays of the tokens of all devices of `expert` that are live there: inputs, and the gradients that are sent back."""


@dataclass(frozen=True)
class LayerPeak(MlpPeak):
    """What is live in the backward pass of a layer of a step of these sizes."""

    def peak_in_layer(
        self, together: int, more: int, streams: int, next_layer: int, *, at_start: bool
    ) -> tuple[str, int, int, int, int, int]:
        """Return the point of a layer's backward pass with most memory, and there: hidden activations, streams, gathered weights, gradients
        before their reduction, and attention's workspace.

        streams: residual streams in its MLP. next_layer: gathered weights of the next layer, which `backward` adds wherever the point is.
        """
        local = self.local
        hidden, stream = local.hidden_bytes, local.stream_bytes
        if self.reduced or local.adapted:
            waiting = self.turn.trained_weights * local.gradient_itemsize
        else:
            waiting = self.turn.layers * 2 * local.mlp_matrix * 4
        waiting += self.turn.norm_gradients()
        mask, attention = mask_bytes(local, self.backend), attention_workspace(local, self.backend).bytes
        recomputes = POLICIES[local.config.compute.remat.policy].recomputes_block
        gates = 2 if local.model.gated_mlp else 1
        again = recomputed(local.model, local.config.compute.remat)
        policy = local.config.compute.remat.policy
        kept = policy == "names" and local.model.moe is None and not {"gate", "up"} & again.weights
        at_mlp = usual = 4 if policy in FROM_BLOCK_INPUTS and not kept else 3  # kept gate and up are read from the stacks
        if self.activates_in_place:
            at_mlp = usual = gates + 1
        of_attention = [] if kept else self._attention_before_mlp_gradients(attention)
        if self.turn.layers == 1 and not self.turn.in_order and not of_attention:
            # The input of down, which is multiplied again for a norm of the result. With one microbatch the gradient of gate is computed
            # before that of up and takes the memory of up, which nothing else reads; in a loop it comes second, and where the next layer is
            # recomputed early.
            at_mlp += again.mlp_update and (kept or self.in_loop or self.recomputes_early)
            # with many tokens and cuDNN's attention the gradient of gate is first in a loop, too
            at_mlp -= self.final_states_wait and self.backend == "cudnn"
        if recomputes and self.recomputes_early:
            at_mlp += gates
        at_end = 5 if 1 in (local.tensor, local.rows) else STREAMS_IN_FLIGHT
        # 8-bit matmuls: the input of down for its weight gradient, and the gradient of a hidden activation in both layouts, one byte each
        quantized = 3 * hidden // local.compute_itemsize if recomputes and local.config.precision.eight_bit else 0
        of_experts = self.expert_rows_in_flight() + SLOTS_IN_FLIGHT * local.slot_bytes
        if self.experts_late and again.inputs:
            # weight gradients come later: the gradients of the results are there too, and the gathered tokens are not
            of_experts += local.row_bytes - local.slot_bytes
            if self.computes_before_sum:
                of_experts, at_mlp = of_experts - local.row_bytes, 2
        if self.rows_of_capacity:
            of_experts = 3 * local.row_bytes + SLOTS_IN_FLIGHT * local.slot_bytes
        if self.rows_hold_tokens:
            of_experts -= SLOTS_IN_FLIGHT * local.slot_bytes
        down = local.mlp_matrix * local.gradient_itemsize if self.reduced and self.combined and not local.adapted else 0
        if down and local.model.moe is not None:  # those of the other layers of the turn wait for its end
            down += (self.turn.trained_weights - local.gathered_trained_weights) * local.gradient_itemsize
        down = 0 if self.defers else down
        sizes = at_end, waiting + more, down, mask, attention
        if ordered_experts.applies(self):
            ordered = ordered_experts.points(self, mask, (at_end * stream, waiting + more), next_layer, at_start=at_start)
            return self._most(ordered, at_start=at_start)
        if ordered := ordered_dense.points(self, mask, 2 * local.mlp_matrix * local.matrix_itemsize, attention, at_start=at_start):
            return self._most([*ordered, ("its end", hidden, at_end * stream, 0, waiting + more, mask)], at_start=at_start)
        narrow = self._points_of_narrow_matmuls(again, at_mlp, at_mlp - usual, together, sizes, at_start=at_start)
        after_mlp = next_layer if self.gathers_after_mlp else 0
        if narrow:
            return self._most(narrow, at_start=at_start, gathered=after_mlp)
        after_attention = constant_costs.recomputes_late if at_start else constant_costs.gathers_nothing
        if self.overlap and after_attention(local, self.program):
            in_attention = constant_costs.in_attention(local, self.program, at_start=at_start)
            return self._most([("its attention", *point, 0, down, attention) for point in in_attention], at_start=at_start)
        slices = 2 if kept and self.turn.in_order and not at_start else 0  # of kept gate and up, cut out of the stacks
        # While the input of the next block comes from host memory, XLA computes the gradients of the MLP's weights: gate and up are left,
        # from which the input of down is computed for the last of them. A ring starts when that input is there.
        early = at_mlp
        if offloads_inputs(local) and (local.ring or local.model.moe is None):
            early = 0 if local.ring else gates
        alike = self.overlap and local.model.layer_period == 1
        if alike and local.ties_weight_gradients:  # those of experts are computed before attention
            early = 0
        delayed = together * self.turn.before_weight_gradients() // self.turn.layers
        matrices = 2 * local.mlp_matrix * local.matrix_itemsize - after_mlp
        at_mlp += self._reads_hidden_from_host
        ring = self._mlp_in_ring(at_start=at_start)
        over_tensor = [(ring[0], ring[1])] if ring else self._mlp_from_host_over_tensor(at_start=at_start)
        in_mlp = self._streams_in_mlp(streams, at_start=at_start)
        points = (
            *(("its MLP", *sizes, matrices, down, mask) for sizes in over_tensor),
            *(
                ("its MLP", hidden_and_rows + quantized + of_experts, in_mlp, matrices, down, mask)
                for hidden_and_rows in ([] if over_tensor else self._hidden_and_rows(at_mlp))
            ),
            ("its attention", min(3, early) * hidden, in_mlp if self.reads_kept_over_tensor else 6 * stream, 0, 0, attention),
            # attention may run before the gradients of the MLP's weights
            ("its attention", early * hidden if recomputes else 0, 3 * stream + 5 * local.query_bytes, 0, 0, attention),
            *of_attention,
            *self._weight_gradients_after_attention(attention, at_start=at_start),
            *([] if at_start else self._sum_by_projections(attention)),
            *self._attention_with_final_states(attention),
            ("its end", hidden, at_end * stream, 0, waiting + more, mask),
            *([("its end", delayed, 0, 0, more, mask)] if self.turn.layers > 1 and recomputes else []),
            *self._mlp_after_others(together, (at_mlp + slices) * hidden, down, mask),
            *self._attention_in_order(together),
            *self.in_experts(matrices, streams, mask),
        )
        return self._most(points, at_start=at_start)

    def _most(self, points: Sequence[Point], *, at_start: bool, gathered: int = 0) -> Point:
        """Return the point that needs most, with the gradients of the layer before that are reduced in the MLP of this one.

        gathered: bytes of weights that are gathered after the MLP, and not in it.
        """
        deferred = 0 if at_start else self.deferred_gradients
        found = [
            (where, hidden, streams, weights - gathered, gradients + deferred, workspace) if where == "its MLP" else point
            for point in points
            for where, hidden, streams, weights, gradients, workspace in [point]
        ]
        return max(found, key=lambda point: sum(point[1:]))

    def _points_of_narrow_matmuls(
        self, again: Recomputed, at_mlp: int, early: int, together: int, sizes: tuple[int, int, int, int, int], *, at_start: bool
    ) -> list[tuple[str, int, int, int, int, int]]:
        """Return the points of a layer with 8-bit or block-scaled matmuls that have an order of their own; none: it is as others.

        at_mlp: hidden activations in the MLP of other layers, `early` of them beyond the usual ones. sizes: streams at the end of the
        layer, unsharded gradients there, those of MLP down, mask, and attention's workspace.
        """
        local, (at_end, end, down, mask, attention) = self.local, sizes
        hidden, stream, matrices = local.hidden_bytes, local.stream_bytes, 2 * local.mlp_matrix * local.matrix_itemsize
        if eight_bits.applies(local):
            of_mlp, others = eight_bits.in_mlp(local, again)
            if not self.program.transposes_float8:
                of_mlp, others = eight_bits.in_mlp_any_layout(local, again, waits=self.waits)
                of_mlp += eight_bits.separate_activation(local, again, self.program)
            computes = again.mlp_update and (again.attention_update or at_start) and self.program.transposes_float8
            forward = [eight_bits.in_forward_pass_again(local)] if computes else []
            pending = eight_bits.gradients_after_attention(local, again, self.program)
            return [
                *([("its attention", *eight_bits.after_attention(local), 0, 0, attention)] if pending else []),
                *(("its MLP", *sizes, 0, 0, mask) for sizes in forward),
                ("its MLP", of_mlp, others, 2 * local.mlp_matrix * local.compute_itemsize, down, mask),
                ("its attention", *eight_bits.in_attention(local), 0, 0, attention),
                ("its end", hidden, 5 * stream, 0, end, mask),
            ]
        if points := self._points_of_narrow_experts(again, sizes, at_start=at_start):
            return points
        if eight_bits.in_any_layout(local, self.program):
            of_mlp, others = eight_bits.mlp_in_any_layout(local, again, at_start=at_start)
            if eight_bits.between_norms(local, again):
                early -= min(early, 1)  # the input of down, which is counted there
            of_mlp += early * hidden + eight_bits.separate_activation(local, again, self.program)
            return [
                ("its MLP", of_mlp, others, matrices, down, mask),
                ("its attention", eight_bits.one_byte(local, 3 * hidden), 3 * stream + 5 * local.query_bytes, 0, 0, attention),
                ("its end", hidden, at_end * stream, 0, end, mask),
            ]
        if block_scaled.applies(local):
            delayed = at_start and not self.scatters_scaled
            of_down = 0 if at_start or self.scatters_scaled else down
            return [
                ("its MLP", *block_scaled.in_mlp(local, again, at_start=at_start), matrices, of_down, mask),
                ("its attention", 3 * hidden, 6 * stream, 0, 0, attention),
                ("its attention", at_mlp * hidden, 3 * stream + 5 * local.query_bytes, 0, 0, attention),
                ("its end", hidden, at_end * stream, 0, 0 if delayed else end, mask),
            ]
        return []

    def _points_of_narrow_experts(
        self, again: Recomputed, sizes: tuple[int, int, int, int, int], *, at_start: bool
    ) -> list[tuple[str, int, int, int, int, int]]:
        """Return the points of a layer whose experts have 8-bit matmuls; none: as others. `sizes` as in `_points_of_narrow_matmuls`."""
        local, (at_end, end, down, mask, attention) = self.local, sizes
        hidden, stream, matrices = local.hidden_bytes, local.stream_bytes, 2 * local.mlp_matrix * local.matrix_itemsize
        if self.overlap and eight_bits.of_experts(local):
            in_experts = eight_bits.in_experts(local, again)
            in_rows, gradients = in_experts[1], 0
            if eight_bits.computes_down_first(local):
                in_rows = in_rows[0] - hidden, in_rows[1] - eight_bits.one_byte(local, local.row_bytes)
                gradients = local.mlp_matrix * local.gradient_itemsize
            return [
                ("its MLP", *in_experts[0], matrices, 0, mask),
                ("its MLP", *in_rows, matrices, gradients, mask),
                ("its attention", in_experts[1][0] + local.row_bytes, 6 * stream, 0, 0, attention),
                ("its end", hidden, at_end * stream, 0, end, mask),
            ]
        if self.overlap and eight_bits.gathers_rows(local):
            gathered = eight_bits.in_gathered_rows(local, again)
            return [
                *(("its MLP", *experts, matrices, down, mask) for experts in gathered),
                ("its attention", gathered[1][0] + local.row_bytes, 6 * stream, 0, 0, attention),
                ("its end", hidden, at_end * stream, 0, end, mask),
            ]
        if self.overlap and narrow_experts.applies(local):
            sent = narrow_experts.in_rows(local, again)
            # Where the layer reduces its gradients each is scaled at once; where gate and up are kept, before those of the rows come.
            in_layer = self.reduces_in_turn and not self.defers
            unscaled = 0 if in_layer else local.mlp_matrix * local.gradient_itemsize
            reduced = end if in_layer and not expert_layers.recomputes_experts(local) else 0
            # one of those of the layer before has been reduced when the last of this one is there
            gates = 2 if local.model.gated_mlp else 1
            pending = self.deferred_gradients * gates // (gates + 1)
            before = pending if not at_start and expert_layers.recomputes_experts(local) else 0
            return [
                ("its MLP", *sent[0], matrices, 0, mask),
                ("its MLP", *sent[1], matrices, reduced, mask),
                ("its attention", sent[1][0] + local.row_bytes, 6 * stream, 0, 0, attention),
                # a result of a kernel is multiplied by its scale
                ("its end", hidden, at_end * stream, 0, end + unscaled + before, mask),
            ]
        return []

    def _attention_before_mlp_gradients(self, workspace: int) -> list[tuple[str, int, int, int, int, int]]:
        """Return the point in attention where a norm needs the result of down again and attention's update is kept.

        Nothing of attention is computed again before the backward pass of the MLP, which thus has no input of down left from a
        recomputation beside the other hidden activations. The gradients of the MLP's weights come after attention: the input of down and
        the gradients of gate and up are live, with the input of the MLP and the gradient of its result. In attention: the block's input
        (normed too where a norm is before it), the gradients of the stream and of attention's update, queries, keys, values and the result
        with their gradients; of queries and keys that are not kept also the values before their norms. With one microbatch the final hidden
        states, float32, and their gradient are there too; in a loop of microbatches no stream is float32. So in heaps of OLMo 2 7B and 1B;
        with `full` (OLMo 2 7B) attention is computed again before the MLP.

        workspace: of attention.
        """
        local, model, remat = self.local, self.local.model, self.local.config.compute.remat
        again, ordered = recomputed(model, remat), self.turn.layers > 1 or self.turn.in_order
        applies = self.overlap and remat.policy == "names" and again.mlp_update and not again.attention_update
        if not applies or ordered or model.moe is not None or local.config.precision.eight_bit or local.adapted:
            return []
        hidden = (3 if model.gated_mlp else 2) * local.hidden_bytes
        streams = 3 * local.stream_bytes + 2 * local.cut_stream_bytes
        streams += local.stream_bytes if model.norm_position == "both" else 0
        heads = 2 * (local.query_bytes + local.key_bytes + local.value_bytes + local.context_bytes)
        if model.qk_norm:
            heads += sum(size for name, size in (("query", local.query_bytes), ("key", local.key_bytes)) if name not in remat.names)
        # `backward` adds one stream in float32
        streams += -4 * local.tokens * model.embed_dim // local.tensor if self.in_loop else local.stream_bytes
        return [("its attention", hidden, streams + heads, 0, 0, workspace)]

    def _weight_gradients_after_attention(self, workspace: int, *, at_start: bool) -> list[tuple[str, int, int, int, int, int]]:
        """Return the point in attention's backward pass where the weight gradients of a layer come after it (planner/constant_costs.py).

        workspace: of attention.
        """
        local = self.local
        if not (self.overlap and constant_costs.gradients_after_attention(local, self.program)):
            return []
        reduced = 0
        if self.reduced and not at_start and constant_costs.gathers_before_sum(local):
            reduced = self.turn.trained_weights * local.gradient_itemsize  # of the layer before, which `backward` adds unsharded
        reduced -= reduced // local.fsdp
        sizes = constant_costs.at_end_of_attention(local, self.program, at_start=at_start)
        return [("its attention", *sizes, 0, -reduced, workspace)]

    def _attention_with_final_states(self, workspace: int) -> list[tuple[str, int, int, int, int, int]]:
        """Return the point in attention's backward pass where `final_states_wait`, which `final_norm` counts.

        The weight gradients of the MLP come later: the input of down and the gradients of gate and up. The block's input, attention's
        update added to it, the gradients of attention's result, of the MLP's and of the stream; queries, keys, values and the result with
        their gradients, and queries and keys before their norms. `backward` adds one stream in float32. (Heaps of OLMo 2 1B and 7B.)

        workspace: of attention.
        """
        local, model = self.local, self.local.model
        if not self.final_states_wait:
            return []
        heads = 2 * (local.query_bytes + local.key_bytes + local.value_bytes + local.context_bytes)
        heads += local.query_bytes + local.key_bytes if model.qk_norm else 0
        streams = 5 * local.stream_bytes - 4 * local.tokens * model.embed_dim
        return [("its attention", (3 if model.gated_mlp else 2) * local.hidden_bytes, streams + heads, 0, 0, workspace)]

    def _sum_by_projections(self, workspace: int) -> list[tuple[str, int, int, int, int, int]]:
        """Return the point at the end of attention over tensor where the gradients of its input by queries, keys and values are summed.

        GPUs before Hopper add in float32, so one kernel reads all three. With values within blocks in host memory nothing waits for a
        gradient: gathered are also the gradients of both updates, the inputs of both for the weight gradients, which are not computed yet,
        the next layer's attention input, its update before it is scattered, and the sum; of the MLP the gradients of gate and up are left.
        (Heaps of Mistral Nemo 12B, Qwen3 8B and Llama 3.1 8B on A100.)

        workspace: of attention.
        """
        local, model, remat = self.local, self.local.model, self.local.config.compute.remat
        plain = local.uniform_dense and local.config.precision.matmul == "compute" and local.compute_itemsize == 2
        over_tensor = local.tensor > 1 and local.config.compute.tensor_overlap != "ring" and self.overlap and self.in_loop
        if self.program.adds_bfloat16 or not (plain and over_tensor) or not remat.offloads or offloads_inputs(local) or self.waits:
            return []
        heads = 2 * (local.query_bytes + local.key_bytes)
        heads += local.query_bytes + local.key_bytes if model.qk_norm else 0
        # `backward` adds one stream in float32, which is two sharded ones
        streams = 10 * local.stream_bytes + 5 * local.cut_stream_bytes - 4 * local.tokens * model.embed_dim // local.tensor
        return [("its attention", (2 if model.gated_mlp else 1) * local.hidden_bytes, streams + heads, 0, 0, workspace)]

    def _attention_in_order(self, pending: int) -> list[tuple[str, int, int, int, int, int]]:
        """Return the point in attention of an ordered layer over tensor where no weight gradient of it and of some pending layers is
        computed yet (planner/constant_costs.py).

        Gathered: the inputs of attention and MLP, the gradients of both updates and those of attention's input by queries, keys and values,
        with their sum. Of attention the result and the gradients of queries, keys and values, of the MLP the gradients of gate and up and
        the input of down. Sharded: the block's input, attention's update. (Heaps of Gemma 2 9B on A100.)
        """
        local = self.local
        ordered = self.turn.in_order and constant_costs.gradients_after_ordered_attention(local, self.program)
        if not ordered:
            return []
        hidden = (3 if local.model.gated_mlp else 2) * local.hidden_bytes + pending * self.turn.before_weight_gradients()
        heads = local.query_bytes + 2 * local.key_bytes + local.context_bytes
        return [("its attention", hidden, 8 * local.stream_bytes + 2 * local.cut_stream_bytes + heads, 0, 0, 0)]
