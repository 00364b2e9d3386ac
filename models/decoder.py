"""The decoder: embedding, scanned blocks, final norm. The unembedding belongs to the loss, which never forms whole logits.

Legend: B batch, T sequence, D embed width, V vocabulary rows (padded), L layers.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.configs.schema import ComputeConfig, ModelConfig, PrecisionConfig
from ridgeline.models import block_scaled, fp8
from ridgeline.models.attention.layer import RotaryTable
from ridgeline.models.embedding import embed
from ridgeline.models.family import Family
from ridgeline.models.norms import NORMS
from ridgeline.models.params import ParamFactory
from ridgeline.models.product import platform_of
from ridgeline.models.projection import Path, Projector, largest_of_layers, tell_largest
from ridgeline.models.remat import Remat
from ridgeline.models.ring import RingProjector
from ridgeline.models.rope import rotary_table
from ridgeline.sharding.partition import Partitioner


class Decoder(nnx.Module):
    """A pre-norm decoder-only transformer."""

    def __init__(
        self,
        family: Family,
        model: ModelConfig,
        compute: ComputeConfig,
        precision: PrecisionConfig,
        partitioner: Partitioner,
        rngs: nnx.Rngs,
        *,
        delayed: bool = False,
    ) -> None:
        make = ParamFactory(rngs, jnp.dtype(precision.params), row_shards=fp8.row_shards(partitioner) if delayed else None)
        eight_bit = precision.eight_bit
        if eight_bit:
            fp8.check_mesh(partitioner.mesh, precision.matmul)
        if precision.block_scaled is not None:
            block_scaled.check_mesh(partitioner, precision.block_scaled)
        platform = platform_of(partitioner)
        in_loop = compute.scan_layers and compute.scan_unroll < model.num_layers
        self.remat = replace(Remat.resolve(compute.remat, platform), in_loop=in_loop)
        in_rings = compute.tensor_overlap == "ring" and partitioner.mesh.shape["tensor"] > 1
        self.project = (RingProjector if in_rings else Projector)(
            partitioner,
            jnp.dtype(precision.compute),
            jnp.dtype(precision.gradients),
            eight_bit,
            precision.block_scaled,
            gather_once=self.remat.recomputes_blocks,
        )
        vocab, width = model.padded_vocab_size, model.embed_dim
        self.embedding = make.normal((vocab, width), ("vocab", "embed"), model.init_std)
        learned = model.position == "learned"
        self.position_embedding = make.normal((model.max_seq_len, width), ("positions", "embed"), model.init_std) if learned else None
        self.blocks = family.block(
            model, compute.attention, self.remat, platform, family.residual_std(model), make.stacked(model.num_layers), self.project
        )
        self.final_norm = NORMS[model.norm](width, model.norm_eps, make, partitioner)
        self.output = None if model.tie_embeddings else make.normal((width, vocab), ("embed", "vocab"), model.init_std)
        self.model = model
        self.scan_layers = compute.scan_layers
        self.scan_unroll = compute.scan_unroll

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array | None = None, segment_ids_BT: jax.Array | None = None) -> jax.Array:
        """Return the final-normed hidden states [B, T, D] in the compute dtype.

        tokens int32; positions int32, restarting at 0 in each segment (None: 0..T-1); segment_ids int32, 0 = padding (None: one document
        per row).
        """
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        x_BTD = self._run_blocks(self.embed(tokens_BT, positions_BT), self.rotary(positions_BT), segment_ids_BT)
        return self.normalise(x_BTD)

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Return the residual stream [B, T, D] before the first block."""
        partitioner = self.project.partitioner
        with jax.named_scope("embed"):
            x_BTD = embed(self.project, "vocab", self.embedding[...], tokens_BT)
            if self.position_embedding is not None:
                x_BTD += embed(self.project, "positions", self.position_embedding[...], positions_BT)
            return partitioner.constrain(x_BTD, "batch", "residual_seq", "act_embed")

    def rotary(self, positions_BT: jax.Array) -> RotaryTable | None:
        """Return the rotary table of the positions; None for a model with learned positions."""
        model = self.model
        return rotary_table(positions_BT, model.head_width, model.rope_theta, model.rope_scaling) if model.position == "rope" else None

    def normalise(self, x_BTD: jax.Array) -> jax.Array:
        """Return the final-normed residual stream."""
        return self.project.partitioner.constrain(self.final_norm(x_BTD), "batch", "residual_seq", "act_embed")

    def unembedding(self) -> jax.Array:
        """Return the output projection [D, V] as it lies, in the parameter dtype; the loss casts and gathers it."""
        return self.embedding[...].T if self.output is None else self.output[...]

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return float32 logits [B, T, vocab_size] of hidden states; for small uses (generation, parity), not for training."""
        with jax.named_scope("unembed"):
            x_BTD = self.project.partitioner.constrain(x_BTD, "batch", "seq", "act_embed")
            w_DV = self.project.partitioner.gather_param(self.unembedding().astype(x_BTD.dtype), "embed", "vocab")
            return jnp.einsum("btd,dv->btv", x_BTD, w_DV, preferred_element_type=jnp.float32)[..., : self.model.vocab_size]

    def _run_blocks(self, x_BTD: jax.Array, rotary: RotaryTable | None, segment_ids_BT: jax.Array | None) -> jax.Array:
        structure, stacked = nnx.split(self.blocks)

        largest = largest_of_layers(stacked) if self.project.eight_bit_weights else {}

        def block(x_BTD: jax.Array, layer: tuple[nnx.State, dict[Path, jax.Array]]) -> jax.Array:
            block = nnx.merge(structure, layer[0])
            tell_largest(block, layer[1])
            out_BTD: jax.Array = block(x_BTD, rotary, segment_ids_BT)
            return out_BTD

        block = self.remat.wrap_block(block)
        if self.scan_layers:
            layers = (stacked, largest)
            return jax.lax.scan(lambda x_BTD, layer: (block(x_BTD, layer), None), x_BTD, layers, unroll=self.scan_unroll)[0]
        for index in range(self.model.num_layers):
            x_BTD = block(x_BTD, jax.tree.map(lambda stack, at=index: stack[at], (stacked, largest)))
        return x_BTD
