"""Memory of one device in the loss: what the layers kept, a chunk of logits, and what XLA computes early or keeps for later."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner import block_scaled, narrow_experts, ordered_experts
from ridgeline.planner.activations import NODE_DEVICES, Component, mask_bytes, offloaded_bytes, offloads_inputs
from ridgeline.planner.experts_peak import MUCH_PER_TOKEN
from ridgeline.planner.layer_peak import LayerPeak
from ridgeline.planner.live_buffers import DELAYED
from ridgeline.planner.recompute import recomputed, waiting


@dataclass(frozen=True)
class InLoss(LayerPeak):
    """What is live in the loss of a step of these sizes."""

    def loss(self) -> dict[str, Component]:
        """Return what is live in the loss: all saved activations and one chunk of logits."""
        local = self.local
        tokens, table, vocab = local.loss_chunk_tokens, local.table, local.model.padded_vocab_size // local.tensor
        teacher = 0 if local.config.distillation.weight is None else 4  # the gradient of the divergence in float32
        logits, gradient = tokens * vocab * (4 + local.compute_itemsize + teacher), 0 if local.adapted else 4 * table
        one_chunk = self.one_chunk and not self.in_loop
        if self.one_chunk:  # the float32 logits are gone when the table's gradient is computed
            later = tokens * vocab * local.compute_itemsize + (0 if self.delayed_logits else gradient)
            logits, gradient = max(logits, later), 0
        elif self.waits_for_host_over_tensor or self.keeps_over_tensor:
            # one chunk reads the sum that the one before wrote, when its float32 logits are gone
            logits, gradient = max(logits + gradient, tokens * vocab * local.compute_itemsize + 2 * gradient), 0
        policy = local.config.compute.remat.policy
        # XLA recomputes the attention of the last layer early: a norm, queries and keys with and without rotation, values and the result
        blocks_wait = waiting(local.config, local.tensor, local.expert) == "block"
        recomputes_early = self.overlap and policy == "full" and not blocks_wait
        early = local.stream_bytes + 3 * local.query_bytes + 3 * local.key_bytes if recomputes_early else 0
        if self.turn.in_loss and policy == "full":  # of all layers of the last turn, and gate and up of the last layer
            early = self.turn.layers * early + (2 if local.model.gated_mlp else 1) * local.hidden_bytes
        elif recomputes_early and self.in_loop and self.combined and recomputed(local.model, local.config.compute.remat).mlp_update:
            # One microbatch: gate and up run after the loss, beside the sum of the loss over devices, which all gradients need.
            early += (2 if local.model.gated_mlp else 1) * local.hidden_bytes
        early += self.turn.not_stacked(self.saved.bytes) + self.turn.rotary_tables() + self.last_not_stacked
        if self.waits_for_host_over_tensor and local.fsdp > 1:
            # its input, that as it is normed or attention's update, queries, keys and attention's result
            early += 2 * local.cut_stream_bytes + local.query_bytes + local.key_bytes + local.context_bytes
        if self.turn.layers > 1 or self.turn.in_order:
            early += self.turn.of_offload_in_loss(one_chunk, self.backend) if policy == "offload" and not self.turn.all_in_loops else 0
        # Of frozen layers XLA gathers two turns early: no gradients wait for their reduction meanwhile.
        # Where the backward pass waits for what was saved, beside the last chunk alone.
        turns = 0 if local.saves_first and not self.one_chunk else self.turn.in_loss
        layers = 2 * self.turn.layers if local.adapted else turns * self.turn.layers + 1
        # Of layers in order that gather their tokens over expert, of two (heaps of gpt-oss).
        layers += ordered_experts.applies(self) and ordered_experts.gathers_tokens(local) and policy != "offload"
        if policy == "offload" and self.turn.layers > 1 and not self.in_loop:
            layers = int(one_chunk)  # the recomputation waits for the copies from host memory
        if self.turn.all_in_loops:
            layers = 0
        gathered = layers * self.gathered_layer() if self.overlap and not (self.keeps_over_tensor or self.copies_to_host) else 0
        if self.copies_to_host:
            early += offloaded_bytes(local) // local.model.num_layers + (0 if self.program.adds_bfloat16 else local.stream_bytes)
        if self.scales_turns_apart:
            layers = DELAYED * local.model.layer_period if local.config.precision.block_scaled == "nvfp4" else 0
            gathered = layers * block_scaled.scaled(local, self.gathered_layer())
        return {
            "activations": self.saved,
            "parameter_copies": Component(
                (self.turn.cut_before_layers() or self.layout_copies() + self.turn.kept_parameters()) + gathered,
                "transposed parameters of MLP down and attention out"
                + (", and the gathered weights of the last " + ("layer" if layers == 1 else f"{layers} layers") if gathered else ""),
            ),
            "gradients": Component(
                self._zeroed_early() * self.stack_itemsize,
                "gradient buffers that are zeroed before the loss, long before they are filled",
            ),
            "accumulated_gradients": self.accumulated(),
            "attention_workspace": Component(
                mask_bytes(local, self.backend),
                "mask of packed documents",
            ),
            "working_activations": Component(
                (2 if self.keeps_over_tensor else 3) * local.heads * local.stream_bytes
                + local.cut_stream_bytes
                + early
                + block_scaled.constants(local),
                "final hidden states, their gradient and the last block's output"
                + ("; values on their way to host memory" if self.copies_to_host else "")
                + ("; attention of the last layer, recomputed" if early and not self.copies_to_host else ""),
            ),
            "loss": Component(
                logits + local.compute_itemsize * table + gradient + (0 if self.delayed_logits else self.half_reduced_table()),
                f"logits of {tokens:,} tokens in float32 and their gradient, the gathered unembedding"
                + ("" if local.adapted else " and its unsharded float32 gradient"),
            ),
        }

    def forward(self) -> dict[str, dict[str, Component]]:
        """Return the point in the forward pass of turns of layers with experts and few tokens, whose inputs go to host memory; none: it is
        not the peak.

        Nothing in it needs the gradients of the unembedding and, with one microbatch, the stacks of those of the layers, but they are
        zeroed already, and the unembedding is gathered (heaps of Llama 4 Scout).
        """
        local, model = self.local, self.local.model
        few = self.gathered_layer() > MUCH_PER_TOKEN * local.tokens
        if not (self.turn.gathers_own and self.combined and model.moe is not None and few and offloads_inputs(local)):
            return {}
        in_layer = (2 if model.gated_mlp else 1) * local.hidden_bytes + local.row_bytes + 3 * local.stream_bytes
        return {
            "forward pass": {
                "activations": self.saved,
                "gradients": Component(0 if self.in_loop else self.layer_gradients * self.stack_itemsize, "of the layers, zeroed early"),
                "accumulated_gradients": self.accumulated(),
                "parameter_copies": Component(
                    self.layout_copies() + 2 * self.gathered_layer(),
                    "transposed parameters of MLP down and attention out; gathered weights, also those of the next layer",
                ),
                "working_activations": Component(in_layer, "forward pass of one layer"),
                "loss": Component(
                    (4 + local.compute_itemsize) * local.table, "the gathered unembedding, and its gradient in float32, zeroed early"
                ),
            }
        }

    def copies_of_gates(self) -> dict[str, dict[str, Component]]:
        """Return the point where stacks of gate and up are copied to the layout in which the backward pass reads them; none: no copies.

        One after the other, when the forward pass of the layers is over (heaps of Mixtral and Qwen3 30B in fp8 and fp8_delayed).
        """
        copied = narrow_experts.copied_stack(self.local, self.backend) if self.overlap else 0
        if not copied:
            return {}
        copies = self.layout_copies() + self.gathered_layer() + self.local.compute_itemsize * self.local.table
        text = "transposed parameters of MLP down and attention out; gathered weights of the last layer, and the unembedding"
        point = {
            "activations": self.saved,
            "accumulated_gradients": self.accumulated(),
            "parameter_copies": Component(copies, text),
            "working_activations": Component(copied, "a saved value of all layers in another layout"),
        }
        return {"copies of gate and up": point}

    @property
    def copies_to_host(self) -> bool:
        """Whether the last of alike layers copies values within its block to host memory beside the loss.

        These values are on the device then, and its weights are gathered later, when some have come back. Where bfloat16 values are added
        in float32, the final hidden states are too, and in a loop of microbatches the stacks of gradients are zeroed (heaps of Mistral Nemo
        12B and Llama 3.2 3B on A100). So in 25 heaps of eight families, not over tensor.
        """
        local = self.local
        within = local.config.compute.remat.offloads and not offloads_inputs(local)
        return self.overlap and within and local.uniform_dense and local.tensor == 1 and local.config.precision.matmul == "compute"

    def _zeroed_early(self) -> int:
        """Return the elements of the gradient buffers that are zeroed before the loss; 0 where all are zeroed after it.

        By XLA's own thresholds of combining, the stacks of gradients that are converted later are zeroed after it. With trained experts all
        are (heaps of Mixtral, Qwen3 and gpt-oss; of DeepSeek with `full` and `dots`, not over tensor), and in ordered turns that recompute
        everything, or gate and up where layers are left over, which write no stacks (heaps of Gemma 2 and 3 and OLMo 3). Without fsdp all
        are in 15 of 17 heaps, not in two with mesh.zero_stage=2 over two devices of data; with full they are early over data alone, where
        the loss is not the peak. In turns that gather their own weights, and in alike layers whose weight gradients come first, all are.
        """
        local, policy = self.local, self.local.config.compute.remat.policy
        if not self.overlap:
            return (
                local.trained if local.adapted else (2 if local.model.gated_mlp else 1) * local.mlp_matrices // (local.fsdp // local.expert)
            )
        latent = local.model.latent_attention is not None and (local.tensor > 1 or policy not in ("full", "dots"))
        trains_experts = local.model.moe is not None and not local.adapted and not latent
        ordered = self.turn.in_order and not self.in_loop
        late = ordered and (policy == "full" or (policy == "names" and self.turn.left_over > 0))
        beside_copies = self.copies_to_host and self.in_loop and not self.program.adds_bfloat16
        late |= (policy == "offload" and not beside_copies) or local.fsdp == 1 or trains_experts or self.scales_turns_apart
        late |= self.turn.gathers_own or self.alike_gradients_first or (self.keeps_over_tensor and not self._sums_loss_at_once)
        if late or not (self.combined or local.gradient_itemsize == self.stack_itemsize):
            return 0
        return self.sharded.trained if local.adapted else self.sharded.layer_matrices

    @property
    def last_not_stacked(self) -> int:
        """Bytes of what the last of alike layers kept, where that is all of its block: it is not in the stacks beside a loop over chunks.

        XLA takes the last layer out of the loop where that gathers weights of the next one. The writes into the stacks lead to no
        collective, and hide those of the backward pass (heaps of Llama 3, Qwen2.5 and Qwen3 over fsdp; not over tensor:
        planner/recompute.py, saves_first).
        """
        local, config = self.local, self.local.config
        kept = config.compute.remat.policy in ("none", "attention-only") and not config.precision.eight_bit
        gathers = self.overlap and self.combined and local.fsdp > 1 and local.pipeline * local.context == 1
        late = local.uniform_dense and kept and gathers and not self.one_chunk and not local.saves_first
        return self.saved.bytes // local.model.num_layers if late else 0

    @property
    def keeps_over_tensor(self) -> bool:
        """Whether layers that are `reads_kept_over_tensor` are sharded over fsdp too.

        As in `waits_for_host_over_tensor` the unembedding's gradient goes from one buffer to another. No weights are gathered for the
        backward pass yet, and the stacks of gradients are zeroed after the loss, while it is summed over devices.
        """
        return self.reads_kept_over_tensor and self.combined and self.local.fsdp > 1

    @property
    def _sums_loss_at_once(self) -> bool:
        """Whether the sum of the loss over the devices of a node, over tensor two, is over before stacks of gradients are zeroed."""
        local = self.local
        return local.tensor == 2 and local.data * local.fsdp * local.tensor <= NODE_DEVICES

    @property
    def scales_turns_apart(self) -> bool:
        """Whether ordered turns with block-scaled matmuls recompute nothing.

        The stacks of gradients begin after the turn that is outside of the loop. With nvfp4 nothing that its weights are gathered and
        quantized from depends on the loss: they are there in it (heaps of Gemma 2 9B and 2B on GB200; not so in that of OLMo 3 7B with
        mxfp8 on B200).
        """
        local = self.local
        ordered = self.turn.in_order and not self.turn.recomputes and local.config.precision.block_scaled is not None
        return ordered and local.fsdp > 1 and self.data == 1

    @property
    def waits_for_host_over_tensor(self) -> bool:
        """Whether the last of alike layers, over tensor, has its input from host memory: that is there in the loss.

        The loop over chunks of logits, which has sums over tensor in it, is unrolled by two, so that the unembedding's gradient goes from
        one buffer to another; attention of the last layer is computed again meanwhile (heaps of Llama 3.1 8B and 3.2 1B, Qwen2.5 14B,
        Mistral Nemo 12B; with few tokens they show in the whole step).
        """
        local = self.local
        gathers = local.tensor > 1 and local.config.compute.tensor_overlap == "gather" and local.pipeline == 1
        return self.overlap and gathers and local.uniform_dense and offloads_inputs(local)
