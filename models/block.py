"""The default transformer block: attention and MLP (or experts) on a residual stream, with norms before them, after them or both.

Legend: B batch, T sequence, D embed width.
"""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.attention.latent import LatentSelfAttention
from ridgeline.models.attention.layer import AttendWith, Attention, RotaryTable
from ridgeline.models.beside_attention import BesideAttention
from ridgeline.models.deferred_gradients import HandOver
from ridgeline.models.mlp import MLP
from ridgeline.models.moe.layer import MixtureOfExperts
from ridgeline.models.moe.router import RouterSums
from ridgeline.models.norms import NORMS, Norm
from ridgeline.models.parallelize import Execution
from ridgeline.models.params import ParamFactory


class Block(nnx.Module):
    """x + post_norm(attention(norm(x))), then x + post_norm(mlp(norm(x))), with the norms of model.norm_position."""

    def __init__(self, model: ModelConfig, execution: Execution, residual_std: float, make: ParamFactory) -> None:
        def norm(*positions: str) -> Norm | None:
            wanted = model.norm_position in positions
            return NORMS[model.norm](model.embed_dim, model.norm_eps, make, execution.partitioner) if wanted else None

        self.attention_norm = norm("pre", "both")
        self.attention = (Attention if model.latent_attention is None else LatentSelfAttention)(model, execution, residual_std, make)
        self.attention_post_norm = norm("post", "both")
        self.mlp_norm = norm("pre", "both")
        self.mlp = (MLP if model.moe is None else MixtureOfExperts)(model, execution, residual_std, make)
        self.mlp_post_norm = norm("post", "both")
        self.partitioner, self.remat, self.execution = execution.partitioner, execution.remat, execution

    def __call__(
        self,
        x_BTD: jax.Array,
        rotary: RotaryTable | None,
        segment_ids_BT: jax.Array | None,
        attend_with: AttendWith | None = None,
        hand_over: HandOver | None = None,
    ) -> jax.Array:
        """Return the residual stream after the block.

        attend_with: as in `Attention`; hand_over: to the next layer, between attention and MLP, or while attention runs.
        """
        x_BTD = self._residual(x_BTD, "block_input")
        if self.execution.beside_attention and isinstance(self.mlp, MixtureOfExperts):
            attend = partial(self._attend, segment_ids_BT) if attend_with is None else attend_with
            attend_with, hand_over = BesideAttention(attend, self.mlp, hand_over), None
        with jax.named_scope("attention"):
            update_BTD = self.attention(x_BTD, self.attention_norm or _unchanged, rotary, segment_ids_BT, attend_with)
            x_BTD += (self.attention_post_norm or _unchanged)(self._residual(update_BTD, "attention_out"))
            if self.mlp_norm is None:  # gathered as it is; XLA would cut the residual stream out of that again
                x_BTD = self.partitioner.constrain(x_BTD, "batch", "residual_seq", "act_embed")
        x_BTD = x_BTD if hand_over is None else hand_over(x_BTD)
        x_BTD, sums = self.remat.wrap_mlp(self._add_mlp)(x_BTD)
        if isinstance(self.mlp, MixtureOfExperts):
            self.mlp.set_sums(sums)
        return x_BTD

    def _attend(
        self, segment_ids_BT: jax.Array | None, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, sinks_N: jax.Array | None
    ) -> jax.Array:
        return self.execution.attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N)

    def _add_mlp(self, x_BTD: jax.Array) -> tuple[jax.Array, RouterSums | None]:
        """Return the residual stream with the MLP's update, and the sums of its router (None: no experts)."""
        norm = self.mlp_norm or _unchanged
        with jax.named_scope("mlp"):
            if isinstance(self.mlp, MixtureOfExperts):
                update_BTD, sums = self.mlp.with_sums(x_BTD, norm)
            else:
                update_BTD, sums = self.mlp(x_BTD, norm), None
            x_BTD += (self.mlp_post_norm or _unchanged)(self._residual(update_BTD, "mlp_out"))
        return x_BTD, sums

    def _residual(self, x_BTD: jax.Array, name: str) -> jax.Array:
        return checkpoint_name(self.partitioner.constrain(x_BTD, "batch", "residual_seq", "act_embed"), name)


def _unchanged(x_BTD: jax.Array) -> jax.Array:
    return x_BTD
