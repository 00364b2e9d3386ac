"""The optimizers: optax update rules, adapted to sharded, stacked, mixed-precision parameters.

* The learning rate is an argument of `update`, not a counter in the state: after a resume it depends only on the step.
* Rules compute in float32: gradients and parameters are cast first, so second moments are float32 for any `precision.params`.
* A stacked `layers` dim is never part of a matrix: Adafactor and Muon run once per layer, decay masks ignore it.
* Decoupled weight decay is scaled by the learning rate in every rule. Gradient clipping is part of the step, which computes the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ridgeline.configs import plugins
from ridgeline.configs.schema import OptimizerConfig, PrecisionConfig
from ridgeline.planner.optimizer_state import OptimizerPlugin
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import matrix_sides
from ridgeline.trainer.low_precision import scale_by_eight_bit_adam
from ridgeline.trainer.muon import scale_by_muon

Tree = Any
LogicalAxes = tuple[str | None, ...]
Rule = Callable[[OptimizerConfig, jnp.dtype, Tree], optax.GradientTransformation]
"""(config, first-moment dtype, tree of logical axes) -> gradients to updates of size 1 (before the learning rate), decay included."""

LAYERS = "layers"
TABLE_AXES = frozenset({"vocab", "positions"})
"""Logical axes of lookup tables and the unembedding. Their rows are used one at a time, so Muon does not apply to them."""
MUON_RMS = 0.2
"""Muon updates are scaled to AdamW's usual root mean square, so that one learning rate serves both (arXiv 2502.16982, equation 4)."""


