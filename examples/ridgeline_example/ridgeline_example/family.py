"""Blocks whose attention and MLP read the same input: x + attention(norm(x)) + mlp(norm(x)) (as in GPT-J and PaLM, arXiv 2204.02311).

Legend: B batch, T sequence, D embed width.
"""

import jax

from ridgeline.models.attention.layer import AttendWith, RotaryTable
from ridgeline.models.block import Block
from ridgeline.models.family import Family


class ParallelBlock(Block):
    """Block with one change: the MLP does not wait for the attention."""

    def __call__(
        self, x_BTD: jax.Array, rotary: RotaryTable | None, segment_ids_BT: jax.Array | None, attend_with: AttendWith | None = None
    ) -> jax.Array:
        x_BTD = self._residual(x_BTD, "block_input")
        with jax.named_scope("attention"):
            attention_BTD = self.attention(x_BTD, self.attention_norm, rotary, segment_ids_BT, attend_with)
        with jax.named_scope("mlp"):
            mlp_BTD = self.mlp(x_BTD, self.mlp_norm)
        return x_BTD + self._residual(attention_BTD, "attention_out") + self._residual(mlp_BTD, "mlp_out")


FAMILY = Family(name="parallel", residual_std=lambda model: model.init_std, block=ParallelBlock)
