"""The decoder: embedding, scanned blocks, final norm. The unembedding belongs to the loss, which never forms the whole logits.

Legend: B batch, T sequence, D embed width, V vocabulary rows (padded).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.configs.schema import ModelConfig
from ridgeline.models.family import Family
from ridgeline.models.matmul import set_amax
from ridgeline.models.norms import NORMS
from ridgeline.models.parallelize import Execution
from ridgeline.models.params import ParamFactory
from ridgeline.models.rope import RotaryTable, rotary_table


class Decoder(nnx.Module):
    """A pre-norm decoder-only transformer."""

    def __init__(self, family: Family, model: ModelConfig, execution: Execution, make: ParamFactory) -> None:
        vocab, width = model.padded_vocab_size, model.embed_dim
        self.embedding = make.normal((vocab, width), ("vocab", "embed"), model.init_std)
        learned = model.position == "learned"
        self.position_embedding = make.normal((model.max_seq_len, width), ("positions", "embed"), model.init_std) if learned else None
        self.blocks = family.block(model, execution, family.residual_std(model), make.stacked(model.num_layers))
        self.final_norm = NORMS[model.norm](width, model.norm_eps, make, execution.partitioner)
        self.output = None if model.tie_embeddings else make.normal((width, vocab), ("embed", "vocab"), model.init_std)
        self.model = model
        self.execution = execution

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array | None = None, segment_ids_BT: jax.Array | None = None) -> jax.Array:
        """Return the final-normed hidden states [B, T, D] in the compute dtype.

        tokens int32; positions int32, restarting at 0 in each segment (None: 0..T-1); segment_ids int32, 0 = padding (None: one document
        per row).
        """
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        x_BTD = self._run_blocks(self.embed(tokens_BT, positions_BT), self.rotary(positions_BT), segment_ids_BT)
        return self.normalize(x_BTD)

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Return the residual stream [B, T, D] before the first block."""
        matmul = self.execution.matmul
        with jax.named_scope("embed"):
            x_BTD = matmul.look_up(self.embedding, tokens_BT)
            if self.position_embedding is not None:
                x_BTD += matmul.look_up(self.position_embedding, positions_BT)
            return self.execution.partitioner.constrain(x_BTD, "batch", "residual_seq", "act_embed")

    def rotary(self, positions_BT: jax.Array) -> RotaryTable | None:
        """Return the rotary table of the positions; None for a model with learned positions."""
        model = self.model
        return rotary_table(positions_BT, model.head_width, model.rope_theta, model.rope_scaling) if model.position == "rope" else None

    def normalize(self, x_BTD: jax.Array) -> jax.Array:
        """Return the final-normed residual stream."""
        return self.execution.partitioner.constrain(self.final_norm(x_BTD), "batch", "residual_seq", "act_embed")

    def unembedding(self) -> jax.Array:
        """Return the stored (sharded) output projection [D, V] in the parameter dtype; the loss casts and gathers it."""
        return self.embedding[...].T if self.output is None else self.output[...]

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return float32 logits [B, T, vocab_size] of hidden states. For generation and parity tests; training uses loss.py."""
        partitioner = self.execution.partitioner
        with jax.named_scope("unembed"):
            x_BTD = partitioner.constrain(x_BTD, "batch", "seq", "act_embed")
            w_DV = partitioner.gather_param(self.unembedding().astype(x_BTD.dtype), "embed", "vocab")
            return jnp.einsum("btd,dv->btv", x_BTD, w_DV, preferred_element_type=jnp.float32)[..., : self.model.vocab_size]

    def _run_blocks(self, x_BTD: jax.Array, rotary: RotaryTable | None, segment_ids_BT: jax.Array | None) -> jax.Array:
        structure, stacked = nnx.split(self.blocks)
        layers = (stacked, self.execution.matmul.amax_of_layers(stacked))

        def block(x_BTD: jax.Array, layer: tuple[nnx.State, dict[tuple[str, ...], jax.Array]]) -> jax.Array:
            parameters, amax = layer
            block = nnx.merge(structure, parameters)
            set_amax(block, amax)
            out_BTD: jax.Array = block(x_BTD, rotary, segment_ids_BT)
            return out_BTD

        block = self.execution.remat.wrap_block(block)
        if self.execution.scan_layers:
            scanned = jax.lax.scan(lambda x_BTD, layer: (block(x_BTD, layer), None), x_BTD, layers, unroll=self.execution.scan_unroll)
            return scanned[0]
        for index in range(self.model.num_layers):
            x_BTD = block(x_BTD, jax.tree.map(lambda stack, at=index: stack[at], layers))
        return x_BTD
