"""Memory of one device at each point of a training step where it can peak, as components in bytes (see planner/memory.py).

`overlap` is how the step is compiled for GPUs (JAX_OPTIMIZATION_LEVEL=O1): while a layer runs, the latency-hiding scheduler gathers the
weights of the next layer and reduces the gradients of the previous one, for which it unrolls loops over layers by two. Without it (XLA's
default flags) collectives are not overlapped, and memory is lower.

Legend: R rows per device, T sequence, D width, F MLP width, N heads, L layers, C tokens of a loss chunk; f, t devices on fsdp and tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.planner import block_scaled, constant_costs, expert_layers, ordered_experts
from ridgeline.planner.activations import (
    Component,
    attention_workspace,
    offloads_inputs,
    relaid_bytes,
    saved_arrays,
)
from ridgeline.planner.after_layers import AfterLayers
from ridgeline.planner.first_experts import FirstExperts
from ridgeline.planner.in_loss import InLoss
from ridgeline.planner.layer_peak import STREAMS_IN_FLIGHT
from ridgeline.planner.recompute import FROM_BLOCK_INPUTS

Components = dict[str, Component]


@dataclass(frozen=True)
class StepMemory(InLoss, AfterLayers, FirstExperts):
    """What is live at each point of a step of these sizes."""

    def points(self) -> dict[str, Components]:
        """Return the components at each point, in the order of the step."""
        points = {
            **self.forward(),
            **self.copies_of_gates(),
            "loss": self.loss(),
            "start of the backward pass": self.start_of_backward(),
            "backward pass": self.backward(late=self.overlap),
            **({} if self.local.adapted else {"embedding gradient": self.embedding_gradient()}),
            "optimizer": self.optimizer(),
        }
        points |= self.first_experts(points)
        if self.overlap:
            points["end of the backward pass"] = self.end_of_backward()
        if self.combined and self.local.fsdp > 1:
            points["last layer of the backward pass"] = self.last_layer()
            if self.reduces_at_end:
                points["reductions after the layers"] = self.reductions_after_layers()
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

    def start_of_backward(self) -> Components:
        """Return what is live in the backward pass of the last layer, which comes first, while XLA copies a stack that it kept.

        Where the layers of a turn wait for each other's gradients, the unembedding's is reduced while the first of them is recomputed; the
        gathered tokens of a layer's experts and the gathered input of its attention are live for longer. It is reduced as early where
        layers with few tokens for their experts reduce their gradients (heaps of Qwen3 30B over context).
        """
        local = self.local
        if self.turn.in_order:
            return self._start_in_order()
        if self.defers:
            return self.backward(layers=self.turn.delayed_at_start)
        relaid = relaid_bytes(local, self.backend, self.overlap)
        turn_waits = self.turn.layers > 1 and self.waits
        delayed = self.delayed_block_scaled() + (local.slot_bytes + local.stream_bytes if turn_waits else 0)
        delayed += self.next_attention() + self.next_input()
        start = self.backward(relaid=relaid, layers=self.turn.delayed_at_start, delayed=delayed)
        first_late = self.in_loop and self.next_attention() and local.config.compute.remat.policy == "full"
        if first_late or (delayed and block_scaled.applies(local)):
            start |= {"gradients": Component(self.early_table(), "none yet: those of the first layers are delayed")}
        early = turn_waits or (self.turn.layers > 1 and local.saves_first and local.ring)
        early |= self.delays_experts and not local.ties_weight_gradients
        return start | ({"loss": self.reduced_early()} if early and self.reduces_in_turn and self.reduces_table_early else {})

    def next_input(self) -> int:
        """Return the bytes of the next layer's input of attention, gathered over tensor, and its shard.

        They are there in the layer that comes first: where values within blocks are in host memory, nothing waits for a gradient. (Heaps of
        Llama 2 13B and Qwen3 1.7B.)
        """
        local, config = self.local, self.local.config
        plain = local.uniform_dense and config.precision.matmul == "compute" and config.compute.tensor_overlap == "gather"
        fetches = config.compute.remat.offloads and not offloads_inputs(local) and local.model.norm_position == "pre"
        return local.stream_bytes + local.cut_stream_bytes if self.overlap and local.tensor > 1 and plain and fetches else 0

    def next_attention(self) -> int:
        """Return the bytes of the next layer's attention that are recomputed while the last layer, which is not in the loop, runs.

        So where there is nothing to gather, but gradients are reduced, and whole blocks are recomputed. With one microbatch: the inputs of
        attention and MLP, queries and keys with and without rotation, values, the result, and attention's update (heap of Llama 3.2 3B,
        data=8, `full`). In a loop of microbatches: of both layers queries, keys, values and the result, with norms of queries and keys also
        their inputs, in place of one stream (heaps of Llama 3.2 1B and 3B, Qwen3 1.7B and Mistral Nemo 12B over data=8).
        """
        local, remat = self.local, self.local.config.compute.remat
        several = self.turn.layers > 1 or self.turn.in_order
        plain = not several and not local.latent_bytes and not local.adapted and local.model.moe is None and local.context == 1
        again = remat.policy == "full" or offloads_inputs(local)
        if not (self.recomputes_early and plain and again) or constant_costs.recomputes_late(local, self.program):
            return 0
        query, key, stream = local.query_bytes, local.key_bytes, local.stream_bytes
        if not self.in_loop:
            return 3 * (stream + query + key) + (2 * (query + key) if local.model.qk_norm and offloads_inputs(local) else 0)
        return 4 * (query + key) - stream + (2 * query + 4 * key if local.model.qk_norm else 0)

    def _start_in_order(self) -> Components:
        """Return what is live in the first layers of the backward pass of ordered turns, which are not in the loop.

        What the last turn kept is not in the stacks yet, but over tensor (planner/recompute.py: saves_first). Where inputs of matmuls are
        computed from the block's, the second layer needs most, in which what two layers kept is freed. Layers left over after the last
        whole turn are these first ones: there are no stacks of gradients yet, and what one of them kept is freed over tensor too (heaps of
        Gemma 3 4B).
        """
        layers, left_over = self.local.model.num_layers, self.turn.left_over
        second_layer = self.local.config.compute.remat.policy in FROM_BLOCK_INPUTS
        first = self.backward(layers=int(second_layer))
        freed = int(left_over > 0) if self.local.saves_first else 2
        stays = self.turn.not_stacked(self.saved.bytes) + self.turn.not_yet_offloaded()
        stays -= freed * self.saved.bytes // layers if second_layer else 0
        first |= {"activations": replace(self.saved, bytes=self.saved.bytes + stays)}
        of_turn = {"gradients": Component(first["gradients"].bytes * self.local.model.layer_period // layers, "of a turn: no stacks yet")}
        within_experts = ordered_experts.applies(self) and not expert_layers.fetches_within_layers(self.local)
        return first | (of_turn if left_over or self.scales_turns_apart or within_experts else {})

    def backward(
        self, *, relaid: int = 0, late: bool = False, layers: int | None = None, at_end: int = 0, delayed: int = 0, last: bool = False
    ) -> Components:
        """Return what is live in the backward pass of a layer: in its MLP, in its attention or at its end, whichever is most.

        relaid: bytes of a saved value that is copied to another layout. late: gradients of the previous layer are still being reduced.
        layers: at the start, those whose weight gradients are computed together, or in order are pending; None: those of a turn. at_end:
        further bytes at the end of the layer. delayed: of other layers' later weight gradients. last: no next layer is gathered.
        """
        local = self.local
        at_start = layers is not None
        together = layers if layers is not None else 1 if self.turn.in_order else self.turn.delayed(1)
        # the input of the next layer's MLP is not gathered where it waits for a gradient; while a stack is copied that of the loss is there
        in_mlp = STREAMS_IN_FLIGHT - int(self.waits and local.tensor > 1 and not relaid)
        cotangent = 4 * local.tokens * local.model.embed_dim // local.tensor
        gradients = self.layer_gradients * self.stack_itemsize
        next_layer = self.next_layer_weights() if self.overlap and not last else 0
        if next_layer and self.turn.in_order and at_start:
            next_layer = self.gathered_layer()
        where, hidden, streams, copies, waiting, workspace = self.peak_in_layer(together, at_end, in_mlp, next_layer, at_start=at_start)
        copies += self.turn.kept_parameters()
        waiting += self.turn.gradients_left_over()
        # the block's input comes from host memory into a buffer of its own
        streams += local.cut_stream_bytes * offloads_inputs(local) + self.outside.activations
        hidden += self.turn.slices_of_kept(self.saved.bytes)
        reducing = self.turn.trained_weights * local.gradient_itemsize if late and self.reduced else 0
        if reducing and (self.reduces_in_turn or self.scatters_scaled):
            reducing = 2 * reducing // self.sharded.fsdp  # the sums over fsdp, and together as they are summed over the other axes
        reducing += self.turned_gradients() if reducing and not self.scatters_scaled else 0
        apart = self.turn.in_order or self.defers or self.alike_gradients_first
        reducing = 0 if self.reduces_before_mlp or apart else reducing
        # with fsdp they are small, and the weights of the next turn are counted, of which those of a layer are gone
        written = local.fsdp == 1 or (self.turn.gathers_own and local.model.moe is not None)
        reducing += self.turn.reduced_gradients(self.sharded.fsdp) if self.reduced and written else 0
        early = late or self.alike_gradients_first
        left_over = self.turn.left_over if late and (self.turn.layers > 1 or self.turn.in_order) else 0  # their backward pass is over
        return {
            "activations": replace(self.saved, bytes=self.saved.bytes - left_over * self.saved.bytes // local.model.num_layers),
            "gradients": Component(
                gradients + self.early_table(),
                f"of the layers, {local.config.precision.params}, sharded as the parameters",
            ),
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(
                self.layout_copies() + copies + next_layer + self.outside.weights,
                "transposed parameters of MLP down and attention out; gathered weights"
                + (", also those of the next layer" if next_layer else ""),
            ),
            "working_activations": Component(
                hidden + streams + relaid + cotangent + delayed + self.final_norm(at_start=at_start) + block_scaled.constants(local),
                f"backward pass of one layer, with its peak in {where}"
                + ("; one saved value of all layers in another layout" if relaid else ""),
            ),
            "attention_workspace": Component(workspace, attention_workspace(local, self.backend).assumption),
            "loss": self.reduced_early() if early and self.reduces_table_early else self.unembedding_gradient(),
            "collective_buffers": Component(
                waiting + reducing,
                f"unsharded {local.config.precision.gradients} gradients of a layer before their reduction"
                + (", and those of the previous layer" if reducing else ""),
            ),
        }

    def last_layer(self) -> Components:
        """Return what is live in the backward pass of the first layer, which comes last.

        XLA takes it out of the loop over layers and gathers nothing for a next one. What the MLPs saved is freed before. At its end the
        gradients of both tables have been reduced. Nothing in it needs the reduced gradients of the layer before: with block inputs from
        host memory, which leave no stack that would be freed here, these still wait at its peak.
        """
        local = self.local
        tables = 0 if local.adapted else 2 * local.table // self.sharded.fsdp * local.gradient_itemsize
        point = self.backward(at_end=self.turned_gradients() + tables, last=True)
        mlp = sum(
            layers * count * size
            for layers, kind in local.layer_kinds
            for count, size in saved_arrays(kind, self.backend)
            if size == kind.hidden_bytes
        )
        kept = Component(self.saved.bytes - mlp, "of attention, and inputs of the blocks; those of the MLPs are freed")
        if self.turn.in_order and local.model.moe is None and local.config.compute.remat.policy in ("full", "offload"):
            kept = Component(self.turn.last_stacks(self.saved.bytes), "inputs of the blocks of the layers of a turn that are left")
        collectives = point["collective_buffers"]
        alike = self.turn.layers == 1 and not (ordered_experts.applies(self) or self.alike_gradients_first or self.reduces_in_turn)
        if offloads_inputs(local) and self.reduced and alike:
            before = local.gathered_trained_weights * local.gradient_itemsize
            collectives = Component(collectives.bytes + before, f"{collectives.assumption}, and those of the layer before")
        if (remat := local.config.compute.remat).policy == "names" and "attention_out" in remat.names:
            # attention's update is read before the MLP, and is freed with those of the MLPs
            kept = Component(kept.bytes - local.model.num_layers * local.cut_stream_bytes, kept.assumption)
        early = self.turn.layers > 1 or self.scatters_scaled or self.reduces_in_order
        return point | {
            "activations": kept,
            "loss": self.reduced_early() if early and self.reduces_table_early else point["loss"],
            "collective_buffers": collectives,
        }