def build_optimizer(
    optimizer: OptimizerConfig,
    precision: PrecisionConfig,
    param_axes: Tree,
    partitioner: Partitioner | None = None,
    width_ratio: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Return the update rule for parameters with these logical axes (the parameter tree with a tuple of names per array).

    `partitioner` shards the parameters; None: they are on one device. `width_ratio`: of the model (muP).
    Its `update` takes the keywords `learning_rate` (float32 scalar) and `key` (for moments in 8 bits) and returns float32 updates.
    Raises UserError for an unknown kind.
    """
    rules = OPTIMIZERS | {"muon": partial(_muon, partitioner=partitioner)}  # the only one that communicates
    build: Rule = rules.get(optimizer.kind) or plugins.load("optimizers", optimizer.kind, OptimizerPlugin, OPTIMIZERS).rule
    if width_ratio == 1:
        rule = build(optimizer, jnp.dtype(precision.moments), param_axes)
    else:
        undecayed = optimizer.model_copy(update={"weight_decay": 0.0})
        rule = optax.chain(
            build(undecayed, jnp.dtype(precision.moments), param_axes),
            _scale_by_width(width_ratio, param_axes),
            _decayed_weights(optimizer, param_axes),
        )
    return _in_float32(optax.chain(rule, _scale_by_learning_rate()))


def learning_rate_factor(axes: LogicalAxes, width_ratio: float) -> float:
    """Return the factor of the learning rate of a parameter in muP, for adamw and lion (arXiv 2203.03466, table 8).

    1/m for the matrices of the layers; 1 for tables, the unembedding and vectors. The router, whose outputs have no width, is scaled as
    the output weights of table 3: 1/m. Weight decay has no factor: learning rate times decay is the same at all widths (independent
    weight decay, as in the package `mup`).
    """
    router = {"embed", "router"} <= set(axes)
    width_to_width = len(matrix_sides(axes)) == 2 and not {*TABLE_AXES, "router"} & set(axes)
    return 1 / width_ratio if router or width_to_width else 1.0


def decays(config: OptimizerConfig, axes: LogicalAxes) -> bool:
    """Return whether weight decay applies to a parameter with these logical axes."""
    return {"all": True, "none": False, "matrices": len(matrix_sides(axes)) >= 2}[config.decay]


def uses_muon(axes: LogicalAxes) -> bool:
    """Return whether the kind `muon` orthogonalizes this parameter. The others (tables, norms, biases) use AdamW."""
    return len(matrix_sides(axes)) == 2 and not TABLE_AXES & set(axes)


def _map_axes(fn: Callable[[LogicalAxes], Any], param_axes: Tree, params: Tree) -> Tree:
    """Apply `fn` to the logical axes of each parameter, in the structure of `params` (masked-out parameters stay masked)."""
    masked = lambda leaf: isinstance(leaf, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(lambda leaf, axes: leaf if masked(leaf) else fn(tuple(axes)), params, param_axes, is_leaf=masked)


def _scale_by_width(width_ratio: float, param_axes: Tree) -> optax.GradientTransformation:
    def scale(updates: Tree, params: Tree) -> Tree:
        factors = _map_axes(lambda axes: learning_rate_factor(axes, width_ratio), param_axes, updates)
        return jax.tree.map(lambda update, factor: update * factor, updates, factors)

    return optax.stateless(scale)


def _decayed_weights(config: OptimizerConfig, param_axes: Tree) -> optax.GradientTransformation:
    return optax.add_decayed_weights(
        config.weight_decay, mask=lambda params: _map_axes(lambda axes: decays(config, axes), param_axes, params)
    )


def in_eight_bits(axes: LogicalAxes) -> bool:
    """Return whether `precision.moments: int8` applies to this parameter: matrices; tables, norms and biases keep float32 moments.

    Tables see few rows per step and are where 8 bits hurt (arXiv 2110.02861, section 2.3).
    """
    return len(matrix_sides(axes)) == 2 and not TABLE_AXES & set(axes)


def _adamw(config: OptimizerConfig, moments: jnp.dtype, param_axes: Tree) -> optax.GradientTransformation:
    """arXiv 1711.05101, algorithm 2."""
    if moments == jnp.int8:
        axes_of = lambda params: _map_axes(lambda axes: axes, param_axes, params)  # noqa: E731
        rules = {
            "eight_bit": scale_by_eight_bit_adam(config.b1, config.b2, config.eps, axes_of),
            "full": optax.scale_by_adam(config.b1, config.b2, config.eps),
        }
        labels = lambda params: _map_axes(lambda axes: "eight_bit" if in_eight_bits(axes) else "full", param_axes, params)  # noqa: E731
        return optax.chain(optax.partition(rules, labels), _decayed_weights(config, param_axes))
    return optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=moments),
        _decayed_weights(config, param_axes),
    )


def _adafactor(config: OptimizerConfig, moments: jnp.dtype, param_axes: Tree) -> optax.GradientTransformation:
    """arXiv 1804.04235, algorithms 4 and 5 without a first moment; b1, b2 and eps are not used."""
    rule = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=128), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
    )
    label = lambda axes: "stacked" if LAYERS in axes else "single"  # noqa: E731
    split = optax.partition({"stacked": _per_layer(rule), "single": rule}, lambda params: _map_axes(label, param_axes, params))
    return optax.chain(_as_matrices(split, param_axes), _decayed_weights(config, param_axes))


def _lion(config: OptimizerConfig, moments: jnp.dtype, param_axes: Tree) -> optax.GradientTransformation:
    """arXiv 2302.06675, algorithm 2; eps is not used."""
    return optax.chain(optax.scale_by_lion(config.b1, config.b2, mu_dtype=moments), _decayed_weights(config, param_axes))


def _muon(
    config: OptimizerConfig, moments: jnp.dtype, param_axes: Tree, partitioner: Partitioner | None = None
) -> optax.GradientTransformation:
    """Muon with momentum b1 on matrices (arXiv 2502.16982), AdamW on everything else, both at the same learning rate."""
    sides = lambda params: _map_axes(matrix_sides, param_axes, params)  # noqa: E731
    matrices = optax.chain(
        scale_by_muon(config.b1, moments, lambda params: _map_axes(lambda axes: axes, param_axes, params), partitioner),
        optax.stateless(lambda updates, params: jax.tree.map(_scale_to_muon_rms, updates, sides(updates))),
    )
    rules = {"muon": matrices, "adam": optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=moments)}
    labels = lambda params: _map_axes(lambda axes: "muon" if uses_muon(axes) else "adam", param_axes, params)  # noqa: E731
    return optax.chain(optax.partition(rules, labels), _decayed_weights(config, param_axes))


def _scale_to_muon_rms(update: jax.Array, sides: Sequence[tuple[int, ...]]) -> jax.Array:
    """Scale an orthogonal [m, n] matrix, whose root mean square is 1/sqrt(max(m, n)), to MUON_RMS."""
    larger = max(math.prod(update.shape[dim] for dim in side) for side in sides)
    return MUON_RMS * math.sqrt(larger) * update


def _sgd(config: OptimizerConfig, moments: jnp.dtype, param_axes: Tree) -> optax.GradientTransformation:
    """Heavy-ball momentum b1; b2 and eps are not used."""
    return optax.chain(optax.trace(config.b1, accumulator_dtype=moments), _decayed_weights(config, param_axes))


OPTIMIZERS: dict[str, Rule] = {"adamw": _adamw, "adafactor": _adafactor, "lion": _lion, "muon": _muon, "sgd": _sgd}


def _scale_by_learning_rate() -> optax.GradientTransformationExtraArgs:
    """Multiply by minus the learning rate that `update` is given."""

    def update(updates: Tree, state: Tree, params: Tree = None, *, learning_rate: jax.Array, **extra: Any) -> tuple[Tree, Tree]:
        return jax.tree.map(lambda u: -learning_rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _in_float32(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Run a rule on float32 gradients and parameters."""

    def cast(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        return inner.update(cast(updates), state, cast(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(cast(params)), update)


def _per_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a rule to each layer of stacked parameters separately; every array of its state gets the leading dim."""

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        if not jax.tree.leaves(updates):
            return inner.update(updates, state, params)
        new: tuple[Tree, Tree] = jax.vmap(inner.update)(updates, state, params)
        return new

    def init(params: Tree) -> Tree:
        return jax.vmap(inner.init)(params) if jax.tree.leaves(params) else inner.init(params)

    return optax.GradientTransformation(init, update)


def _as_matrices(inner: optax.GradientTransformation, param_axes: Tree) -> optax.GradientTransformation:
    """Apply a rule to the matrix view of each parameter ([D, N, H] as [D, N*H]); its state has the same view."""

    def view(tree: Tree) -> Tree:
        def one(x: jax.Array, axes: LogicalAxes) -> jax.Array:
            stacked = x.shape[:1] if axes and axes[0] == LAYERS else ()
            return x.reshape(stacked + tuple(math.prod(x.shape[dim] for dim in side) for side in matrix_sides(axes)))

        return jax.tree.map(one, tree, param_axes)

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        new, state = inner.update(view(updates), state, view(params))
        return jax.tree.map(lambda u, x: u.reshape(x.shape), new, updates), state

    return optax.GradientTransformation(lambda params: inner.init(view(params)), update)
