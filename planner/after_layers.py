"""Memory of one device after the backward pass of the layers: reductions of what waited, the embedding's gradient, the update."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner.activations import Component
from ridgeline.planner.live_buffers import LiveBuffers
from ridgeline.planner.local import muon_layers
from ridgeline.planner.optimizer_state import TENSOR, optimizer_state
from ridgeline.planner.parameters import matmul_weights

COMBINED_BYTES = 30 * 2**20
"""XLA combines reductions up to this size of their results (xla_gpu_reduce_scatter_combine_threshold_bytes)."""


@dataclass(frozen=True)
class AfterLayers(LiveBuffers):
    """What is live at each point after the backward pass of the layers, and at its end."""

    def end_of_backward(self) -> dict[str, Component]:
        """Return what is live, with overlap, in the backward pass of the first layers, which comes last.

        All gradients wait for their reductions. The gradients of the two layers that the loop is unrolled by are live together when one
        reduction combines both, and those of the last two turns of several layers, where a turn's are reduced in the next one.
        """
        local = self.local
        layer = self.turn.trained_weights * local.gradient_itemsize
        several = self.turn.layers > 1 or self.turn.in_order
        across_turns = several and not self.reduces_in_turn
        together = 2 if across_turns or 2 * layer <= COMBINED_BYTES * local.fsdp else 1
        # those of a turn of several layers still wait when the embedding's gradient begins
        of_embedding = several and self.separate_table_gradients
        inputs = min(self.saved.bytes, local.model.num_layers * local.cut_stream_bytes)
        return {
            "activations": Component(inputs, "inputs of the blocks; activations of the MLPs are freed"),
            "gradients": Component(self.layer_gradients * self.stack_itemsize, "of the layers, sharded as the parameters"),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(self.layout_copies(), "transposed parameters of MLP down and attention out"),
            "loss": Component(
                self.unembedding_gradient().bytes + (4 * local.table if of_embedding else 0),
                "float32 gradients of embedding and unembedding",
            ),
            "collective_buffers": Component(
                together * layer if self.reduced else 0, "unsharded gradients of the first layers before their reduction"
            ),
        }

    def reductions_after_layers(self) -> dict[str, Component]:
        """Return what is live after the backward pass of the layers, while gradients of tables and first layers are reduced.

        The scheduler computes the gradients of the tables, and starts their reductions, as soon as the gradient of the first layer's input
        is there; the first layer's weight gradients are computed meanwhile. The loop hands on the gradients of the layer after it, and one
        reduction takes those of both layers. First those of its MLP down are transposed, then the results of the reduction are there.
        Of ordered turns too the gradients of two layers wait, and the loop hands on the reduced ones of a turn.

        With one microbatch and mesh.zero_stage=2 the update reads no transposed parameters: those of the layers are gone, and there is a
        stack of the MLP and a table in the layout of the gather over data (heap of Llama 3.1 8B, data=4 x fsdp=2).
        """
        local = self.local
        copies = self.layout_copies()
        if self.gathers_over_data and not self.in_loop:
            copies = 4 * (local.mlp_matrices + local.table) // local.of_state.fsdp
        layers = 2 * self.turn.trained_weights * local.gradient_itemsize
        tables, unembedding = local.table * (4 + local.gradient_itemsize), 4 * local.table
        before = tables - (unembedding if local.config.compute.reduces_unembedding_first else 0)
        of_layers = layers + max(local.mlp_matrix * local.gradient_itemsize, layers // local.fsdp)
        of_layers += self.turn.reduced_gradients(self.sharded.fsdp)
        return {
            "gradients": Component(self.layer_gradients * self.stack_itemsize, "of the layers, sharded as the parameters"),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(copies, "transposed parameters of MLP down and attention out"),
            "loss": Component(before + tables // local.fsdp, "gradients of embedding and unembedding before and after their reduction"),
            "collective_buffers": Component(of_layers, "unsharded gradients of the first two layers before their reduction"),
        }

    def embedding_gradient(self) -> dict[str, Component]:
        """Return what is live after the layers: unsharded gradients of embedding and unembedding."""
        local = self.local
        whole = 4 * local.table
        both = whole if local.model.tie_embeddings else whole // local.fsdp
        gradients = self.layer_gradients * self.stack_itemsize
        return {
            "gradients": Component(gradients + both, "of the layers and of the unembedding"),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(self.layout_copies() if self.in_loop else 0, "transposed before the loop of microbatches"),
            "collective_buffers": Component(whole + whole // local.fsdp, "gradient of the embedding before and after its reduction"),
        }

    def optimizer(self) -> dict[str, Component]:
        """Return what is live in the update."""
        local = self.local
        copies = 0 if local.adapted else 2 * 4 * local.table // local.of_state.fsdp
        if local.fsdp > 1 and not local.adapted:
            # those of experts, whose gradients are scattered along their first dim, have the parameters' layout
            of_mlp = 2 * local.mlp_matrices if local.model.moe is None else 0
            copies += 4 * (of_mlp + local.model.num_layers * local.out_matrix) // local.of_state.fsdp
        gathered = 0
        if self.overlap and local.of_state.fsdp > local.fsdp and (local.adapted or local.config.optimizer.offload):
            if local.config.optimizer.kind == "adamw":
                gathered = local.trained * local.parameter_itemsize
        elif self.overlap and local.of_state.fsdp > local.fsdp:
            return self.gathers_update()
        return {
            "gradients": Component(
                local.of_state.trained * (local.gradient_itemsize if self.in_loop else self.stack_itemsize),
                f"all, {local.config.precision.gradients if self.in_loop else local.config.precision.params}",
            ),
            "parameter_copies": Component(
                copies + gathered,
                "transposes between the layouts of gradients and parameters"
                + ("; updated parameters, gathered over data" if gathered else ""),
            ),
        }

    def gathers_update(self) -> dict[str, Component]:
        """Return what is live at the end of the update with mesh.zero_stage=2, where updated parameters are gathered over data.

        XLA gathers leading dims only. The unembedding is gathered into its place; every other parameter into a buffer of its own, from
        where it is transposed into its place. The scheduler puts all transposes after the last gather: all these buffers are live then.
        With the collectives of a run over fsdp or tensor, several gathers are in flight, and what they read waits with them; else that of
        the unembedding alone. Where updates are too short to hide them (not on Hopper), these are all updated parameters (heap of Qwen3
        32B, data=2 x tensor=4, with gradients of 16 bits, on B200s).

        * AdamW, Lion and SGD: kernels compute a stack's parameters and moments together. New moments of the gates cannot be written in
          place there, as the kernel transposes: those of one stack are live when the last gather starts; of two where parameters have 16
          bits.
        * Lion and SGD: the new moments of MLP down and attention out are computed last. Their gradients wait for it, and the embedding's
          moment in the gradient's layout. So with AdamW and parameters of 16 bits (both moments of the embedding).
        * Adafactor needs means of each parameter before it is updated, so that the updates follow each other as the gathers do. The
          embedding is gathered into the place of the old MLP down, which has been updated, where several gathers are in flight.
        * With parameters of 16 bits one kernel updates both gates. One of them is gathered into the place of the other's old values then,
          and with Adafactor MLP down too (heaps of Llama 3.1 8B with Lion and Mistral Nemo 12B with Adafactor, data=8).
        * Where the updates do not hide the gathers (`updates_before_gathers`), all are over when most gathers start, into the places of old
          parameters where one of the size is free. Buffers of their own have a table, queries and keys, and two stacks of the MLP; its
          stacks wait (heaps of Llama 2 13B, 3.1 8B and Qwen2.5 7B over data and fsdp).
        """
        local, state, kind = self.local, self.local.of_state, self.local.config.optimizer.kind
        size, table = local.parameter_itemsize, 4 * local.table // state.fsdp
        several = self.combined and local.fsdp * local.tensor > 1
        in_place = 0 if local.model.tie_embeddings else local.table // local.fsdp
        gathered = (local.trained - in_place) * size
        of_mlp = (3 if local.model.gated_mlp else 2) * local.mlp_matrices // state.fsdp
        moments = optimizer_state(state)[0] * local.mlp_matrices // state.fsdp // state.trained
        itemsize = local.gradient_itemsize if self.in_loop else self.stack_itemsize
        waiting = itemsize if self._hides_gathers or not several else max(itemsize, size)
        shards, copies = state.trained * waiting, 2 * table
        if size < 4 and local.model.gated_mlp and not several:
            gathered -= (2 if kind == "adafactor" else 1) * local.mlp_matrices // local.fsdp * size
        if several and self.updates_before_gathers:
            heads = local.model.num_layers * local.out_matrix * (local.model.num_heads + local.model.kv_heads) // local.model.num_heads
            heads //= local.fsdp
            gathered = (local.table // local.fsdp + heads + 2 * local.mlp_matrices // local.fsdp) * size
            shards, moments, copies = of_mlp * size, 0, 0
        elif kind == "adafactor":
            gathered -= in_place * size if several else 0
            shards, moments = of_mlp * size if several else 0, 0
        elif not several:
            late = kind != "adamw" or size < 4
            shards = local.all_turned_matrices // state.fsdp * itemsize if late else 0
            copies += ((2 if kind == "adamw" else 1) * table) if late else 0
            moments *= 2 if kind == "adamw" and size < 4 and local.model.gated_mlp else 1
        elif kind == "adamw":
            # within a node gathers are short: the new moments are copied into their place while earlier ones are in flight
            moments *= int(local.devices > TENSOR) if size == 4 else 2 if local.model.gated_mlp else 1
            gathered += in_place * size if size < 4 else 0  # as close as known to the heap of Qwen2.5 32B (data=2, tensor=8)
        else:
            moments = 0
        return {
            "gradients": Component(shards, "gradients that the update still reads, and updated parameters that are gathered"),
            "parameter_copies": Component(
                copies + gathered + moments,
                "transposes between the layouts of gradients and parameters; updated parameters, gathered over data"
                + ("; new moments of MLP gate and up, which one kernel computes" if moments else ""),
            ),
        }

    @property
    def updates_before_gathers(self) -> bool:
        """Whether the updates of dense layers' float32 parameters end before most of their gathers over data start.

        On Hopper the update of a stack hides gathers of others, so that old parameters are needed until the last gather starts; with
        faster memory it is too short for it, and by constants it counts nothing (heaps for A100, B200 and GB200 with data=4). Not over two
        devices of data, for a reason that is not known (heap of Qwen2.5 7B, data=2 x fsdp=4, on A100).
        """
        local = self.local
        plain = local.uniform_dense and local.config.optimizer.kind in ("adamw", "lion") and local.parameter_itemsize == 4
        return plain and not self._hides_gathers and local.fsdp > 1 and local.data > 2

    @property
    def _hides_gathers(self) -> bool:
        """Whether updates of parameters hide gathers over data: on Hopper (`updates_before_gathers`)."""
        return self.program.measured_matmuls and self.program.transposes_float8

    def orthogonalization(self) -> dict[str, Component]:
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
