"""The default transformer block: pre-norm attention and pre-norm MLP on a residual stream.

Legend: B batch, T sequence, D embed width.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ridgeline.configs.schema import AttentionConfig, ModelConfig
from ridgeline.models.attention.layer import AttendWith, Attention, RotaryTable
from ridgeline.models.mlp import MLP
from ridgeline.models.norms import NORMS, Prepare, unprepared
from ridgeline.models.params import ParamFactory
from ridgeline.models.projection import Projector
from ridgeline.models.remat import Remat
from ridgeline.models.ring import RingProjector


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        model: ModelConfig,
        config: AttentionConfig,
        remat: Remat,
        platform: str,
        residual_std: float,
        make: ParamFactory,
        projector: Projector,
    ) -> None:
        norm = NORMS[model.norm]
        self.attention_norm = norm(model.embed_dim, model.norm_eps, make, projector.partitioner)
        self.attention = Attention(model, config, remat, platform, residual_std, make, projector)
        self.mlp_norm = norm(model.embed_dim, model.norm_eps, make, projector.partitioner)
        self.mlp = MLP(model, remat, residual_std, make, projector)
        self.partitioner = projector.partitioner
        self.ring = isinstance(projector, RingProjector)

    def __call__(
        self, x_BTD: jax.Array, rotary: RotaryTable | None, segment_ids_BT: jax.Array | None, attend_with: AttendWith | None = None
    ) -> jax.Array:
        """Advance the residual stream by one block; `attend_with` as in `Attention`."""
        constrain = self.partitioner.constrain
        x_BTD = checkpoint_name(constrain(x_BTD, "batch", "residual_seq", "act_embed"), "block_input")
        with jax.named_scope("attention"):
            input_BTD, prepare = self._input(x_BTD, self.attention_norm)
            update_BTD = self.attention(input_BTD, rotary, segment_ids_BT, attend_with, prepare)
            x_BTD += checkpoint_name(constrain(update_BTD, "batch", "residual_seq", "act_embed"), "attention_out")
        with jax.named_scope("mlp"):
            update_BTD = self.mlp(*self._input(x_BTD, self.mlp_norm))
            x_BTD += checkpoint_name(constrain(update_BTD, "batch", "residual_seq", "act_embed"), "mlp_out")
        return x_BTD

    def _input(self, x_BTD: jax.Array, norm: Prepare) -> tuple[jax.Array, Prepare]:
        """Return the input of a half block and what is to be done to it there.

        A sequence that the norm's result has to be gathered from is gathered once: such a result is made here, and kept. Rings take the
        stream as it is cut.
        """

        def prepare(x_BTD: jax.Array) -> jax.Array:
            return self._gathered(norm(x_BTD))

        gathered = self.partitioner.axis_size("residual_seq") > 1 and not self.ring
        return (prepare(x_BTD), unprepared) if gathered else (x_BTD, prepare)

    def _gathered(self, x_BTD: jax.Array) -> jax.Array:
        # Pinned on both sides: otherwise XLA gathers before the norm's last cast, in float32.
        constrain = self.partitioner.constrain
        x_BTD = constrain(x_BTD, "batch", "residual_seq", "act_embed")
        return x_BTD if self.ring else constrain(x_BTD, "batch", "seq", "act_embed")
