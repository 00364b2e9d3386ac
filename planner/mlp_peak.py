"""What is live in the MLP of a layer's backward pass, where it follows from how the layer runs.

Rings over tensor, values in host memory, norms after attention and MLP, and turns whose layers follow each other. Read from the heaps of
compiled steps (GPU backend, jax 0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner import expert_layers, ordered_scales
from ridgeline.planner.activations import NODE_DEVICES, offloads_inputs
from ridgeline.planner.experts_peak import ExpertsPeak
from ridgeline.planner.overlap import WIDEST_TENSOR
from ridgeline.planner.recompute import FROM_BLOCK_INPUTS, recomputed
from ridgeline.planner.turn import FEW_TOKENS

REDUCED_EARLY = 3 * 2**29
"""Bytes of a layer's gradients up to which their reduction within a node is over before the next layer's MLP.

Bounds from heaps: so with 1.36 GB (Phi-4) and, with any number of tokens, less; not with 1.95 GB (Qwen2.5 32B, with float32 gradients).
"""
BY_TIME = 0.8 * 0.95
"""Share of device memory up to which XLA's scheduler orders by time alone, without the step's arguments: 80 % where it is not given a pool,
and xla_gpu_memory_limit_slop_factor (GetSchedulerMemoryLimit, xla/service/gpu/gpu_hlo_schedule.cc)."""


@dataclass(frozen=True)
class MlpPeak(ExpertsPeak):
    """What is live in the MLP of a layer of a step of these sizes."""

    @property
    def ring_recomputes(self) -> bool:
        """Whether the MLPs of dense layers, of one kind and sharded over fsdp, are recomputed from inputs that pass a ring over tensor."""
        local, compute = self.local, self.local.config.compute
        ring = local.tensor > 1 and compute.tensor_overlap == "ring" and local.fsdp > 1 and local.context * local.pipeline == 1
        one_kind = local.model.moe is None and local.model.layer_period == 1 and not local.latent_bytes
        return self.overlap and ring and one_kind and (compute.remat.policy == "full" or offloads_inputs(local))

    def _mlp_in_ring(self, *, at_start: bool) -> tuple[int, int] | None:
        """Return the sizes of hidden activations and of the rest in the MLP of a layer whose inputs pass a ring; None: no such layer.

        Gate, up and the gradient of the input of down stay pieces, one for each device of tensor: one kernel reads them and writes the
        input of down and the gradients of gate and up. At the start, gathered are then the inputs of attention and MLP and the gradient of
        its result; or the pieces are gone, and the gradient of the MLP's input passes the ring. In the loop, as many hidden
        activations are there when the gradients of gate and up are cut for their ring, and the next attention's input is gathered too.
        (Heaps of Qwen3 1.7B, Llama 3.1 8B and OLMo 2 7B.)
        """
        local = self.local
        if not self.ring_recomputes:
            return None
        pieces, gates = local.hidden_bytes, 2 if local.model.gated_mlp else 1
        attention = local.query_bytes + local.context_bytes + local.key_bytes + local.value_bytes
        attention += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
        # `backward` adds one stream in float32, which is two sharded ones
        attention -= 4 * local.tokens * local.model.embed_dim // local.tensor
        stream, cut = local.stream_bytes, local.cut_stream_bytes
        in_kernel = 2 * (gates + 1) * pieces
        if not at_start:
            return in_kernel, 4 * stream + 4 * cut + attention
        return max((in_kernel, 3 * stream + cut + attention), ((gates + 2) * pieces, 4 * stream + 6 * cut + attention), key=sum)

    @property
    def _reads_hidden_from_host(self) -> bool:
        """Whether a copy of gate or up from host memory is a hidden activation more in the MLP.

        The kernel that reads it writes the gradients of gate and up, beside the gradient of the input of down and the other of the two; a
        matmul's result would give its memory to one of them (heaps of Qwen2.5 1.5B and 7B, [query, mlp_up]).
        """
        local, remat = self.local, self.local.config.compute.remat
        from_host = remat.offloads and not offloads_inputs(local) and not {"mlp_gate", "mlp_up"}.isdisjoint(remat.names)
        return self._plain_in_loop and from_host and local.model.gated_mlp and local.config.precision.matmul == "compute"

    @property
    def computes_gradient_early(self) -> bool:
        """Whether a layer computes the gradient of the input of down while the block's input comes from host memory.

        By measured times that matmul hides the copy, and within a node also the reduction of the gradients of the layer before, with any
        number of microbatches (heaps of Llama 3.1 8B, Qwen3 8B, Mistral Nemo 12B and Phi-4). Between nodes that lasts as long as the layer,
        and steps of one microbatch were not repaired.
        """
        local = self.local
        plain = local.config.precision.matmul == "compute" and local.model.norm_position == "pre" and local.tensor * local.context == 1
        within = local.uniform_dense and local.pipeline == 1 and local.fsdp * local.data <= NODE_DEVICES
        return self.overlap and self.program.measured_matmuls and plain and within and offloads_inputs(local)

    @property
    def reduces_before_mlp(self) -> bool:
        """Whether the gradients of the layer before have been reduced when a layer is in its MLP, where it `computes_gradient_early`."""
        return self.computes_gradient_early and self.turn.trained_weights * self.local.gradient_itemsize <= REDUCED_EARLY

    @property
    def _plain_in_loop(self) -> bool:
        """Whether microbatches run in a loop, in layers of one kind, without experts and norms of results, that are not over tensor."""
        local = self.local
        plain = local.config.precision.matmul in ("compute", "fp8") and local.model.norm_position == "pre" and local.tensor == 1
        return local.uniform_dense and plain and self.in_loop

    @property
    def _plain_alone(self) -> bool:
        """Whether there is one microbatch, in layers as in `_plain_in_loop` that are sharded over fsdp."""
        local = self.local
        plain = local.config.precision.matmul == "compute" and local.model.norm_position == "pre" and local.tensor * local.context == 1
        return self.overlap and not self.in_loop and local.uniform_dense and plain and local.fsdp > 1

    def _exceeds_memory(self, attention: int) -> bool:
        """Return whether a layer's MLP needs so much that XLA orders it for less memory: attention's arrays are then not all there.

        attention: bytes of these. Looked at only with one microbatch (heap of Qwen3 32B, 89 GB for devices with 85 GB).
        """
        local = self.local
        hidden = (4 if local.model.gated_mlp else 3) * local.hidden_bytes
        return self._plain_alone and hidden + attention + 8 * local.stream_bytes > BY_TIME * self.program.memory_bytes

    def _streams_in_mlp(self, usual: int, *, at_start: bool) -> int:
        """Return the size of what is live in the MLP of a layer beside hidden activations; usual: number of streams, where it is not known.

        Where microbatches run in a loop and only inputs of blocks are kept, in host memory: what attention's backward pass needs, with
        norms of queries and keys also their inputs, and four streams: the inputs of attention, of the MLP and of its norm, and the gradient
        of the layer's result. With 8-bit matmuls: attention's update, that gradient, and four inputs of weight gradients in one byte per
        element. Two more are counted with the block: the gradients of the MLP's input by gate and by up; with 8-bit matmuls the final
        hidden states and their gradient. Where gate or up comes from host memory, the kernel that reads it comes before these two: then the
        gradient of the layer's result, and inputs of attention, of the MLP and of its norm.

        Where `reads_kept_over_tensor`: both kept inputs, the gathered gradient of the MLP's result, and that of its input, in the loop also
        the gradient of attention's update; two streams between blocks beside those that are counted with the block.
        """
        local = self.local
        if self.experts_late:
            return expert_layers.beside_experts(local, self.program) + expert_layers.fetched_early(local)
        if self._offloads_after_norms:
            return self._streams_after_norms()
        if self._inputs_from_host_over_tensor:
            return self._streams_over_tensor(at_start=at_start)
        if self.reads_kept_over_tensor:
            return (4 if at_start else 5) * local.stream_bytes + 2 * local.cut_stream_bytes
        inputs = (self._plain_in_loop or self._plain_alone) and offloads_inputs(local)
        attention = local.query_bytes + local.context_bytes + 2 * local.key_bytes
        attention += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
        if not (inputs or self._reads_hidden_from_host or self.computes_gradient_early) or self._exceeds_memory(attention):
            return usual * local.stream_bytes
        if self._reads_hidden_from_host:  # `backward` adds one stream in float32
            return attention + 4 * local.stream_bytes - 4 * local.tokens * local.model.embed_dim
        return attention + 4 * local.stream_bytes

    @property
    def reads_kept_over_tensor(self) -> bool:
        """Whether alike layers over tensor read their gathered inputs, which are kept, from the stacks of all layers.

        Heaps of Llama 3.1 8B, 3.2 1B and 3B, Qwen3 1.7B and OLMo 2 13B.
        """
        local, config = self.local, self.local.config
        kept = config.compute.remat.policy in ("none", "attention-only") and config.precision.matmul == "compute"
        gathers = local.tensor > 1 and config.compute.tensor_overlap == "gather" and local.pipeline * local.context == 1
        return self.overlap and local.uniform_dense and gathers and kept

    @property
    def _offloads_after_norms(self) -> bool:
        """Whether values within blocks are in host memory, microbatches run in a loop, and norms follow attention and MLP."""
        local, model, remat = self.local, self.local.model, self.local.config.compute.remat
        plain = local.uniform_dense and local.config.precision.matmul == "compute" and local.tensor == 1
        return plain and self.overlap and self.in_loop and model.norm_position == "post" and remat.offloads and not offloads_inputs(local)

    @property
    def _inputs_from_host_over_tensor(self) -> bool:
        """Whether inputs of blocks are in host memory, the MLP's input is gathered over tensor, and norms are before attention and MLP."""
        local = self.local
        plain = local.uniform_dense and local.config.precision.matmul == "compute" and local.pipeline == 1
        gathers = local.tensor > 1 and local.config.compute.tensor_overlap == "gather" and local.model.norm_position == "pre"
        return plain and self.overlap and gathers and offloads_inputs(local)

    def _streams_over_tensor(self, *, at_start: bool) -> int:
        """Return the size of what is live in the MLP of a layer beside hidden activations, where `_inputs_from_host_over_tensor`.

        When the gradients of the MLP's input by gate and by up are summed: of the whole sequence these two and the sum, the inputs of
        attention and MLP, and the gradient of the MLP's result; what attention's backward pass needs, with norms of queries and keys also
        their inputs; one rotary table in float32. Sharded are the block's input, the MLP's, and the gradient of the layer's result. In the
        layer that comes first, with one microbatch, the next attention's input is gathered, if three collectives may be in flight.
        """
        local, model = self.local, self.local.model
        attention = local.query_bytes + local.key_bytes + local.value_bytes + local.context_bytes
        attention += local.query_bytes + local.key_bytes if model.qk_norm else 0
        rotary = local.tokens * model.head_width // 2 * 4 if model.position == "rope" else 0
        # `backward` adds the block's input, and one stream in float32, which is the two others
        third = local.tensor <= WIDEST_TENSOR and not self.in_loop
        gathered = local.stream_bytes + local.cut_stream_bytes if at_start and third else 0
        return 6 * local.stream_bytes + attention + rotary + gathered

    def _streams_after_norms(self) -> int:
        """Return the size of what is live in the MLP of a layer beside hidden activations, where `_offloads_after_norms`.

        Inputs of attention and MLP, attention's result before its norm, and the gradients of the block's result and of the MLP's; what
        attention's backward pass needs, with norms of queries and keys also their inputs. With many tokens the gradient of the final
        norm's scale is no result of the kernel that reads the final hidden states and their gradient first, and nothing waits for it:
        the two are there until the layers are done (heaps of OLMo 2 1B, 7B and 13B).
        """
        local = self.local
        attention = local.query_bytes + local.key_bytes + local.value_bytes + local.context_bytes
        attention += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
        # `backward` adds one stream in float32
        return attention + (5 + (2 if local.tokens > FEW_TOKENS else 0)) * local.stream_bytes - 4 * local.tokens * local.model.embed_dim

    def _mlp_from_host_over_tensor(self, *, at_start: bool) -> list[tuple[int, int]]:
        """Return the sizes of hidden activations and of the rest at two points in the MLP of a layer over tensor where values of its MLP
        are in host memory and norms follow attention and MLP; none: no such layer.

        No part of such a layer waits for its gradient, so the next layer's attention is computed again meanwhile. First one kernel reads
        gate, up and the gradient of the input of down, which is there too, and writes the gradients of gate and up. Then the gradients of
        the MLP's input by both are summed, and only these gradients and the input of down are left of the hidden activations. Of the whole
        sequence: the inputs of attention, also transposed, and of the MLP, attention's update before its reduction, which its norm needs,
        and the gradient of the MLP's result. Of attention queries, keys, values and the result, with norms of queries and keys also their
        inputs; queries, keys and values of the next layer. Sharded: the block's input, the gradient of its result, the MLP's result.

        In the layer that comes first attention's update has been reduced and the loss's gradient of the hidden states is there; the next
        layer's input of attention is too, also transposed, with its queries and keys. (Heaps of OLMo 2 7B.)
        """
        local, model, remat = self.local, self.local.model, self.local.config.compute.remat
        plain = local.config.precision.matmul == "compute" and local.config.compute.tensor_overlap == "gather" and local.pipeline == 1
        from_host = remat.offloads and not offloads_inputs(local) and not self.waits and local.tensor > 1
        if not (self.overlap and local.uniform_dense and plain and from_host and model.norm_position == "post"):
            return []
        gates, query, key = 2 if model.gated_mlp else 1, local.query_bytes, local.key_bytes
        streams, cut = (7, 4) if at_start else (5, 3)
        heads = 2 * query + 2 * key + local.value_bytes + local.context_bytes + (0 if at_start else local.value_bytes)
        heads += (key if at_start else query + key) if model.qk_norm else 0
        # `backward` adds one stream in float32
        rest = streams * local.stream_bytes + heads + cut * local.cut_stream_bytes - 4 * local.tokens * model.embed_dim // local.tensor
        return [
            ((2 * gates + 1) * local.hidden_bytes, rest),
            ((gates + 1) * local.hidden_bytes, rest + (gates + 1) * local.stream_bytes),
        ]

    def _hidden_and_rows(self, at_mlp: int) -> list[int]:
        """Return the bytes of hidden activations at points in the MLP, with residual streams in the rows of experts by which more or fewer
        than `expert_rows_in_flight` are live.

        Where tokens are sent by all_to_all without a capacity, XLA computes all weight gradients after the gradients of the rows have been
        sent back. First the gradient of a hidden activation is there with what it is multiplied with, and in the rows of the experts their
        inputs and the gradients of their results; then gate and up are gone, and the gradients of the rows by both are there too.
        """
        local = self.local
        if self.gradients_before_rows:
            return []  # `in_experts` has its points
        if self.computes_before_sum and local.tensor == 1:
            return [at_mlp * local.hidden_bytes - local.row_bytes, local.hidden_bytes - local.slot_bytes]
        if not (self.overlap and local.sends_uncapped):
            return [at_mlp * local.hidden_bytes]
        # of experts whose weight gradients come late the gradients of the results are counted with the rows (planner/layer_peak.py)
        rows = 0 if self.experts_late and recomputed(local.model, local.config.compute.remat).inputs else local.row_bytes
        return [at_mlp * local.hidden_bytes - local.row_bytes, min(3, at_mlp) * local.hidden_bytes + rows]

    def _mlp_after_others(self, layers: int, of_mlp: int, down: int, mask: int) -> list[tuple[str, int, int, int, int, int]]:
        """Return the point in the MLP of the last of some layers, when the weight gradients of the others are still to be computed.

        of_mlp, down, mask: the sizes of hidden activations, gradients and mask of a layer alone. Streams: inputs of attention and MLP,
        attention's result, the gradient of that of the MLP, the final hidden states and their gradient.
        """
        local, model = self.local, self.local.model
        others = layers if self.turn.in_order else layers - 1 if self.turn.layers > 1 else -1
        inputs = (self.turn.in_order and self.turn.recomputes) or local.config.compute.remat.policy in FROM_BLOCK_INPUTS
        if others < 0 or model.moe is not None or not inputs:
            return []
        others *= self.turn.before_weight_gradients() // self.turn.layers
        matrices, narrow = 2 * local.mlp_matrix * local.matrix_itemsize, local.config.precision.eight_bit
        if narrow:
            # the gradient of gate or up, which is quantized next, and the input of down, one byte each
            of_mlp += local.hidden_bytes + local.hidden_bytes // local.compute_itemsize
        if self.turn.in_order:
            sizes = self._mlp_in_order(of_mlp)
            if self.overlap and ordered_scales.applies(local, self.program):
                sizes, others = self._mlp_with_earlier_scales(layers, of_mlp)
            return [("its MLP", others + hidden, streams, matrices, down, mask) for hidden, streams in sizes]
        streams = 6 * local.stream_bytes + local.query_bytes + local.context_bytes + 2 * local.key_bytes
        if not narrow:
            streams += local.stream_bytes * 2 // local.compute_itemsize  # final hidden states are float32
        if model.activation == "gelu_tanh" and not self.in_loop and not narrow:  # so in the heaps of Gemma 2 and 3
            of_mlp += 4 * local.hidden_bytes // local.compute_itemsize  # tanh, float32
        return [("its MLP", others + of_mlp, streams, matrices, down, mask)]

    def _mlp_with_earlier_scales(self, layers: int, of_mlp: int) -> tuple[list[tuple[int, int]], int]:
        """Return the sizes of hidden activations and of the rest at points in the MLP of an ordered layer over tensor with scales of
        earlier steps, and what waits of other layers (planner/ordered_scales.py).
        """
        waiting = layers * ordered_scales.before_weight_gradients(self.local)
        if ordered_scales.transposes_apart(self.local):
            return [ordered_scales.in_mlp_of_rows(self.local)], waiting
        return [ordered_scales.in_mlp(self.local, of_mlp)], waiting

    def _mlp_in_order(self, of_mlp: int) -> list[tuple[int, int]]:
        """Return the sizes of hidden activations and of streams at two points in the MLP of an ordered layer over tensor.

        First when the gradient of its result is gathered, which is transposed next (of_mlp: hidden activations there); then when the
        gradients of its input by gate and by up are summed, which is scattered next. Also gathered: its input, and where attention is
        recomputed that of attention, with queries, keys, values and the result. Sharded: inputs of the norms, their gradients.
        """
        local = self.local
        gates, smaller = 2 if local.model.gated_mlp else 1, local.compute_itemsize if local.config.precision.eight_bit else 1
        inputs = local.stream_bytes + 4 * local.cut_stream_bytes
        if recomputed(local.model, local.config.compute.remat).attention_update:
            inputs += local.stream_bytes + local.query_bytes + local.context_bytes + 2 * local.key_bytes
        gradient, operand = local.stream_bytes // smaller, local.hidden_bytes // smaller
        return [(of_mlp, inputs + 2 * gradient), ((1 + gates) * operand, inputs + gradient + (1 + gates) * local.stream_bytes)]
