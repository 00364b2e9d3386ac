"""Lookup in the token table (or that of learned positions), with its gradient summed in the gradient dtype.

The lookup and the sums over devices are written by hand (sharding/manual.py): left to XLA, a table with sharded rows is moved as a whole.

Legend: B batch, T sequence, V vocabulary rows, D embed width.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ridgeline.models.projection import Projector
from ridgeline.sharding.manual import look_up, look_up_gradient


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def embed(projector: Projector, rows_axis: str, table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return the rows of the table (logical axes `rows_axis`, embed) for int32 ids, [B, T, D] in the compute dtype.

    The gradient is scattered and summed in the gradient dtype: in bfloat16 a frequent token would stop growing after 256 additions.
    """
    return look_up(projector.partitioner, table_VD.astype(projector.compute_dtype), tokens_BT, rows_axis)


def _embed_forward(
    projector: Projector, rows_axis: str, table_VD: jax.Array, tokens_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # An empty array carries the table's dtype and number of rows; the values are not needed again.
    return embed(projector, rows_axis, table_VD, tokens_BT), (tokens_BT, jnp.empty((table_VD.shape[0], 0), table_VD.dtype))


def _embed_backward(
    projector: Projector, rows_axis: str, residuals: tuple[jax.Array, jax.Array], dx_BTD: jax.Array
) -> tuple[jax.Array, None]:
    tokens_BT, table_like = residuals
    grad_VD = look_up_gradient(projector.partitioner, table_like.shape[0], tokens_BT, dx_BTD, projector.gradient_dtype, rows_axis)
    return grad_VD.astype(table_like.dtype), None


embed.defvjp(_embed_forward, _embed_backward)
