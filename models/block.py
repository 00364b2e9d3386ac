"""The default transformer block: pre-norm attention and pre-norm MLP on a residual stream.

Legend: B batch, T sequence, D embed width.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ridgeline.configs.schema import ModelConfig
from ridgeline.models.attention.layer import AttendWith, Attention, RotaryTable
from ridgeline.models.mlp import MLP
from ridgeline.models.norms import NORMS
from ridgeline.models.parallelize import Execution
from ridgeline.models.params import ParamFactory


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: ModelConfig, execution: Execution, residual_std: float, make: ParamFactory) -> None:
        norm = NORMS[model.norm]
        self.attention_norm = norm(model.embed_dim, model.norm_eps, make, execution.partitioner)
        self.attention = Attention(model, execution, residual_std, make)
        self.mlp_norm = norm(model.embed_dim, model.norm_eps, make, execution.partitioner)
        self.mlp = MLP(model, execution, residual_std, make)
        self.partitioner = execution.partitioner

    def __call__(
        self, x_BTD: jax.Array, rotary: RotaryTable | None, segment_ids_BT: jax.Array | None, attend_with: AttendWith | None = None
    ) -> jax.Array:
        """Return the residual stream after the block; `attend_with` as in `Attention`."""
        x_BTD = self._residual(x_BTD, "block_input")
        with jax.named_scope("attention"):
            x_BTD += self._residual(self.attention(x_BTD, self.attention_norm, rotary, segment_ids_BT, attend_with), "attention_out")
        with jax.named_scope("mlp"):
            x_BTD += self._residual(self.mlp(x_BTD, self.mlp_norm), "mlp_out")
        return x_BTD

    def _residual(self, x_BTD: jax.Array, name: str) -> jax.Array:
        return checkpoint_name(self.partitioner.constrain(x_BTD, "batch", "residual_seq", "act_embed"), name)
