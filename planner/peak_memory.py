"""Memory of one device at each point of a training step where it can peak, as components in bytes (see planner/memory.py).

`overlap` is how the step is compiled for GPUs (JAX_OPTIMIZATION_LEVEL=O1): while a layer runs, the latency-hiding scheduler gathers the
weights of the next layer and reduces the gradients of the previous one, for which it unrolls loops over layers by two. Without it (XLA's
default flags) collectives are not overlapped, and memory is lower.

Legend: R rows per device, T sequence, D width, F MLP width, N heads, L layers, C tokens of a loss chunk; f, t devices on fsdp and tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner.activations import Component, attention_workspace, mask_bytes, relaid_bytes
from ridgeline.planner.local import LocalSizes

COMBINED_BYTES = 30 * 2**20
"""XLA combines reductions up to this size of their results (xla_gpu_reduce_scatter_combine_threshold_bytes)."""
STREAMS_IN_FLIGHT = 8
"""Full-sequence residual streams [R, T, D] that are live in the backward pass of one layer (inputs, cotangents and their transposes)."""

Components = dict[str, Component]


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
            "start of the backward pass": self.backward(relaid=relaid_bytes(self.local, self.backend, self.overlap), late=False),
            "backward pass": self.backward(relaid=0, late=self.overlap),
            "embedding gradient": self.embedding_gradient(),
            "optimizer": self.optimizer(),
        }
        if self.overlap:
            points["end of the backward pass"] = self.end_of_backward()
        if self.local.config.optimizer.kind == "muon":
            points["orthogonalization"] = self.orthogonalization()
        return points

    # Used at several points.

    @property
    def reduced(self) -> bool:
        """Whether gradients of layers are reduced over devices."""
        return self.local.fsdp * self.local.data > 1

    @property
    def in_loop(self) -> bool:
        """Whether microbatches run in a loop."""
        return self.local.config.trainer.accumulation > 1

    def layout_copies(self) -> int:
        """Return the bytes of transposed parameters that XLA keeps because it gathers leading dims only.

        These are the two matrices that fsdp shards along their last dim (MLP down, attention out), and, with microbatches in a loop, the
        embedding, which is transposed once before the loop.
        """
        local = self.local
        if local.fsdp == 1:
            return 0
        copies = local.model.num_layers * (local.mlp_matrix + local.query_matrix) // local.fsdp * local.parameter_itemsize
        return copies + (local.table // local.fsdp * 4 if self.in_loop else 0)

    def accumulated(self) -> Component:
        """Return the sum of gradients over microbatches."""
        if not self.in_loop:
            return Component(0, "one microbatch: no sum is kept")
        size = self.local.parameters * self.local.gradient_itemsize
        assumption = f"sum over {self.local.config.trainer.accumulation} microbatches, {self.local.config.precision.gradients}"
        return Component(size, assumption)

    @property
    def separate_table_gradients(self) -> bool:
        """Whether the embedding's gradient is an array of its own, not added into that of the unembedding."""
        return not self.local.model.tie_embeddings or (self.local.data > 1 and self.local.fsdp > 1)

    def zeroed_table(self) -> int:
        """Return the bytes of the embedding's unsharded gradient where XLA allocates (zeroes) it before the loss.

        It does so in a loop of microbatches, and without overlap when the gradient is not float32. The scheduler delays it until after
        the layers when it overlaps collectives one at a time, but not when several run at once.
        """
        local = self.local
        delayed = self.overlap and not (self.combined and local.fsdp > 1)
        early = (self.in_loop and local.tensor == 1 and self.separate_table_gradients and not delayed) or (
            local.gradient_itemsize != 4 and not self.overlap
        )
        return local.table * local.gradient_itemsize if early else 0

    def unembedding_gradient(self) -> Component:
        """Return the gradient of the unembedding during the backward pass of the layers."""
        if self.local.config.compute.reduces_unembedding_first:
            return Component(4 * self.local.table // self.local.fsdp, "float32 gradient of the unembedding, reduced before the layers")
        return Component(4 * self.local.table, "unsharded float32 gradient of the unembedding, reduced only after the layers")

    def next_layer_weights(self) -> int:
        """Return the bytes of the weights of the next layer, which overlap gathers early."""
        local = self.local
        return local.layer_weights // local.tensor * local.compute_itemsize if local.fsdp > 1 else 0

    # The points.

    def loss(self) -> Components:
        """Return what is live in the loss: all saved activations and one chunk of logits."""
        local = self.local
        tokens, table, vocab = local.loss_chunk_tokens, local.table, local.model.padded_vocab_size // local.tensor
        logits = tokens * vocab * (4 + local.compute_itemsize)
        zeroed = (2 if local.model.gated_mlp else 1) * local.model.num_layers * local.mlp_matrix // local.fsdp
        if self.overlap:
            zeroed = local.layer_matrices
        return {
            "activations": self.saved,
            "parameter_copies": Component(
                self.layout_copies() + (self.next_layer_weights() if self.overlap else 0),
                "transposed parameters of MLP down and attention out"
                + (", and the gathered weights of the last layer" if self.overlap else ""),
            ),
            "gradients": Component(
                zeroed * local.gradient_itemsize + self.zeroed_table(),
                "gradient buffers that are zeroed before the loss, long before they are filled",
            ),
            "accumulated_gradients": self.accumulated(),
            "attention_workspace": Component(mask_bytes(local, self.backend), "mask of packed documents"),
            "working_activations": Component(
                3 * local.stream_bytes + local.cut_stream_bytes, "final hidden states, their gradient and the last block's output"
            ),
            "loss": Component(
                logits + local.compute_itemsize * table + 4 * self.local.table,
                f"logits of {tokens:,} tokens in float32 and their gradient, the gathered unembedding and its unsharded float32 gradient",
            ),
        }

    def backward(self, *, relaid: int, late: bool) -> Components:
        """Return what is live in the backward pass of a layer: in its MLP, in its attention or at its end, whichever is most.

        relaid: bytes of a saved value that is copied to another layout. late: gradients of the previous layer are still being reduced.
        """
        local = self.local
        where, hidden, streams, copies, waiting, workspace = self._peak_in_layer()
        cotangent = 4 * local.tokens * local.model.embed_dim // local.tensor
        gradients = (local.layer_matrices + local.vectors) * local.gradient_itemsize
        next_layer = self.next_layer_weights() if self.overlap else 0
        reducing = local.gathered_layer_weights * local.gradient_itemsize if late and self.reduced else 0
        return {
            "activations": self.saved,
            "gradients": Component(
                gradients + self.zeroed_table(),
                f"of the layers, {local.config.precision.gradients}, sharded as the parameters",
            ),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + copies + next_layer,
                "transposed parameters of MLP down and attention out; gathered weights"
                + (", also those of the next layer" if next_layer else ""),
            ),
            "working_activations": Component(
                hidden + streams + relaid + cotangent,
                f"backward pass of one layer, with its peak in {where}"
                + ("; one saved value of all layers in another layout" if relaid else ""),
            ),
            "attention_workspace": Component(workspace, attention_workspace(local, self.backend).assumption),
            "loss": self.unembedding_gradient(),
            "collective_buffers": Component(
                waiting + reducing,
                f"unsharded {local.config.precision.gradients} gradients of a layer before their reduction"
                + (", and those of the previous layer" if reducing else ""),
            ),
        }

    def _peak_in_layer(self) -> tuple[str, int, int, int, int, int]:
        """Return the point of a layer's backward pass with most memory, and there: hidden activations, streams, gathered weights, gradients
        before their reduction, and attention's workspace."""
        local = self.local
        hidden, stream = local.hidden_bytes, local.stream_bytes
        waiting = local.gathered_layer_weights * local.gradient_itemsize if self.reduced else 2 * local.mlp_matrix * 4
        mask, attention = mask_bytes(local, self.backend), attention_workspace(local, self.backend).bytes
        at_mlp = 4 if local.config.compute.remat.policy in ("full", "names", "offload") else 3
        at_end = 5 if 1 in (local.tensor, local.rows) else STREAMS_IN_FLIGHT
        points = (
            ("its MLP", at_mlp * hidden, STREAMS_IN_FLIGHT * stream, 2 * local.mlp_matrix * local.compute_itemsize, 0, mask),
            ("its attention", 3 * hidden, 6 * stream, 0, 0, attention),
            ("its end", hidden, at_end * stream, 0, waiting, mask),
        )
        return max(points, key=lambda point: sum(point[1:]))

    def end_of_backward(self) -> Components:
        """Return what is live, with overlap, in the backward pass of the first layers, which comes last.

        The embedding's gradient is zeroed while all others wait for their reductions. The gradients of the two layers that the loop is
        unrolled by are live together when one reduction combines both.
        """
        local = self.local
        layer = local.gathered_layer_weights * local.gradient_itemsize
        together = 2 if 2 * layer <= COMBINED_BYTES * local.fsdp else 1
        inputs = min(self.saved.bytes, local.model.num_layers * local.cut_stream_bytes)
        return {
            "activations": Component(inputs, "inputs of the blocks; activations of the MLPs are freed"),
            "gradients": Component(
                (local.layer_matrices + local.vectors) * local.gradient_itemsize, "of the layers, sharded as the parameters"
            ),
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
        gradients = (local.layer_matrices + local.vectors) * local.gradient_itemsize
        return {
            "gradients": Component(gradients + both, "of the layers and of the unembedding"),
            "accumulated_gradients": self.accumulated(),
            "collective_buffers": Component(whole + whole // local.fsdp, "gradient of the embedding before and after its reduction"),
        }

    def optimizer(self) -> Components:
        """Return what is live in the update."""
        local = self.local
        copies = 2 * 4 * local.table // local.fsdp
        if local.fsdp > 1:
            copies += 4 * local.model.num_layers * (2 * local.mlp_matrix + local.query_matrix) // local.fsdp
        return {
            "gradients": Component(local.parameters * local.gradient_itemsize, f"all, {local.config.precision.gradients}"),
            "parameter_copies": Component(copies, "transposes between the layouts of gradients and parameters"),
        }

    def orthogonalization(self) -> Components:
        """Return what is live in Muon's update: stacks of unsharded matrices."""
        local = self.local
        whole = 4 * 4 * local.model.num_layers * (local.mlp_matrix + local.query_matrix)
        gathered = Component(whole, "Muon: stacks of unsharded float32 matrices, gathered for the orthogonalization")
        return {**self.optimizer(), "collective_buffers": gathered}
