"""The decoder: embedding, scanned blocks, final norm. The unembedding belongs to the loss, which never forms the whole logits.

Legend: B batch, T sequence, D embed width, V vocabulary rows (padded).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.attention.masks import soft_cap
from ridgeline.models.block import Block
from ridgeline.models.family import Family
from ridgeline.models.lora import set_dropout
from ridgeline.models.matmul import set_amax
from ridgeline.models.moe.layer import router_sums
from ridgeline.models.moe.router import RouterSums, RouterTotals
from ridgeline.models.norms import NORMS
from ridgeline.models.parallelize import Execution
from ridgeline.models.params import ParamFactory
from ridgeline.models.rope import RotaryTable, rotary_table


class Decoder(nnx.Module):
    """A decoder-only transformer."""

    def __init__(self, family: Family, model: ModelConfig, execution: Execution, make: ParamFactory) -> None:
        vocab, width = model.padded_vocab_size, model.embed_dim
        self.embedding = make.normal((vocab, width), ("vocab", "embed"), model.init_std)
        learned = model.position == "learned"
        self.position_embedding = make.normal((model.max_seq_len, width), ("positions", "embed"), model.init_std) if learned else None
        dense = model.dense_layers if model.moe else 0
        residual_std = family.residual_std(model) / math.sqrt(model.width_ratio)
        self.dense_blocks = family.block(model.without_experts(), execution, residual_std, make.stacked(dense)) if dense else None
        self.blocks = family.block(model, execution, residual_std, make.stacked(model.num_layers - dense))
        self.final_norm = NORMS[model.norm](width, model.norm_eps, make, execution.partitioner)
        self.output = None if model.tie_embeddings else make.normal((width, vocab), ("embed", "vocab"), model.init_std)
        self.model = model
        self.execution = execution

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array | None = None, segment_ids_BT: jax.Array | None = None) -> jax.Array:
        """Return the final-normed hidden states [B, T, D] in the compute dtype.

        tokens int32; positions int32, restarting at 0 in each segment (None: 0..T-1); segment_ids int32, 0 = padding (None: one document
        per row).
        """
        return self.forward(tokens_BT, positions_BT, segment_ids_BT)[0]

    def forward(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterTotals | None]:
        """Return the final-normed hidden states [B, T, D], and the totals of the routers (None: no experts); arguments as `__call__`.

        dropout_key: for the dropout of adapters; None: no dropout.
        """
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        x_BTD, sums, layer = self.embed(tokens_BT, positions_BT), None, 0
        for blocks in self.stacks:
            x_BTD, sums = self.run_blocks(blocks, layer, x_BTD, positions_BT, segment_ids_BT, dropout_key)
            layer += num_layers_of(blocks)
        return self.normalize(x_BTD), None if sums is None else RouterTotals.of(sums, tokens_BT.shape[1])

    @property
    def stacks(self) -> list[Block]:
        """The stacks of equal blocks, in order: dense ones before those with experts."""
        return [self.blocks] if self.dense_blocks is None else [self.dense_blocks, self.blocks]

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Return the residual stream [B, T, D] before the first block."""
        matmul = self.execution.matmul
        with jax.named_scope("embed"):
            x_BTD = matmul.look_up(self.embedding, tokens_BT)
            if self.model.scale_embeddings:
                x_BTD *= jnp.asarray(self.model.embedding_scale, x_BTD.dtype)
            if self.position_embedding is not None:
                x_BTD += matmul.look_up(self.position_embedding, positions_BT)
            return self.execution.partitioner.constrain(x_BTD, "batch", "residual_seq", "act_embed")

    def rotary(self, positions_BT: jax.Array, *, windowed: bool) -> RotaryTable | None:
        """Return the rotary table of the positions, for layers with or without the window; None for a model with learned positions."""
        model = self.model
        if model.position != "rope":
            return None
        if windowed and model.local_rope_theta is not None:
            return rotary_table(positions_BT, model.rotary_dims, model.local_rope_theta, None)
        return rotary_table(positions_BT, model.rotary_dims, model.rope_theta, model.rope_scaling)

    def normalize(self, x_BTD: jax.Array) -> jax.Array:
        """Return the final-normed residual stream, with muP divided by the width ratio: so are the logits."""
        x_BTD = self.final_norm(x_BTD)
        if self.model.width_ratio != 1:
            x_BTD = (x_BTD.astype(jnp.float32) / self.model.width_ratio).astype(x_BTD.dtype)
        return self.execution.partitioner.constrain(x_BTD, "batch", "residual_seq", "act_embed")

    def unembedding(self) -> jax.Array:
        """Return the stored (sharded) output projection [D, V] in the parameter dtype; the loss casts and gathers it."""
        return self.embedding[...].T if self.output is None else self.output[...]

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return float32 logits [B, T, vocab_size] of hidden states. For generation and parity tests; training uses loss.py."""
        partitioner = self.execution.partitioner
        with jax.named_scope("unembed"):
            x_BTD = partitioner.constrain(x_BTD, "batch", "seq", "act_embed")
            w_DV = partitioner.gather_param(self.unembedding().astype(x_BTD.dtype), "embed", "vocab")
            logits_BTV = jnp.einsum("btd,dv->btv", x_BTD, w_DV, preferred_element_type=jnp.float32)[..., : self.model.vocab_size]
            return soft_cap(logits_BTV, self.model.logit_softcap)

    def run_blocks(
        self,
        blocks: Block,
        first: int,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterSums | None]:
        """Run a stack, whose first layer is layer `first`. A scan runs whole periods of the kinds of layers; the rest follows it."""
        model, execution = self.model, self.execution
        structure, stacked = nnx.split(blocks)
        count = num_layers_of(blocks)
        keys = None if dropout_key is None else jax.random.split(jax.random.fold_in(dropout_key, first), count)
        layers = stacked, execution.matmul.amax_of_layers(stacked), keys
        kinds = [model.windowed(first + layer) for layer in range(count)]
        tables = {windowed: self.rotary(positions_BT, windowed=windowed) for windowed in sorted(set(kinds))}

        def block_of(windowed: bool, at: int | None = None) -> Callable[[jax.Array, Any], tuple[jax.Array, RouterSums | None]]:
            """Return the function of a layer. `at`: its index in a stack that is passed instead of the layer; it is chosen within what is
            recomputed, or a copy of its parameters would be kept for the backward pass."""

            def attend_everywhere(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
                return execution.attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N, windowed=False)

            def block(
                x_BTD: jax.Array, layer: tuple[nnx.State, dict[tuple[str, ...], jax.Array], jax.Array | None]
            ) -> tuple[jax.Array, RouterSums | None]:
                parameters, amax, key = layer if at is None else jax.tree.map(lambda stack: stack[at], layer)
                block = nnx.merge(structure, parameters)
                set_amax(block, amax)
                set_dropout(block, key)
                attend_with = attend_everywhere if model.sliding_window is not None and not windowed else None
                out_BTD: jax.Array = block(x_BTD, tables[windowed], segment_ids_BT, attend_with)
                return out_BTD, router_sums(block)

            return execution.remat.wrap_block(block)

        run, period = {windowed: block_of(windowed) for windowed in tables}, model.layer_period
        whole = count // period * period if execution.scan_layers else 0
        sums: list[RouterSums | None] = []  # of one or several layers, stacked
        if whole:
            turn = [run[kinds[0]]] if period == 1 else [block_of(kinds[at], at) for at in range(period)]

            def body(x_BTD: jax.Array, layers: Any) -> tuple[jax.Array, RouterSums | None]:
                found = []
                for block in turn:
                    x_BTD, of_layer = block(x_BTD, layers)
                    found.append(of_layer)
                return x_BTD, found[0] if period == 1 else jax.tree.map(lambda *each: jnp.stack(each), *found)

            def periods(stack: jax.Array) -> jax.Array:
                return stack if period == 1 else stack[:whole].reshape(whole // period, period, *stack.shape[1:])

            x_BTD, scanned = jax.lax.scan(body, x_BTD, jax.tree.map(periods, layers), unroll=-(-execution.scan_unroll // period))
            sums.append(scanned if period == 1 else jax.tree.map(lambda each: each.reshape(whole, *each.shape[2:]), scanned))
        for index in range(whole, count):
            x_BTD, of_layer = run[kinds[index]](x_BTD, jax.tree.map(lambda stack, at=index: stack[at], layers))
            sums.append(jax.tree.map(lambda each: each[None], of_layer))
        return x_BTD, sums[0] if len(sums) == 1 else jax.tree.map(lambda *each: jnp.concatenate(each), *sums)


def num_layers_of(blocks: Block) -> int:
    """Return the number of layers of a stack."""
    return int(jax.tree.leaves(nnx.state(blocks))[0].shape[0])
