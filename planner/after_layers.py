"""Memory of one device after the backward pass of the layers: reductions of what waited, the embedding's gradient, the update."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner.activations import Component
from ridgeline.planner.live_buffers import LiveBuffers
from ridgeline.planner.local import muon_layers
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
        unembedding, operands = self.unembedding_gradient().bytes, 0
        waits = self.reduces_table_early or self.delayed_logits
        if self.delays_experts and not local.ties_weight_gradients and waits and not self.reduces_in_turn:
            # the embedding's gradient is computed before those of the last layer's experts, from what is left of their operands (heap of
            # Qwen3 30B with 2,048 tokens per device; not where layers reduce their gradients: heap of Mixtral over context); so is that of
            # the unembedding, where it waits for it (heap of Qwen3 235B with 1,024 tokens)
            unembedding = 4 * local.table if self.delayed_logits else self.reduced_early().bytes
            of_embedding, operands, together = True, 2 * (local.row_bytes + local.hidden_bytes), 2
        return {
            "activations": Component(inputs, "inputs of the blocks; activations of the MLPs are freed"),
            "gradients": Component(self.layer_gradients * self.stack_itemsize, "of the layers, sharded as the parameters"),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(self.layout_copies(), "transposed parameters of MLP down and attention out"),
            "working_activations": Component(operands, "inputs of weight gradients of experts"),
            "loss": Component(
                unembedding + (4 * local.table if of_embedding else 0),
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

        With mesh.zero_stage=2 the update reads shards of the parameters; without a loop of microbatches nothing else reads the transposed
        ones, and they are gone.
        """
        local = self.local
        copies = 0 if self.updates_shards and not self.in_loop else self.layout_copies()
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
        """Return what is live after the layers: unsharded gradients of embedding and unembedding, and a reduced one.

        A tied table has one sum of both, but where the unembedding's was reduced before the layers (heap of Gemma 3 12B with values in host
        memory). Over data alone, with mesh.zero_stage=2, the reduced one is scattered (heaps of Llama 3.1 8B, data=8).
        """
        local = self.local
        whole = 4 * local.table
        reduced = whole // (local.fsdp if local.fsdp > 1 else self.sharded.fsdp)
        one_sum = local.model.tie_embeddings and not local.config.compute.reduces_unembedding_first
        both = whole if one_sum else whole // local.fsdp
        gradients = self.layer_gradients * self.stack_itemsize
        return {
            "gradients": Component(gradients + both, "of the layers and of the unembedding"),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(self.layout_copies() if self.in_loop else 0, "transposed before the loop of microbatches"),
            "collective_buffers": Component(whole + reduced, "gradient of the embedding before and after its reduction"),
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
        if self.updates_shards:
            if not local.adapted:
                return self.gathers_update()
            gathered = local.trained * local.parameter_itemsize
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

    @property
    def updates_shards(self) -> bool:
        """Whether the update works on shards over data, and the updated parameters are gathered: mesh.zero_stage=2 with several devices."""
        return self.overlap and self.local.of_state.fsdp > self.local.fsdp

    def gathers_update(self) -> dict[str, Component]:
        """Return what is live in the update with mesh.zero_stage=2, where updated parameters are gathered over data.

        They are gathered in turn (trainer/step.py), each into a buffer of its own, from where it is transposed into its place. The largest
        are the stacks of the MLP, or a table. When the first of them is gathered, two are updated, of one of which the gradient is gone;
        Adafactor, which needs means of a parameter before it is updated, has updated that one alone; so where their state comes from host
        memory one by one. With microbatches in a loop the kernel that updates MLP down has one result more.

        Parameters of 16 bits, and without a loop those with 8-bit moments, are updated before the first gather, all but one. In a loop the
        kernels that round the stacks of the MLP write each in float32 too, one fewer where the gradients have float32, as long as all
        gradients are there (heaps of Qwen2.5 32B, data=2 x tensor=8, and Llama 3.1 8B, data=8).
        """
        local, state, size = self.local, self.local.of_state, self.local.parameter_itemsize
        factored = local.config.optimizer.kind == "adafactor"
        largest = max(local.mlp_matrices, local.table)
        gathered, shard = largest // local.fsdp * size, largest // state.fsdp
        itemsize = local.gradient_itemsize if self.in_loop else self.stack_itemsize
        gradients = state.trained * itemsize
        if size < 4 or (local.config.precision.moments == "int8" and not self.in_loop):
            updated = (state.trained - shard) * size
            stack, stacks = local.mlp_matrices // state.fsdp, 3 if local.model.gated_mlp else 2
            rounded = (stacks * (4 + size) - (4 if itemsize == 4 else 0)) * stack if self.in_loop and not factored else 0
            if rounded and gradients + rounded > gathered + updated:
                gathered, updated = 0, rounded
            else:
                gradients = 0
        else:
            alone = factored or local.config.optimizer.offload
            updated = (1 if alone else 3 if self.in_loop else 2) * 4 * shard
            gradients -= itemsize * shard
        return {
            "gradients": Component(gradients, "gradients that the update still reads"),
            "parameter_copies": Component(gathered + updated, "updated parameters, and the largest of them gathered over data"),
        }

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
