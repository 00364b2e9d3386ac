"""Buffers of a training step on one device that are live at several of its points: gradients of tables, gathered weights, copies.

Sizes are bytes of one device; legend and points: planner/peak_memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ridgeline.configs.remat import zeroes_embedding_early
from ridgeline.planner import block_scaled, expert_layers
from ridgeline.planner.activations import NODE_DEVICES, Component
from ridgeline.planner.hardware import GpuProgram
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.optimizer_state import expert_scales
from ridgeline.planner.recompute import recomputed, waiting
from ridgeline.planner.turn import FEW_TOKENS, Turn

MOMENTS = 2
"""Moments of AdamW, the optimizer whose moments can have 8 bits."""
EXPERT_ROWS_IN_FLIGHT = 3
"""Residual streams in the rows of the experts [R, D] that are live in a layer: inputs, gradients of the inputs by gate and by up."""
DELAYED = 2
"""Layers of experts, or with block-scaled matmuls, whose weight gradients are computed together at the start of the backward pass."""


@dataclass(frozen=True)
class Outside:
    """Bytes of layers outside of the loop over layers that are live while it runs."""

    weights: int
    """Gathered weights; where the first layer is not in a loop, also the gathered embedding, from which its input is looked up again."""
    activations: int
    """Recomputed early."""


@dataclass(frozen=True)
class LiveBuffers:
    """The buffers of a step of these sizes."""

    local: LocalSizes
    backend: str
    """Attention backend, with `auto` resolved."""
    overlap: bool
    """Compiled with the latency-hiding scheduler."""
    combined: bool
    """Collectives are combined, and several run at once, as in a run (launch/environment.py)."""
    saved: Component
    """Activations kept from the forward to the backward pass."""
    program: GpuProgram = field(default_factory=GpuProgram)
    """What is particular to the device's programs."""

    @cached_property
    def turn(self) -> Turn:
        """One turn of the loop over layers."""
        return Turn(self.local, self.overlap, self.in_loop, self.program)

    @property
    def sharded(self) -> LocalSizes:
        """Sizes of the gradients of a microbatch: as the parameters', with mesh.zero_stage=2 also sharded over data, but of stages."""
        return self.local if self.local.pipeline > 1 else self.local.of_state

    @property
    def reduced(self) -> bool:
        """Whether gradients of layers are reduced over devices."""
        return self.local.fsdp * self.data > 1

    @property
    def recomputes_early(self) -> bool:
        """Whether the next layer is recomputed while weight gradients of a layer are pending.

        So where these are reduced, and there is nothing to gather. On one device nothing is pending.
        """
        return self.overlap and self.reduced and self.local.fsdp * self.local.tensor == 1

    @property
    def data(self) -> int:
        """Devices over which the gradients of a microbatch are summed: stages sum over data once per step."""
        return 1 if self.local.pipeline > 1 else self.local.data

    @property
    def in_loop(self) -> bool:
        """Whether microbatches run in a loop."""
        return self.local.config.trainer.accumulation > 1 or self.local.pipeline > 1

    @property
    def stack_itemsize(self) -> int:
        """Bytes of an element of the gradients that the backward pass stacks over layers.

        A gradient leaves the scan over layers in its parameter's dtype (models/matmul), and is converted to precision.gradients after.
        """
        return self.local.parameter_itemsize

    @property
    def layer_gradients(self) -> int:
        """Elements of the layers' gradients, sharded as the parameters."""
        if self.local.adapted:
            return self.sharded.trained
        return self.sharded.layer_matrices + self.local.vectors + self.sharded.mtp_parameters

    @property
    def delays_experts(self) -> bool:
        """Whether weight gradients of experts are delayed in the first layers of the backward pass, which are outside of the loop."""
        model = self.local.model
        return self.overlap and model.moe is not None and not self.local.adapted and model.layer_period == 1 and model.num_layers > DELAYED

    @property
    def waits(self) -> bool:
        """Whether a layer is recomputed, in part, only when its gradient is there. Of turns in order `Turn` has the rules."""
        return not self.turn.in_order and waiting(self.local.config, self.local.tensor, self.local.expert) != "nothing"

    @property
    def reduces_in_turn(self) -> bool:
        """Whether the gradients of a turn with experts are reduced before the next turn computes its own.

        XLA moves a reduction into the next turn of the loop where only the write into the stack of gradients follows it. Where gradients
        are summed over data or context too, that second sum follows; and where the model defers reductions XLA moves none. Gradients of
        layers without experts are not reduced like this.
        """
        local = self.local
        return local.model.moe is not None and not local.adapted and (self.data * local.context > 1 or self.defers)

    @property
    def defers(self) -> bool:
        """Whether gradients of a layer with experts are reduced in the next layer (models/deferred_gradients.py), in a run."""
        return self.combined and self.local.defers_reductions

    @property
    def beside_attention(self) -> bool:
        """Whether the collectives of a layer's experts run while its attention does (models/beside_attention.py), in a run."""
        return self.combined and self.local.beside_attention

    @property
    def covers_little(self) -> bool:
        """Whether the MLP of a layer with few tokens for its experts, which keeps gate and up, covers neither gathers nor reductions.

        Its kernels are counted with constants then: the next layer's weights and one gradient of its own are there too (heaps of Mixtral on
        A100s, over fsdp=512 with attention-only and over fsdp=128 x expert=2 with none).
        """
        local = self.local
        kept = not expert_layers.recomputes_experts(local) and not self.program.measured_matmuls
        return self.defers and kept and not local.ties_weight_gradients and local.tensor == 1

    @property
    def _computes_own_early(self) -> bool:
        """Whether a layer with few tokens for experts with a capacity computes a gradient of its own while those of the layer before wait.

        Their weight gradients are matmuls, which cover the reductions where XLA has measured times of them. Not so where values within the
        block come from host memory or rows are sharded over context: the MLP begins later then (heaps of Qwen3 30B and 235B).
        """
        local = self.local
        alone = local.tensor * local.context == 1 and not expert_layers.fetches_within_layers(local)
        measured = self.program.measured_matmuls and expert_layers.capped(local)
        return alone and measured and not local.ties_weight_gradients

    @property
    def deferred_gradients(self) -> int:
        """Bytes of the unreduced gradients of the experts of the layer before, until the backward pass of a layer's MLP is over.

        None where a layer without experts comes between, which reduces them (heaps of Llama 4 Maverick).
        """
        local, moe = self.local, self.local.model.moe
        summed = self.data * local.fsdp * local.context != local.expert
        if moe is None or moe.every > 1 or not self.defers or not summed:
            return 0
        matrices = 3 if local.model.gated_mlp else 2
        weights = moe.experts // local.expert * local.model.embed_dim * local.model.expert_width // local.tensor
        own = int(self.covers_little or self._computes_own_early)
        return (matrices + own) * weights * local.gradient_itemsize

    @property
    def scatters_scaled(self) -> bool:
        """Whether layers with block-scaled matmuls reduce-scatter their weight gradients over fsdp themselves, and not the next ones.

        XLA moves a reduction into the next turn of the loop where only the write into the stack of gradients follows it. Here the sum over
        data follows: of the shards, in the next turn. One layer is outside of the loop at the start then, and its reduce-scatter takes the
        unembedding's gradient too.
        """
        local = self.local
        alike = local.model.layer_period == 1 and not local.adapted and local.config.precision.block_scaled is not None
        return self.overlap and alike and self.data > 1 and local.fsdp > 1

    def layout_copies(self) -> int:
        """Return the bytes of transposed parameters that XLA keeps because it gathers leading dims only.

        These are the two matrices that fsdp shards along their last dim (MLP down, attention out), and, with microbatches in a loop, the
        embedding, which is transposed once before the loop. Copied there are also the scales of experts' 8-bit moments, for the update.
        Without fsdp and tensor it is only the embedding that is transposed, where it is the unembedding too (heaps of Llama 3.2 1B and 3B
        and Qwen3 1.7B on one device and over data=8).
        """
        local = self.local
        if local.fsdp == 1:
            tied = local.model.tie_embeddings and self.in_loop and self.overlap and local.tensor * local.pipeline == 1
            return local.parameter_itemsize * local.table if tied else 0
        if self.relays_scales:
            return self._transposed() + MOMENTS * 4 * expert_scales(local)
        return self._transposed()

    @property
    def relays_scales(self) -> bool:
        """Whether the scales of experts' 8-bit moments are copied before the loop of microbatches.

        So in the heaps of Qwen3 over data, fsdp and expert; not with a capacity, tensor or context.
        """
        local, precision = self.local, self.local.config.precision
        plain = local.config.compute.experts.capacity_factor is None and local.tensor * local.context == 1
        return self.overlap and self.in_loop and plain and precision.moments == "int8" and not local.adapted

    def _transposed(self) -> int:
        """Return the bytes of the transposed parameters."""
        local = self.local
        copies = local.all_turned_matrices // local.fsdp * local.weight_itemsize
        return copies + (local.table // local.fsdp * local.weight_itemsize if self.in_loop else 0)

    def accumulated(self) -> Component:
        """Return the sum of gradients over microbatches."""
        if not self.in_loop:
            return Component(0, "one microbatch: no sum is kept")
        size = self.sharded.trained * self.local.gradient_itemsize
        assumption = f"sum over {self.local.config.trainer.accumulation} microbatches, {self.local.config.precision.gradients}"
        return Component(size, assumption)

    @property
    def separate_table_gradients(self) -> bool:
        """Whether the embedding's gradient is an array of its own, not added into that of the unembedding."""
        if self.local.adapted:
            return False
        first = self.local.config.compute.reduces_unembedding_first
        return not self.local.model.tie_embeddings or first or (self.data > 1 and self.local.fsdp > 1)

    def delayed_block_scaled(self) -> int:
        """Return the bytes that the weight gradients of two layers are computed from, where their operands are block-scaled.

        These layers are outside of the loop over layers, and nothing waits for their weight gradients: the scheduler delays them, and the
        operands are quantized along the tokens as late. Where gate and up are kept, those of a layer's MLP are the gradients of gate and
        up, the input of down and its gradient; with nvfp4 also one result in float32. Turns of several layers have a term for it
        (`Turn.before_weight_gradients`). Nothing is delayed where the layer reduces its own gradients (`scatters_scaled`).
        """
        local, precision = self.local, self.local.config.precision
        if precision.block_scaled is None or not self.overlap or self.turn.layers > 1 or self.scatters_scaled:
            return 0
        if block_scaled.applies(local):
            return DELAYED * block_scaled.before_weight_gradients(local, recomputed(local.model, local.config.compute.remat))
        wide = local.hidden_bytes if precision.block_scaled == "nvfp4" else 0
        return DELAYED * ((2 if local.model.gated_mlp else 1) + 2) * local.hidden_bytes + wide

    def early_table(self) -> int:
        """Return the bytes of the embedding's unsharded gradient where its zeros are written before the layers (configs/remat.py)."""
        local = self.local
        remat, experts = local.config.compute.remat, local.model.moe is not None
        early = zeroes_embedding_early(remat.policy, remat.names, local.context, local.tensor, experts=experts) and not local.adapted
        return local.table * local.gradient_itemsize if early else 0

    def expert_rows_in_flight(self) -> int:
        """Return the size of the residual streams in the rows of the experts that are live in the backward pass of a layer.

        These are the inputs and the gradients of the inputs by gate and by up. Over tensor, where hidden rows are smaller than they, those
        of two layers of a turn are live (heap of gpt-oss, tensor=8); without tokens from other devices only where the recomputation of one
        does not wait for the gradients of the other (heap of gpt-oss, tensor=4), and not where layers reduce theirs (over context, too).
        """
        local = self.local
        one = local.expert == 1 and (self.waits or self.reduces_in_turn)
        layers = min(DELAYED, self.turn.layers) if local.tensor > 1 and not one else 1
        return layers * EXPERT_ROWS_IN_FLIGHT * local.row_bytes

    def turned_gradients(self) -> int:
        """Return the bytes of one layer's transposed gradients of MLP down and attention out: XLA reduce-scatters leading dims only."""
        local = self.local
        return local.turned_matrices * local.gradient_itemsize if self.combined and local.fsdp > 1 and not local.adapted else 0

    def unembedding_gradient(self) -> Component:
        """Return the gradient of the unembedding during the backward pass of the layers, or what it is computed from."""
        if self.local.adapted:
            return Component(0, "frozen tables have no gradient")
        if self.local.config.compute.reduces_unembedding_first:
            return Component(4 * self.local.table // self.sharded.fsdp, "float32 gradient of the unembedding, reduced before the layers")
        if self.delayed_logits:
            return Component(self.delayed_logits, "gradient of the logits and hidden states, for the gradient of the unembedding")
        # without fsdp there is one sum, over data (heaps of Llama 3.1 8B and Qwen3-8B over data and tensor)
        half_reduced = self.half_reduced_table() if self.local.fsdp > 1 else 0
        return Component(
            4 * self.local.table + half_reduced,
            "unsharded float32 gradient of the unembedding, reduced only after the layers"
            + ("; once more as fsdp shards it" if half_reduced else ""),
        )

    @property
    def one_chunk(self) -> bool:
        """Whether the loss has one chunk of logits, so that it is no loop."""
        return self.local.loss_chunk_tokens >= self.local.tokens * self.local.heads

    @property
    def delayed_logits(self) -> int:
        """Return the bytes of what the unembedding's gradient is computed from where that is kept during the backward pass of the layers.

        That is the gradient of the logits, and the final hidden states.

        With one chunk the scheduler delays that matmul until the layers are done, where its input is the smaller and, in a loop of
        microbatches, its result is only reduce-scattered: over fsdp, with mesh.zero_stage=2 also over data. Without a loop so in heaps of
        dense models. One reduction takes it with the embedding's gradient. Where that is bfloat16 they have one each, and the
        unembedding's starts with the last layer, or before: then the matmul is done before the loop over layers (four heaps of five; not
        so in that of Qwen2.5 7B, fsdp=8, `full`).
        """
        local = self.local
        size = local.tokens * local.heads * local.model.padded_vocab_size // local.tensor * local.compute_itemsize
        size += local.heads * local.stream_bytes
        reduced_first = local.config.compute.reduces_unembedding_first or local.adapted
        summed = local.context > 1 or (self.data > 1 and not local.config.mesh.zero_stage)
        delays = self.overlap and self.one_chunk and not reduced_first and local.gradient_itemsize == 4
        # where turns of layers with experts reduce theirs, that of the last router takes it too (heaps of gpt-oss and Scout over context)
        late = not summed or ((self.turn.layers > 1 or self.turn.in_order) and self.reduces_in_turn)
        delays = delays and (late if self.in_loop else local.model.moe is None)
        return size if delays and size < 4 * local.table else 0

    @property
    def reduces_at_end(self) -> bool:
        """Whether the gradients of both tables, and of the first two layers, are reduced together after the backward pass of the layers.

        So in the heaps of dense layers with the collectives of a run.
        """
        local = self.local
        dense = local.model.moe is None and not local.adapted and local.pipeline == 1
        return dense and self.turn.layers == 1

    @property
    def alike_gradients_first(self) -> bool:
        """Whether alike layers are computed again whose matmuls, in 16 bits, compute weight gradients first (models/matmul)."""
        first = self.turn.gradients_first and self.turn.recomputes and not self.turn.in_order
        return first and self.local.config.precision.matmul == "compute"

    @property
    def reduces_table_early(self) -> bool:
        """Whether the unembedding's gradient is reduced before the loop over layers, with that of the first router.

        So in the heaps of Mixtral, Qwen3, gpt-oss and OLMo 3 with one microbatch; with microbatches in a loop in those of Mixtral and Qwen3
        over context, not over data. In DeepSeek it is so too, but its compiled steps are planned without it. Nor where turns of several
        layers reduce their gradients in the next turn: the two turns before the loop hold both their gradients and this one. Nor with
        experts in layers in order (heaps of gpt-oss and Llama 4 Scout). In turns that wait for what was saved, with a ring over context, it
        is so in a loop of microbatches too (heap of Scout in fp8, `dots`). Over context where weight gradients come first with one
        microbatch on several nodes (heaps of Llama 3.1 8B; not of it and Qwen3 8B on eight devices).
        """
        several = self.turn.layers > 1 and self.reduces_in_turn
        ordered = self.turn.in_order and not self.local.model.tie_embeddings and self.local.model.moe is None
        sends = self.turn.layers > 1 and expert_layers.sends_over_fsdp(self.local)
        first = self.alike_gradients_first and self.data * self.local.fsdp * self.local.context > NODE_DEVICES
        early = (self.delays_experts and not self.defers) or several or ordered or sends or self.scatters_scaled or self.reduces_in_order
        early |= first
        loops = self.in_loop and not (self.delays_experts and self.local.context > 1 and self.data == 1)
        ring = several and self.local.saves_first and self.local.ring
        return early and self.reduced and (ring or not loops) and self.local.model.latent_attention is None

    @property
    def reduces_in_order(self) -> bool:
        """Whether layers with experts in order reduce their gradients, and that of the unembedding comes first.

        So with `full` and one microbatch in heaps of gpt-oss over context; not where inputs of blocks come from host memory, nor over
        tensor with all_to_all, nor where a turn gathers its own weights (heap of Scout).
        """
        local = self.local
        alone = not self.in_loop and local.tensor == 1 and not local.sends_uncapped and local.config.compute.remat.policy == "full"
        return self.turn.in_order and self.reduces_in_turn and alone and not self.turn.gathers_own

    def reduced_early(self) -> Component:
        """Return the gradient of the unembedding that has been reduced before the loop over layers."""
        size = 4 * self.local.table // self.sharded.fsdp + self.half_reduced_table()
        return Component(size, "float32 gradient of the unembedding, reduced before the other layers")

    @property
    def final_states_wait(self) -> bool:
        """Whether the final hidden states and their gradient are there until the layers are done, as a norm follows the MLP and many tokens
        are summed (FEW_TOKENS), where whole blocks of alike layers are computed again in a loop of microbatches."""
        local, config = self.local, self.local.config
        many = local.tokens > FEW_TOKENS and local.model.norm_position == "post" and local.tensor * local.context * local.pipeline == 1
        plain = config.precision.matmul == "compute" and config.compute.remat.policy == "full"
        return self.overlap and self.in_loop and local.uniform_dense and many and plain

    def final_norm(self, *, at_start: bool) -> int:
        """Return the size of the final hidden states, float32, and of the gradient of their normed values, where layers still need them.

        GPUs before Hopper add in float32. XLA does not round the gradient that leaves the final norm before it is added: the kernel that
        adds it computes it again from these two, in the last layer with the gradient by its MLP (heaps of Qwen2.5 1.5B, Llama 3.2 3B and
        3.1 8B on A100). Where norms follow attention and MLP, the first kernel that reads it is that of such a norm. What is left is the
        gradient of the final norm's scale, which nothing waits for until all layers are done (heaps of OLMo 2 1B, 7B and 13B on A100).
        With one microbatch this was seen with many tokens alone (heaps of Qwen3 1.7B on A100, with norms before attention and MLP).
        On Hopper in a loop of microbatches one kernel computes both gradients, and the two values are free, but where `final_states_wait`:
        then both are bfloat16 (heap of OLMo 2 7B on B200s; values in host memory: MlpPeak._streams_after_norms).

        at_start: in the last layer, whose backward pass comes first.
        """
        local, model = self.local, self.local.model
        alike = local.uniform_dense and local.pipeline == 1
        rounds = self.program.adds_bfloat16 or local.compute_itemsize == 4
        if rounds and self.final_states_wait:
            return 2 * local.stream_bytes
        waiting = self.in_loop or (local.tokens > FEW_TOKENS and model.norm_position == "pre")
        if rounds or not (self.overlap and waiting and alike) or local.tensor > 1:
            return 0
        waits = at_start if model.norm_position == "pre" else model.norm_position == "post"
        return 4 * local.tokens * model.embed_dim + local.stream_bytes if waits else 0

    def half_reduced_table(self) -> int:
        """Return the bytes of a table's gradient that has been reduced over fsdp and not yet over data (mesh.zero_stage=2)."""
        zero = self.local.config.mesh.zero_stage and self.local.pipeline == 1
        return 4 * self.local.table // self.local.fsdp if zero and not self.local.adapted else 0

    def gathered_layer(self) -> int:
        """Return the bytes of the gathered weights of a layer."""
        return self.local.gathered_layer_weights * self.local.matrix_itemsize if self.local.fsdp > 1 else 0

    def next_layer_weights(self) -> int:
        """Return the bytes of the weights of the next turn's layers, which overlap gathers early; of one layer without pipelined turns."""
        if self.beside_attention:
            return 0
        several = self.local.model.layer_period if self.turn.in_order else self.turn.layers
        return (several if self.turn.pipelined and not self.turn.gathers_own else 1) * self.gathered_layer()

    @property
    def outside(self) -> Outside:
        """What is live through the backward pass because the layers before those with experts are not in the loop over layers."""
        local, (layers, dense) = self.local, self.local.first_dense
        if not (layers and self.overlap and local.fsdp > 1 and local.pipeline == 1):
            return Outside(0, 0)
        table = local.table * local.compute_itemsize if layers == 1 and local.tensor == 1 else 0
        # a loop copies values to host memory: without it gate and up are kept, or computed again as soon as their input is there
        kept = expert_layers.fetches_within_layers(local) and not {"mlp_gate", "mlp_up"}.isdisjoint(local.config.compute.remat.names)
        of_mlp = layers * (2 if local.model.gated_mlp else 1) * dense.hidden_bytes if kept else 0
        weights = 0 if self.beside_attention else layers * dense.gathered_layer_weights * local.matrix_itemsize + table
        return Outside(weights, self.recomputed_attention() + of_mlp)

    def recomputed_attention(self) -> int:
        """Return the bytes of one layer's attention that was recomputed before its backward pass: queries, keys, values, and the results
        in two layouts. Layers outside of the loop over layers may recompute it as early as their inputs are there."""
        local = self.local
        if not local.latent_bytes or self.local.config.compute.remat.policy not in ("full", "offload"):
            return 0
        return local.query_bytes + local.key_bytes + local.value_bytes + 2 * local.context_bytes
