"""The token table lookup, with its gradient summed in the gradient dtype.

Legend: B batch, T sequence, V vocabulary rows, D embed width.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from models.projection import Projector

TABLE_AXES = ("vocab", "embed")
"""Logical axes of the token table [V, D]."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def embed(projector: Projector, table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return the rows of the table for int32 tokens, [B, T, D] in the compute dtype.

    The gradient is scattered and summed in the gradient dtype: in bfloat16 a frequent token would stop growing after 256 additions.
    """
    gathered_VD = projector.partitioner.gather_param(table_VD.astype(projector.compute_dtype), *TABLE_AXES)
    return jnp.take(gathered_VD, tokens_BT, axis=0, mode="clip")


def _embed_forward(projector: Projector, table_VD: jax.Array, tokens_BT: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # An empty array carries the table's dtype and number of rows; the values are not needed again.
    return embed(projector, table_VD, tokens_BT), (tokens_BT, jnp.empty((table_VD.shape[0], 0), table_VD.dtype))


def _embed_backward(projector: Projector, residuals: tuple[jax.Array, jax.Array], dx_BTD: jax.Array) -> tuple[jax.Array, None]:
    tokens_BT, table_like = residuals
    zeros_VD = jnp.zeros((table_like.shape[0], dx_BTD.shape[-1]), projector.gradient_dtype)
    dtable_VD = zeros_VD.at[tokens_BT].add(dx_BTD.astype(projector.gradient_dtype), mode="drop")
    return projector.partitioner.constrain(dtable_VD, *TABLE_AXES).astype(table_like.dtype), None


embed.defvjp(_embed_forward, _embed_backward)
