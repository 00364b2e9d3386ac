"""Muon (arXiv 2502.16982) for sharded stacks of matrices: each device orthogonalizes whole matrices of its share of the layers.

A stack whose matrices are sharded over mesh axes is sharded over its layers instead, with an all-to-all per axis, and back after: no
matrix is gathered on more than one device of these axes. With fewer layers than devices, some devices get zeros. Layers are
orthogonalized one after the other, so memory holds the temporaries of one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ridgeline.planner.kernels import NEWTON_SCHULZ_STEPS
from ridgeline.sharding.manual import active, on_shards
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import Axes, LogicalAxes, matrix_sides

Tree = Any
EPS = 1e-8
"""Added to the Frobenius norm that a matrix is divided by."""


def scale_by_muon(
    beta: float, dtype: jnp.dtype, axes_of: Callable[[Tree], Tree], partitioner: Partitioner | None
) -> optax.GradientTransformation:
    """Return Nesterov momentum whose result is orthogonalized, with optax's state (optax.contrib.scale_by_muon).

    Args:
      beta: decay of the momentum.
      dtype: of the stored momentum.
      axes_of: tree of parameters -> tree of their logical axes.
      partitioner: shards the parameters; None: one device.
    """

    def update(updates: Tree, state: optax.contrib.MuonState, params: Tree = None) -> tuple[Tree, optax.contrib.MuonState]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
        now = optax.tree.bias_correction(updates, beta, count)
        momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        orthogonal = partial(orthogonalized, state.ns_coeffs, partitioner)
        result = jax.tree.map(orthogonal, axes_of(momentum), momentum, is_leaf=lambda x: type(x) is tuple)
        return result, optax.contrib.MuonState(count=count, mu=optax.tree.cast(mu, dtype), ns_coeffs=state.ns_coeffs)

    return optax.GradientTransformation(optax.contrib.scale_by_muon(beta=beta, mu_dtype=dtype).init, update)


def orthogonalized(coefficients: jax.Array, partitioner: Partitioner | None, axes: LogicalAxes, x: jax.Array) -> jax.Array:
    """Return the orthogonalized matrices of a parameter, [layers, ...] or one matrix, with its sharding."""
    if axes[0] != "layers":
        return orthogonalized(coefficients, partitioner, ("layers", *axes), x[None])[0]
    each = partial(_each_layer, partial(_newton_schulz, coefficients, len(matrix_sides(axes)[0])))
    if partitioner is None or partitioner.mesh.size == 1:
        return each(x)
    spec = partitioner.spec(axes, x.shape, "momentum")
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    sharded = [(dim, over) for dim in range(1, x.ndim) if (over := active(partitioner, entries[dim]))]
    result: jax.Array = on_shards(partitioner, partial(_by_layers, each, sharded), spec, spec)(x)
    return result


def _each_layer(one: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply `one` to each layer of a stack, in place: XLA zeroes the results of a map, and may do so long before."""
    update = lambda i, x: jax.lax.dynamic_update_index_in_dim(x, one(x[i]), i, 0)  # noqa: E731
    layers = x.shape[0]
    # XLA on GPUs ends with "Call graph must have been flattened" where the last loop with a known count is not one that it unrolls, and
    # layers have loops of their own (scan_blocks in models/attention/chunked.py). With microbatches this would be the last: hide its count.
    count = 1 if layers == 1 else jax.lax.optimization_barrier(jnp.int32(layers))
    result: jax.Array = jax.lax.fori_loop(0, count, update, x)
    return result


def _by_layers(each: Callable[[jax.Array], jax.Array], sharded: list[tuple[int, Axes]], x: jax.Array) -> jax.Array:
    """Apply `each` to whole matrices of a local stack whose dims in `sharded` are sharded over mesh axes (inside `on_shards`)."""
    layers = x.shape[0]
    pieces = math.prod(jax.lax.axis_size(over) for _, over in sharded)
    x = jnp.pad(x, [(0, -layers % pieces)] + [(0, 0)] * (x.ndim - 1))
    for dim, over in sharded:
        x = jax.lax.all_to_all(x, over, split_axis=0, concat_axis=dim, tiled=True)
    x = each(x)
    for dim, over in reversed(sharded):
        x = jax.lax.all_to_all(x, over, split_axis=dim, concat_axis=0, tiled=True)
    return x[:layers]


def _newton_schulz(coefficients: jax.Array, first: int, x: jax.Array) -> jax.Array:
    """Return a matrix near the orthogonal factor of x; its first `first` dims are one side of the matrix, the others are the other."""
    matrix = x.reshape(math.prod(x.shape[:first]), -1)
    # XLA's GPU backend may fail to tile a matmul that it fuses with the reshape
    y = jax.lax.optimization_barrier(matrix / (jnp.linalg.norm(matrix) + EPS))
    a, b, c = coefficients.astype(y.dtype)
    tall = y.shape[0] > y.shape[1]
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = y.T @ y if tall else y @ y.T
        update = b * gram + c * gram @ gram
        y = a * y + (y @ update if tall else update @ y)
    return y.reshape(x.shape)
