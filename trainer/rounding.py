"""Stochastic rounding: up or down at random, in proportion to how near each neighbour is, so that the mean is the value itself.

A master parameter in bfloat16 has 8 bits: an update below 1/512 of the parameter is lost when it is rounded to nearest, and adds up in
expectation when it is rounded stochastically (Zamirai et al., Revisiting bfloat16 training, arXiv 2010.06192, section 3).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
_DROPPED = 16  # bits of a float32's mantissa that bfloat16 does not have


def to_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round float32 to bfloat16 stochastically. Values that bfloat16 has stay; what is not finite is only cast.

    The bits of a float grow with its magnitude, so a random number added below the cut carries into the kept bits just as often as the
    value lies above the lower neighbour. The draws depend on the key and the shape, not on the mesh.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    kept = ((bits + noise) >> _DROPPED).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(kept, jnp.bfloat16), x.astype(jnp.bfloat16))


def keys_of(key: jax.Array, tree: Tree) -> Tree:
    """Return a key for each array of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [jax.random.fold_in(key, index) for index in range(len(leaves))])


def apply_updates(params: Tree, updates: Tree, key: jax.Array) -> Tree:
    """Add float32 updates to parameters of any dtype; sums that end in bfloat16 are rounded stochastically."""

    def one(param: jax.Array, update: jax.Array, key: jax.Array) -> jax.Array:
        total = param.astype(jnp.float32) + update
        return to_bfloat16(total, key) if param.dtype == jnp.bfloat16 else total.astype(param.dtype)

    return jax.tree.map(one, params, updates, keys_of(key, params))
