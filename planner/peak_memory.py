"""Memory of one device at each point of a training step where it can peak, as components in bytes (see planner/memory.py).

`overlap` is how the step is compiled for GPUs (JAX_OPTIMIZATION_LEVEL=O1): while a layer runs, the latency-hiding scheduler gathers the
weights of the next layer and reduces the gradients of the previous one, for which it unrolls loops over layers by two. Without it (XLA's
default flags) collectives are not overlapped, and memory is lower.

Legend: R rows per device, T sequence, D width, F MLP width, N heads, L layers, C tokens of a loss chunk; f, t devices on fsdp and tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.remat import POLICIES
from ridgeline.planner.activations import Component, attention_workspace, mask_bytes, offloads_inputs, relaid_bytes, saved_arrays
from ridgeline.planner.local import LocalSizes, muon_layers
from ridgeline.planner.parameters import matmul_weights
from ridgeline.planner.turn import Turn

COMBINED_BYTES = 30 * 2**20
"""XLA combines reductions up to this size of their results (xla_gpu_reduce_scatter_combine_threshold_bytes)."""
STREAMS_IN_FLIGHT = 8
"""Full-sequence residual streams [R, T, D] that are live in the backward pass of one layer (inputs, cotangents and their transposes)."""

EXPERT_ROWS_IN_FLIGHT = 3
"""Residual streams in the rows of the experts [R, D] that are live there: inputs, gradients of the inputs by gate and by up."""
SLOTS_IN_FLIGHT = 2
"""Arrays of the tokens of all devices of `expert` that are live there: inputs, and the gradients that are sent back."""
DELAYED = 2
"""Layers of experts whose weight gradients are computed together at the start of the backward pass."""
LOOPED_LAYERS = 5
"""Layers of experts from which the backward pass has a loop: XLA takes three out of it before it and one after it."""


Components = dict[str, Component]


@dataclass(frozen=True)
class Outside:
    """Bytes of layers outside of the loop over layers that are live while it runs."""

    weights: int
    """Gathered weights; where the first layer is not in a loop, also the gathered embedding, from which its input is looked up again."""
    activations: int
    """Recomputed early."""


@dataclass(frozen=True)
class StepMemory:
    """What is live at each point of a step of these sizes."""

    local: LocalSizes
    backend: str
    """Attention backend, with `auto` resolved."""
    overlap: bool
    """Compiled with the latency-hiding scheduler."""
    combined: bool
    """Collectives are combined, and several run at once, as in a run (launch/environment.py)."""
    saved: Component
    """Activations kept from the forward to the backward pass."""

    def points(self) -> dict[str, Components]:
        """Return the components at each point, in the order of the step."""
        points = {
            "loss": self.loss(),
            "start of the backward pass": self.backward(
                relaid=relaid_bytes(self.local, self.backend, self.overlap, self.combined), turns=self.turn.first
            ),
            "backward pass": self.backward(late=self.overlap),
            **({} if self.local.adapted else {"embedding gradient": self.embedding_gradient()}),
            "optimizer": self.optimizer(),
        }
        if self.overlap:
            points["end of the backward pass"] = self.end_of_backward()
        if self.combined and self.local.fsdp > 1:
            points["last layer of the backward pass"] = self.last_layer()
        if self.delays_experts:
            points["first layers of the backward pass"] = self.first_layers()
            if self.reduced:
                points["reductions of the first layers"] = self.reductions_of_first_layers()
        if self.local.config.optimizer.kind == "muon":
            points["orthogonalization"] = self.orthogonalization()
        return points if self.local.pipeline == 1 else {name: self._with_stages(name, parts) for name, parts in points.items()}

    def _with_stages(self, point: str, parts: Components) -> Components:
        """Return the components with what pipeline stages add: tables gathered over stages and their gradients, streams between stages, and
        layers that were moved to their stages."""
        local = self.local
        elsewhere = local.tables * (local.pipeline - 1)  # stored by other stages
        if point == "optimizer":
            return parts
        copies = (local.tables * local.pipeline + local.moved * local.layer_matrices) * local.parameter_itemsize
        sums, summed = elsewhere * local.gradient_itemsize, parts.get("accumulated_gradients", self.accumulated())
        text = "tables of all stages" + (", layers moved to their stages" if local.moved else "")
        before, working = (parts.get(name, Component(0, "")) for name in ("parameter_copies", "working_activations"))
        return parts | {
            "parameter_copies": Component(before.bytes + copies, "; ".join(filter(None, (before.assumption, text)))),
            "accumulated_gradients": Component(summed.bytes + sums, f"{summed.assumption}; tables of all stages"),
            "working_activations": Component(
                working.bytes + 4 * local.cut_stream_bytes, "; ".join(filter(None, (working.assumption, "streams between stages")))
            ),
        }

    # Used at several points.

    @property
    def turn(self) -> Turn:
        """One turn of the loop over layers."""
        return Turn(self.local, self.overlap, self.in_loop)

    @property
    def sharded(self) -> LocalSizes:
        """Sizes of the gradients of a microbatch: as the parameters', with mesh.zero_stage=2 also sharded over data, but of stages."""
        return self.local if self.local.pipeline > 1 else self.local.of_state

    @property
    def reduced(self) -> bool:
        """Whether gradients of layers are reduced over devices."""
        return self.local.fsdp * self.data > 1

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

    def layout_copies(self) -> int:
        """Return the bytes of transposed parameters that XLA keeps because it gathers leading dims only.

        These are the two matrices that fsdp shards along their last dim (MLP down, attention out), and, with microbatches in a loop, the
        embedding, which is transposed once before the loop.
        """
        local = self.local
        if local.fsdp == 1:
            return 0
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
        return not self.local.model.tie_embeddings or (self.data > 1 and self.local.fsdp > 1)

    def zeroed_table(self) -> int:
        """Return the bytes of the embedding's unsharded gradient where XLA allocates (zeroes) it before the loss.

        It does so without overlap, in a loop of microbatches or when the gradient is not float32; with overlap where nothing is recomputed,
        in a loop of microbatches (but for attention in blocks) or before Pallas kernels. Else see `last_layer`.
        """
        local = self.local
        if local.adapted:
            return 0
        if self.overlap:
            if self.delays_experts and local.model.moe_layers < LOOPED_LAYERS:
                return local.table * local.gradient_itemsize  # no loop is between the loss and this gradient
            first = self.separate_table_gradients and self.backend != "chunked" if self.in_loop else self.backend == "pallas"
            early = self.combined and local.fsdp > 1 and local.tensor == 1 and local.config.compute.remat.policy == "none" and first
        else:
            early = (self.in_loop and local.tensor == 1 and self.separate_table_gradients) or local.gradient_itemsize != 4
        return local.table * local.gradient_itemsize if early else 0

    def turned_gradients(self) -> int:
        """Return the bytes of one layer's transposed gradients of MLP down and attention out: XLA reduce-scatters leading dims only."""
        local = self.local
        return local.turned_matrices * local.gradient_itemsize if self.combined and local.fsdp > 1 and not local.adapted else 0

    def unembedding_gradient(self) -> Component:
        """Return the gradient of the unembedding during the backward pass of the layers."""
        if self.local.adapted:
            return Component(0, "frozen tables have no gradient")
        if self.local.config.compute.reduces_unembedding_first:
            return Component(4 * self.local.table // self.sharded.fsdp, "float32 gradient of the unembedding, reduced before the layers")
        return Component(
            4 * self.local.table + self.half_reduced_table(),
            "unsharded float32 gradient of the unembedding, reduced only after the layers"
            + ("; once more as fsdp shards it" if self.half_reduced_table() else ""),
        )

    @property
    def reduces_table_early(self) -> bool:
        """Whether the unembedding's gradient is reduced before the loop over layers, with that of the first router.

        So in the heaps of Mixtral and Qwen3 with one microbatch. Microbatches in a loop were not looked at. In DeepSeek it is so too, but
        not planned: its zeroed accumulators of attention and the gathered weights of its dense layers are as large, and not counted.
        """
        return self.delays_experts and self.reduced and not self.in_loop and self.local.model.latent_attention is None

    def reduced_early(self) -> Component:
        """Return the gradient of the unembedding that has been reduced before the loop over layers."""
        size = 4 * self.local.table // self.sharded.fsdp + self.half_reduced_table()
        return Component(size, "float32 gradient of the unembedding, reduced before the other layers")

    def half_reduced_table(self) -> int:
        """Return the bytes of a table's gradient that has been reduced over fsdp and not yet over data (mesh.zero_stage=2)."""
        zero = self.local.config.mesh.zero_stage and self.local.pipeline == 1
        return 4 * self.local.table // self.local.fsdp if zero and not self.local.adapted else 0

    def gathered_layer(self) -> int:
        """Return the bytes of the gathered weights of a layer."""
        return self.local.gathered_layer_weights * self.local.matrix_itemsize if self.local.fsdp > 1 else 0

    def next_layer_weights(self) -> int:
        """Return the bytes of the weights of the next turn's layers, which overlap gathers early."""
        return self.turn.layers * self.gathered_layer()

    @property
    def outside(self) -> Outside:
        """What is live through the backward pass because the layers before those with experts are not in the loop over layers."""
        local, (layers, dense) = self.local, self.local.first_dense
        if not (layers and self.overlap and local.fsdp > 1 and local.pipeline == 1):
            return Outside(0, 0)
        table = local.table * local.compute_itemsize if layers == 1 and local.tensor == 1 else 0
        return Outside(layers * dense.gathered_layer_weights * local.matrix_itemsize + table, self.recomputed_attention())

    def recomputed_attention(self) -> int:
        """Return the bytes of one layer's attention that was recomputed before its backward pass: queries, keys, values, and the results
        in two layouts. Layers outside of the loop over layers may recompute it as early as their inputs are there."""
        local = self.local
        if not local.latent_bytes or self.local.config.compute.remat.policy not in ("full", "offload"):
            return 0
        return local.query_bytes + local.key_bytes + local.value_bytes + 2 * local.context_bytes

    # The points.

    def loss(self) -> Components:
        """Return what is live in the loss: all saved activations and one chunk of logits."""
        local = self.local
        tokens, table, vocab = local.loss_chunk_tokens, local.table, local.model.padded_vocab_size // local.tensor
        teacher = 0 if local.config.distillation.weight is None else 4  # the gradient of the divergence in float32
        logits, gradient = tokens * vocab * (4 + local.compute_itemsize + teacher), 0 if local.adapted else 4 * table
        if tokens >= local.tokens and not self.in_loop:  # one chunk: the float32 logits are gone when the table's gradient is computed
            logits, gradient = max(logits, tokens * vocab * local.compute_itemsize + gradient), 0
        zeroed = (2 if local.model.gated_mlp else 1) * local.mlp_matrices // (local.fsdp // local.expert)
        zeroed = local.trained if local.adapted else zeroed
        policy = local.config.compute.remat.policy
        if self.overlap:
            # By XLA's own thresholds of combining, the stacks of gradients that are converted later are zeroed after the loss.
            zeroed = (
                (self.sharded.trained if local.adapted else self.sharded.layer_matrices)
                if self.combined or local.gradient_itemsize == self.stack_itemsize
                else 0
            )
            if policy == "offload" or (policy == "full" and local.fsdp == 1):
                zeroed = 0  # they are zeroed after the loss
        # XLA recomputes the attention of the last layer early: a norm, queries and keys with and without rotation, values and the result
        early = local.stream_bytes + 3 * local.query_bytes + 3 * local.key_bytes if self.overlap and policy == "full" else 0
        if self.turn.in_loss and policy == "full":  # of all layers of the last turn, and gate and up of the last layer
            early = self.turn.layers * early + (2 if local.model.gated_mlp else 1) * local.hidden_bytes
        if self.turn.layers > 1:  # the last turn is not in the loop: what it keeps is not yet in the stacks; zeros of all turns apart
            early += self.turn.layers * self.saved.bytes // local.model.num_layers
        # Of frozen layers XLA gathers two turns early: no gradients wait for their reduction meanwhile.
        layers = 2 * self.turn.layers if local.adapted else self.turn.in_loss * self.turn.layers + 1
        gathered = layers * self.gathered_layer() if self.overlap else 0
        return {
            "activations": self.saved,
            "parameter_copies": Component(
                self.layout_copies() + self.turn.kept_parameters() + gathered,
                "transposed parameters of MLP down and attention out"
                + (", and the gathered weights of the last " + ("layer" if layers == 1 else f"{layers} layers") if self.overlap else ""),
            ),
            "gradients": Component(
                zeroed * self.stack_itemsize + self.zeroed_table(),
                "gradient buffers that are zeroed before the loss, long before they are filled",
            ),
            "accumulated_gradients": self.accumulated(),
            "attention_workspace": Component(
                mask_bytes(local, self.backend),
                "mask of packed documents",
            ),
            "working_activations": Component(
                3 * local.heads * local.stream_bytes + local.cut_stream_bytes + early,
                "final hidden states, their gradient and the last block's output"
                + ("; attention of the last layer, recomputed" if early else ""),
            ),
            "loss": Component(
                logits + local.compute_itemsize * table + gradient + self.half_reduced_table(),
                f"logits of {tokens:,} tokens in float32 and their gradient, the gathered unembedding"
                + ("" if local.adapted else " and its unsharded float32 gradient"),
            ),
        }

    def backward(self, *, relaid: int = 0, late: bool = False, turns: int = 1, at_end: int = 0) -> Components:
        """Return what is live in the backward pass of a layer: in its MLP, in its attention or at its end, whichever is most.

        relaid: bytes of a saved value that is copied to another layout. late: gradients of the previous layer are still being reduced.
        turns: whose weight gradients may be computed together. at_end: further bytes at the end of the layer.
        """
        local = self.local
        where, hidden, streams, copies, waiting, workspace = self._peak_in_layer(turns, at_end)
        cotangent = 4 * local.tokens * local.model.embed_dim // local.tensor
        gradients = self.layer_gradients * self.stack_itemsize
        next_layer = self.next_layer_weights() if self.overlap else 0
        copies += self.turn.kept_parameters()
        waiting += self.turn.gradients_left_over()
        # the block's input comes from host memory into a buffer of its own
        streams += (local.cut_stream_bytes if offloads_inputs(local) else 0) + self.outside.activations
        hidden += self.turn.slices_of_kept(self.saved.bytes)
        reducing = self.turn.trained_weights * local.gradient_itemsize if late and self.reduced else 0
        reducing += self.turned_gradients() if reducing else 0
        return {
            "activations": self.saved,
            "gradients": Component(
                gradients + self.zeroed_table(),
                f"of the layers, {local.config.precision.params}, sharded as the parameters",
            ),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + copies + next_layer + self.outside.weights,
                "transposed parameters of MLP down and attention out; gathered weights"
                + (", also those of the next layer" if next_layer else ""),
            ),
            "working_activations": Component(
                hidden + streams + relaid + cotangent,
                f"backward pass of one layer, with its peak in {where}"
                + ("; one saved value of all layers in another layout" if relaid else ""),
            ),
            "attention_workspace": Component(workspace, attention_workspace(local, self.backend).assumption),
            "loss": self.reduced_early() if late and self.reduces_table_early else self.unembedding_gradient(),
            "collective_buffers": Component(
                waiting + reducing,
                f"unsharded {local.config.precision.gradients} gradients of a layer before their reduction"
                + (", and those of the previous layer" if reducing else ""),
            ),
        }

    def first_layers(self) -> Components:
        """Return what is live in the backward pass of the last two layers of experts, which comes first.

        They are not in the loop over layers. Nothing waits for their weight gradients, so the scheduler delays these: the inputs of both
        layers' weight gradients are live when the gradient of the second layer's input is computed, two arrays in the rows of the experts
        (inputs, and gradients of the results) for each layer, and the parts by gate and by up. The stacks of gradients are not yet zeroed.
        """
        local = self.local
        delayed = DELAYED * (self.turn.before_weight_gradients() + 2 * local.row_bytes)
        working = delayed + 2 * local.row_bytes + SLOTS_IN_FLIGHT * local.slot_bytes + STREAMS_IN_FLIGHT * local.stream_bytes
        working += self.recomputed_attention() + self.outside.activations
        return {
            "activations": self.saved,
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + self.gathered_layer() + self.outside.weights,
                "transposed parameters of attention out; gathered weights of one layer",
            ),
            "working_activations": Component(
                working, f"backward pass of {DELAYED} layers: inputs of their weight gradients, which are computed later"
            ),
            "gradients": Component(self.zeroed_table(), "of the embedding, zeroed early"),
            "loss": self.unembedding_gradient(),
        }

    def reductions_of_first_layers(self) -> Components:
        """Return what is live in the backward pass of the third layer of experts, the last one before the loop over layers.

        Where the scheduler does not delay the weight gradients of the two layers before it (see `first_layers`), these wait for their
        reduction meanwhile, with the gradients of the results of their attention's matmuls. In the MLP of the third layer its inputs, the
        gradients of its results and the parts by gate and by up are live; at its end, its own weight gradients.
        """
        local = self.local
        layer = local.gathered_trained_weights * local.gradient_itemsize
        before = min(DELAYED, local.model.moe_layers - 1)
        of_attention = local.query_bytes + (local.up_bytes or 2 * local.key_bytes) + local.stream_bytes
        at_mlp = 4 if POLICIES[local.config.compute.remat.policy].recomputes_block else 3
        in_mlp = at_mlp * local.hidden_bytes + 4 * local.row_bytes + SLOTS_IN_FLIGHT * local.slot_bytes
        in_mlp += STREAMS_IN_FLIGHT * local.stream_bytes
        at_end = layer + local.hidden_bytes + 5 * local.stream_bytes
        working = max(in_mlp, at_end) + before * of_attention + self.recomputed_attention() + self.outside.activations
        return {
            "activations": self.saved,
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + self.gathered_layer() + self.outside.weights,
                "transposed parameters of attention out; gathered weights of one layer",
            ),
            "gradients": Component(self.zeroed_table(), "of the embedding, zeroed early"),
            "working_activations": Component(working, "backward pass of the third layer"),
            "loss": self.unembedding_gradient(),
            "collective_buffers": Component(
                before * layer, f"unsharded {local.config.precision.gradients} gradients of {before} layers before their reduction"
            ),
        }

    def last_layer(self) -> Components:
        """Return what is live in the backward pass of the first layer, which comes last.

        XLA takes it out of the loop over layers, gathers nothing for a next one, and zeroes the embedding's unsharded gradient in its MLP.
        What the MLPs saved is freed before. At its end the gradients of both tables have been reduced.
        """
        local = self.local
        tables = 0 if local.adapted else 2 * local.table // self.sharded.fsdp * local.gradient_itemsize
        point = self.backward(at_end=self.turned_gradients() + tables)
        mlp = sum(
            layers * count * size
            for layers, kind in local.layer_kinds
            for count, size in saved_arrays(kind, self.backend)
            if size == kind.hidden_bytes
        )
        kept = Component(self.saved.bytes - mlp, "of attention, and inputs of the blocks; those of the MLPs are freed")
        copies = point["parameter_copies"]
        gradients = 0 if local.adapted else point["loss"].bytes + local.table * local.gradient_itemsize - self.zeroed_table()
        return point | {
            "activations": kept,
            "parameter_copies": Component(
                copies.bytes - self.next_layer_weights(), copies.assumption.replace(", also those of the next layer", "")
            ),
            "loss": Component(gradients, "unsharded gradients of unembedding and embedding"),
        }

    def _peak_in_layer(self, turns: int, more: int) -> tuple[str, int, int, int, int, int]:
        """Return the point of a layer's backward pass with most memory, and there: hidden activations, streams, gathered weights, gradients
        before their reduction, and attention's workspace."""
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
        at_mlp = 4 if local.config.compute.remat.policy in ("full", "names", "offload") else 3
        if self.overlap and recomputes and local.fsdp * local.tensor == 1:
            at_mlp += gates  # nothing to gather: the next layer is recomputed early
        at_end = 5 if 1 in (local.tensor, local.rows) else STREAMS_IN_FLIGHT
        # 8-bit matmuls: the gradient of a hidden activation in both layouts, one byte each
        quantized = 2 * hidden // local.compute_itemsize if recomputes and local.config.precision.eight_bit else 0
        if local.config.precision.block_scaled is not None:
            # gradients of gate and up, in blocks along both dims: twice in float32, transposed, and twice in one byte; the input of down,
            # transposed and twice in one byte
            quantized = (8 * gates // local.compute_itemsize + 2 * gates + 2) * hidden
        down = local.mlp_matrix * local.gradient_itemsize if self.reduced and self.combined and not local.adapted else 0
        points = (
            (
                "its MLP",
                at_mlp * hidden + quantized + EXPERT_ROWS_IN_FLIGHT * local.row_bytes + SLOTS_IN_FLIGHT * local.slot_bytes,
                STREAMS_IN_FLIGHT * stream,
                2 * local.mlp_matrix * local.compute_itemsize,
                down,
                mask,
            ),
            ("its attention", 3 * hidden, 6 * stream, 0, 0, attention),
            # attention may run before the gradients of the MLP's weights
            ("its attention", at_mlp * hidden if recomputes else 0, 3 * stream + 5 * local.query_bytes, 0, 0, attention),
            ("its end", hidden, at_end * stream, 0, waiting + more, mask),
            *([("its end", turns * self.turn.before_weight_gradients(), 0, 0, more, mask)] if self.turn.layers > 1 and recomputes else []),
        )
        return max(points, key=lambda point: sum(point[1:]))

    def end_of_backward(self) -> Components:
        """Return what is live, with overlap, in the backward pass of the first layers, which comes last.

        The embedding's gradient is zeroed while all others wait for their reductions. The gradients of the two layers that the loop is
        unrolled by are live together when one reduction combines both.
        """
        local = self.local
        layer = local.gathered_trained_weights * local.gradient_itemsize
        together = 2 if 2 * layer <= COMBINED_BYTES * local.fsdp else 1
        inputs = min(self.saved.bytes, local.model.num_layers * local.cut_stream_bytes)
        return {
            "activations": Component(inputs, "inputs of the blocks; activations of the MLPs are freed"),
            "gradients": Component(self.layer_gradients * self.stack_itemsize, "of the layers, sharded as the parameters"),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(self.layout_copies(), "transposed parameters of MLP down and attention out"),
            "loss": Component(
                self.unembedding_gradient().bytes + (4 * local.table if self.separate_table_gradients else 0),
                "float32 gradients of embedding and unembedding",
            ),
            "collective_buffers": Component(
                together * layer if self.reduced else 0, "unsharded gradients of the first layers before their reduction"
            ),
        }

    def embedding_gradient(self) -> Components:
        """Return what is live after the layers: unsharded gradients of embedding and unembedding."""
        local = self.local
        whole = 4 * local.table
        both = whole if local.model.tie_embeddings else whole // local.fsdp
        gradients = self.layer_gradients * self.stack_itemsize
        return {
            "gradients": Component(gradients + both, "of the layers and of the unembedding"),
            "accumulated_gradients": self.accumulated(),
            "collective_buffers": Component(whole + whole // local.fsdp, "gradient of the embedding before and after its reduction"),
        }

    def optimizer(self) -> Components:
        """Return what is live in the update."""
        local = self.local
        copies = 0 if local.adapted else 2 * 4 * local.table // local.of_state.fsdp
        if local.fsdp > 1 and not local.adapted:
            copies += 4 * (2 * local.mlp_matrices + local.model.num_layers * local.out_matrix) // local.of_state.fsdp
        return {
            "gradients": Component(
                local.of_state.trained * (local.gradient_itemsize if self.in_loop else self.stack_itemsize),
                f"all, {local.config.precision.gradients if self.in_loop else local.config.precision.params}",
            ),
            "parameter_copies": Component(copies, "transposes between the layouts of gradients and parameters"),
        }

    def orthogonalization(self) -> Components:
        """Return what is live in Muon's update (trainer/muon.py).

        XLA starts the all-to-alls of all stacks of matrices at once: each is there before and after one.
        """
        local, model = self.local, self.local.model
        stacks = muon_layers(model.num_layers, local.fsdp * local.tensor) * sum(matmul_weights(model).values())
        return {
            "gradients": Component(4 * (local.parameters - local.layer_matrices), "of tables and norms, float32"),
            "collective_buffers": Component(
                2 * 4 * stacks, "Muon: stacks of whole float32 matrices of a share of the layers, before and after an all-to-all"
            ),
        }
