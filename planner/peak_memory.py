"""The moments of a training step in which a device may be fullest, each as components in bytes (see planner/memory.py).

`overlap` is how the step is compiled for GPUs (JAX_OPTIMIZATION_LEVEL=O1): the latency-hiding scheduler gathers the next layer's weights
and still reduces the last layer's gradients while a layer runs, for which loops over layers are unrolled by two. Without it
(XLA's default flags) collectives wait their turn and memory is lower.

Legend: R rows per device, T sequence, D width, F MLP width, N heads, L layers, C tokens of a loss chunk; f, t devices on fsdp and tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.schema import Config
from ridgeline.planner.activations import Component, attention_workspace, mask_bytes, relaid_bytes
from ridgeline.planner.local import LocalSizes

COMBINED_BYTES = 30 * 2**20
"""XLA combines reductions up to this size of their results (xla_gpu_reduce_scatter_combine_threshold_bytes)."""
STREAMS_IN_FLIGHT = 8
"""Full-sequence streams [R, T, D] that are live in the backward pass of one layer (inputs, cotangents and their transposes)."""

Parts = dict[str, Component]


def short_of_memory(config: Config) -> bool:
    """Whether a step is built to take little memory rather than time: blocks offload their inputs.

    The unembedding's gradient is then reduced before the layers are differentiated (models/loss.py) and not under them.
    """
    return config.compute.remat.policy == "offload"


@dataclass(frozen=True)
class Moments:
    """The moments of a step of these sizes."""

    local: LocalSizes
    backend: str
    """Attention backend, `auto` resolved."""
    overlap: bool
    combined: bool
    """Whether collectives are combined and run at once as in a run (launch/overlap_flags.py)."""
    saved: Component
    """Activations kept from the forward to the backward pass."""

    def all(self) -> dict[str, Parts]:
        """Moment to its components, in the order of the step."""
        moments = {
            "loss": self.loss(),
            "start of the backward pass": self.backward(relaid=relaid_bytes(self.local, self.backend, self.overlap), late=False),
            "backward": self.backward(relaid=0, late=self.overlap),
            "embedding gradient": self.embedding_gradient(),
            "optimizer": self.optimizer(),
        }
        if self.overlap:
            moments["end of the backward pass"] = self.end_of_backward()
        if self.local.config.optimizer.kind == "muon":
            moments["orthogonalisation"] = self.orthogonalisation()
        return moments

    # What several moments share.

    @property
    def reduced(self) -> bool:
        """Whether gradients of layers are reduced over devices."""
        return self.local.fsdp * self.local.data > 1

    @property
    def in_loop(self) -> bool:
        """Whether microbatches run in a loop."""
        return self.local.config.trainer.accumulation > 1

    def layout_copies(self) -> int:
        """Transposed masters of the two matrices that fsdp cuts along their last dim (MLP down, attention out): XLA gathers leading dims.

        With microbatches in a loop, the transposed embedding is made once before it as well.
        """
        local = self.local
        if local.fsdp == 1:
            return 0
        copies = local.model.num_layers * (local.mlp_matrix + local.query_matrix) // local.fsdp * local.parameter_itemsize
        return copies + (local.table // local.fsdp * 4 if self.in_loop else 0)

    def accumulated(self) -> Component:
        """The sum over microbatches."""
        if not self.in_loop:
            return Component(0, "one microbatch: no sum is kept")
        size = self.local.parameters * self.local.gradient_itemsize
        words = f"sum over {self.local.config.trainer.accumulation} microbatches, {self.local.config.precision.gradients}"
        return Component(size, words)

    @property
    def tables_apart(self) -> bool:
        """Whether the embedding's gradient is an array of its own, not added into that of the unembedding."""
        return not self.local.model.tie_embeddings or (self.local.data > 1 and self.local.fsdp > 1)

    def zeroed_table(self) -> int:
        """The embedding's whole gradient, zeroed before the loss in a loop of microbatches, and without overlap when it is not float32.

        The scheduler puts it off until the layers are done where it overlaps collectives one by one, and not where several run at once.
        """
        local = self.local
        put_off = self.overlap and not (self.combined and local.fsdp > 1)
        early = (self.in_loop and local.tensor == 1 and self.tables_apart and not put_off) or (
            local.gradient_itemsize != 4 and not self.overlap
        )
        return local.table * local.gradient_itemsize if early else 0

    def unembedding_gradient(self) -> Component:
        """What the unembedding's gradient takes while the layers are differentiated."""
        if short_of_memory(self.local.config):
            return Component(4 * self.local.table // self.local.fsdp, "float32 gradient of the unembedding, reduced before the layers")
        return Component(4 * self.local.table, "whole float32 gradient of the unembedding, reduced only after the layers")

    def ahead(self) -> int:
        """With overlap: the weights of the layer that comes next, gathered for its recomputation and its gradient."""
        local = self.local
        return local.layer_weights // local.tensor * local.compute_itemsize if local.fsdp > 1 else 0

    # The moments.

    def loss(self) -> Parts:
        """All saved activations and one chunk of logits."""
        local = self.local
        tokens, table, vocab = local.loss_chunk_tokens, local.table, local.model.padded_vocab_size // local.tensor
        logits = tokens * vocab * (4 + local.compute_itemsize)
        zeroed = (2 if local.model.gated_mlp else 1) * local.model.num_layers * local.mlp_matrix // local.fsdp
        if self.overlap:
            zeroed = local.layer_matrices
        return {
            "activations": self.saved,
            "parameter_copies": Component(
                self.layout_copies() + (self.ahead() if self.overlap else 0),
                "transposed masters of MLP down and attention out"
                + (", and the weights of the first layer to go back through" if self.overlap else ""),
            ),
            "gradients": Component(
                zeroed * local.gradient_itemsize + self.zeroed_table(),
                "buffers that are zeroed before the loss, long before they are filled",
            ),
            "accumulated_gradients": self.accumulated(),
            "attention_workspace": Component(mask_bytes(local, self.backend), "mask of packed documents"),
            "working_activations": Component(
                3 * local.stream_bytes + local.cut_stream_bytes, "final hidden states, their gradient and the last block's output"
            ),
            "loss": Component(
                logits + local.compute_itemsize * table + 4 * self.local.table,
                f"logits of {tokens:,} tokens in float32 and their gradient, the gathered unembedding and its whole float32 gradient",
            ),
        }

    def backward(self, *, relaid: int, late: bool) -> Parts:
        """The fullest of three points in the backward pass of a layer: its MLP, its attention, its end."""
        local = self.local
        where, hidden, streams, copies, waits, workspace = self._fullest_point()
        cotangent = 4 * local.tokens * local.model.embed_dim // local.tensor
        gradients = (local.layer_matrices + local.vectors) * local.gradient_itemsize
        ahead = self.ahead() if self.overlap else 0
        reducing = local.gathered_layer_weights * local.gradient_itemsize if late and self.reduced else 0
        return {
            "activations": self.saved,
            "gradients": Component(
                gradients + self.zeroed_table(),
                f"of the layers, {local.config.precision.gradients}, cut as the parameters",
            ),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + copies + ahead,
                "transposed masters of MLP down and attention out; gathered weights" + (", those of the next layer too" if ahead else ""),
            ),
            "working_activations": Component(
                hidden + streams + relaid + cotangent,
                f"one layer's backward pass, fullest at {where}" + ("; one saved value of all layers in another layout" if relaid else ""),
            ),
            "attention_workspace": Component(workspace, attention_workspace(local, self.backend).assumption),
            "loss": self.unembedding_gradient(),
            "collective_buffers": Component(
                waits + reducing,
                f"whole {local.config.precision.gradients} gradients of a layer on their way into a reduction"
                + (", those of the layer before too" if reducing else ""),
            ),
        }

    def _fullest_point(self) -> tuple[str, int, int, int, int, int]:
        """Return where, hidden activations, streams, gathered weights, waiting gradients and attention's own bytes."""
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

    def end_of_backward(self) -> Parts:
        """With overlap, in the last layers to go back through: the embedding's gradient is zeroed while all others wait for reductions.

        Those of the two layers that the loop was unrolled by wait for each other where one reduction takes both.
        """
        local = self.local
        layer = local.gathered_layer_weights * local.gradient_itemsize
        together = 2 if 2 * layer <= COMBINED_BYTES * local.fsdp else 1
        inputs = min(self.saved.bytes, local.model.num_layers * local.cut_stream_bytes)
        return {
            "activations": Component(inputs, "inputs of the blocks; what their MLPs kept is gone"),
            "gradients": Component(
                (local.layer_matrices + local.vectors) * local.gradient_itemsize, "of the layers, cut as the parameters"
            ),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(self.layout_copies(), "transposed masters of MLP down and attention out"),
            "loss": Component(
                self.unembedding_gradient().bytes + (4 * local.table if self.tables_apart else 0), "float32 gradients of the tables"
            ),
            "collective_buffers": Component(
                together * layer if self.reduced else 0, "whole gradients of the last layers on their way into a reduction"
            ),
        }

    def embedding_gradient(self) -> Parts:
        """After the layers: whole gradients of the tables."""
        local = self.local
        whole = 4 * local.table
        both = whole if local.model.tie_embeddings else whole // local.fsdp
        gradients = (local.layer_matrices + local.vectors) * local.gradient_itemsize
        return {
            "gradients": Component(gradients + both, "of the layers, and of the unembedding"),
            "accumulated_gradients": self.accumulated(),
            "collective_buffers": Component(whole + whole // local.fsdp, "whole gradient of the embedding before and after its reduction"),
        }

    def optimizer(self) -> Parts:
        """The update."""
        local = self.local
        copies = 2 * 4 * local.table // local.fsdp
        if local.fsdp > 1:
            copies += 4 * local.model.num_layers * (2 * local.mlp_matrix + local.query_matrix) // local.fsdp
        return {
            "gradients": Component(local.parameters * local.gradient_itemsize, f"all, {local.config.precision.gradients}"),
            "parameter_copies": Component(copies, "transposes between the layouts of gradients and parameters"),
        }

    def orthogonalisation(self) -> Parts:
        """Muon's update: stacks of whole matrices."""
        local = self.local
        whole = 4 * 4 * local.model.num_layers * (local.mlp_matrix + local.query_matrix)
        gathered = Component(whole, "Muon: stacks of whole float32 matrices gathered for orthogonalisation")
        return {**self.optimizer(), "collective_buffers": gathered}
