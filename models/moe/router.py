"""The router: scores, the choice of experts, and the sums from which losses, metrics and the choice bias follow.

Everything is float32. A row of tokens is balanced by itself: the sums of a row depend neither on the other rows of its microbatch nor on
the mesh, so that microbatches and devices do not change the update.

Legend: B rows, T tokens of a row, C shards of a row, D embed width, E experts, G groups, K chosen experts, L layers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from ridgeline.configs.model_schema import MoEConfig
from ridgeline.configs.schema import LossConfig
from ridgeline.sharding.manual import on_shards, reduce_gradient

if TYPE_CHECKING:
    from ridgeline.sharding.partition import Partitioner

METRIC_PREFIX = "router_"
"""Beginning of the names of the router's metrics of a step."""
ROUTER_AXES = ("embed", "router")
"""Logical axes of the router's matrix [D, E]."""


class RouterSums(NamedTuple):
    """Sums over the tokens of each row (and of each shard of it), float32. Sums over shards of a row would communicate in each layer."""

    scores_BCE: jax.Array
    """Scores of the experts, divided by their sum per token."""
    load_BCE: jax.Array
    """Tokens that chose the expert."""
    z_BC: jax.Array
    """log(Z)^2 of the logits."""
    entropy_BC: jax.Array
    """Entropy of the scores in nats."""
    dropped: jax.Array
    """Assignments of tokens to experts beyond the capacity, one number per device that has tokens of its own."""


class RouterTotals(NamedTuple):
    """Sums over all rows, for each layer with experts, float32."""

    balance_L: jax.Array
    """Load-balancing loss of each row, summed: 1 per row at perfect balance, E / K where all tokens choose the same experts."""
    z_L: jax.Array
    """log(Z)^2 of the logits, summed over tokens."""
    entropy_L: jax.Array
    """Entropy of the scores in nats, summed over tokens."""
    load_LE: jax.Array
    """Tokens that chose each expert."""
    dropped_L: jax.Array
    """Assignments of tokens to experts beyond the capacity."""

    @classmethod
    def of(cls, sums: RouterSums, tokens_per_row: int) -> RouterTotals:
        """Add up the sums of all layers (arrays with a leading L).

        Load-balancing loss: E * sum over experts of (share of assignments) * (mean score), per row (arXiv 2101.03961, equation 4).
        """
        load_LBE = jax.lax.stop_gradient(jnp.sum(sums.load_BCE, 2))
        share_LBE = load_LBE / jnp.maximum(jnp.sum(load_LBE, -1, keepdims=True), 1.0)
        score_LBE = jnp.sum(sums.scores_BCE, 2) / tokens_per_row
        return cls(
            balance_L=load_LBE.shape[-1] * jnp.sum(share_LBE * score_LBE, (1, 2)),
            z_L=jnp.sum(sums.z_BC, (1, 2)),
            entropy_L=jnp.sum(sums.entropy_BC, (1, 2)),
            load_LE=jnp.sum(load_LBE, 1),
            dropped_L=jnp.sum(sums.dropped, 1),
        )

    @classmethod
    def zeros(cls, layers: int, experts: int) -> RouterTotals:
        """Return the totals of no rows."""
        per_layer = jnp.zeros(layers, jnp.float32)
        return cls(per_layer, per_layer, per_layer, jnp.zeros((layers, experts), jnp.float32), per_layer)

    def objective(self, loss: LossConfig, rows: int, tokens: int) -> jax.Array:
        """Return the weighted losses of the router, summed over layers; `rows` and `tokens`: of the whole global batch."""
        return loss.load_balance * jnp.sum(self.balance_L) / rows + loss.router_z_loss * jnp.sum(self.z_L) / tokens

    def metrics(self, rows: int, tokens: int) -> dict[str, jax.Array]:
        """Return the metrics of a step (rundir/metrics.py); `rows` and `tokens`: of the whole global batch."""
        assignments = jnp.maximum(jnp.sum(self.load_LE), 1.0)
        load_L = jnp.max(self.load_LE, -1) / jnp.maximum(jnp.mean(self.load_LE, -1), 1.0)
        values = {
            "balance_loss": jnp.mean(self.balance_L) / rows,
            "z_loss": jnp.mean(self.z_L) / tokens,
            "entropy": jnp.mean(self.entropy_L) / tokens,
            "load_max": jnp.max(load_L),
            "load_mean": jnp.mean(load_L),
            "dropped": jnp.sum(self.dropped_L) / assignments,
        }
        return {METRIC_PREFIX + name: value for name, value in values.items()}


class Choice(NamedTuple):
    """The experts of each token."""

    experts_BTK: jax.Array
    """int32."""
    weights_BTK: jax.Array
    """float32; differentiable."""


def choose(partitioner: Partitioner, moe: MoEConfig, logits_BTE: jax.Array, bias_E: jax.Array | None) -> tuple[Choice, jax.Array]:
    """Return the experts of each token with their weights, and the scores [B, T, E]. `bias_E` affects the choice only."""

    def best(ranked_BTE: jax.Array) -> jax.Array:
        ranked_BTE = _only_best_groups(moe, ranked_BTE) if moe.grouped else ranked_BTE
        return jax.lax.top_k(ranked_BTE, moe.experts_per_token)[1]

    scores_BTE = jax.nn.softmax(logits_BTE, -1) if moe.score == "softmax" else jax.nn.sigmoid(logits_BTE)
    ranked_BTE = jax.lax.stop_gradient(scores_BTE)
    if bias_E is not None:
        ranked_BTE = ranked_BTE + jax.lax.stop_gradient(bias_E)
    if partitioner.mesh.size > 1:  # XLA would gather the rows of all devices for a top-k
        stream = partitioner.rules.spec(("batch", "residual_seq", None))
        best = on_shards(partitioner, best, stream, stream)
    experts_BTK = best(ranked_BTE)
    # A sum over E, not an index: the gradient of an index is a scatter.
    weights_BTK = jnp.sum(jnp.where(_one_hot(experts_BTK, moe.experts), scores_BTE[..., None, :], 0), -1)
    if moe.normalize:
        weights_BTK = weights_BTK / jnp.maximum(jnp.sum(weights_BTK, -1, keepdims=True), 1e-20)
    return Choice(experts_BTK, weights_BTK * moe.scale), scores_BTE


def _only_best_groups(moe: MoEConfig, ranked_BTE: jax.Array) -> jax.Array:
    """Return -inf for the experts outside of the chosen groups of each token."""
    size = moe.experts // moe.groups
    ranked_BTGe = ranked_BTE.reshape(*ranked_BTE.shape[:-1], moe.groups, size)
    best = jax.lax.top_k(ranked_BTGe, 1 if moe.group_score == "best" else min(2, size))[0]
    groups = jax.lax.top_k(jnp.sum(best, -1), moe.groups_per_token)[1]
    chosen_BTG = jnp.any(_one_hot(groups, moe.groups), -2)
    return jnp.where(chosen_BTG[..., None], ranked_BTGe, -jnp.inf).reshape(ranked_BTE.shape)


def _one_hot(index: jax.Array, size: int) -> jax.Array:
    return index[..., None] == jnp.arange(size)


def sums_of(partitioner: Partitioner, logits_BTE: jax.Array, scores_BTE: jax.Array, choice: Choice, dropped: jax.Array) -> RouterSums:
    """Return the sums of one layer."""
    shards, experts = partitioner.axis_size("residual_seq"), logits_BTE.shape[-1]

    def add(x_BT: jax.Array) -> jax.Array:
        split = x_BT.reshape(x_BT.shape[0], shards, -1, *x_BT.shape[2:])
        split = partitioner.constrain(split, "batch", "residual_seq", *[None] * (split.ndim - 2))
        return jnp.sum(split, 2)

    scores_BTE = scores_BTE / jnp.sum(scores_BTE, -1, keepdims=True)
    entropy_BT = -jnp.sum(scores_BTE * jnp.log(jnp.maximum(scores_BTE, 1e-30)), -1)
    return RouterSums(
        scores_BCE=add(scores_BTE),
        load_BCE=add(jnp.sum(_one_hot(choice.experts_BTK, experts).astype(jnp.float32), -2)),
        z_BC=add(jnp.square(jax.nn.logsumexp(logits_BTE, -1))),
        entropy_BC=add(jax.lax.stop_gradient(entropy_BT)),
        dropped=dropped,
    )


def balanced_bias(bias_LE: jax.Array, load_LE: jax.Array, rate: float) -> jax.Array:
    """Return the choice bias after a step: raised where the load is below the layer's mean, lowered where above (arXiv 2408.15664)."""
    return bias_LE + rate * jnp.sign(jnp.mean(load_LE, -1, keepdims=True) - load_LE)


Residuals = tuple[jax.Array, jax.Array, jax.Array]
"""Input, gathered parameter, and an empty array in the parameter's dtype."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def router_logits(partitioner: Partitioner, x_BTD: jax.Array, w_DE: jax.Array) -> jax.Array:
    """Return the float32 logits [B, T, E] of the residual stream's shards; w is the stored (sharded) parameter."""
    return _logits_forward(partitioner, x_BTD, w_DE)[0]


def _logits_forward(partitioner: Partitioner, x_BTD: jax.Array, w_DE: jax.Array) -> tuple[jax.Array, Residuals]:
    # Every policy computes the logits again in the backward pass: the gathered parameter of that time is used for the gradient too.
    gathered_DE = partitioner.gather_param(w_DE.astype(jnp.float32), *ROUTER_AXES)
    return jnp.einsum("btd,de->bte", x_BTD.astype(jnp.float32), gathered_DE), (x_BTD, gathered_DE, jnp.zeros(0, w_DE.dtype))


def _logits_backward(partitioner: Partitioner, residuals: Residuals, dlogits_BTE: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTD, gathered_DE, like = residuals
    rules = partitioner.rules
    dx_BTD = jnp.einsum("bte,de->btd", dlogits_BTE, gathered_DE).astype(x_BTD.dtype)
    tokens = (*rules.mesh_axes("batch"), *rules.mesh_axes("residual_seq"))

    def local(x_BTD: jax.Array, dlogits_BTE: jax.Array) -> jax.Array:
        partial_DE = jnp.einsum("btd,bte->de", x_BTD.astype(jnp.float32), dlogits_BTE)
        return reduce_gradient(partitioner, partial_DE, ROUTER_AXES, tokens)

    stream = rules.spec(("batch", "residual_seq", None))
    run = on_shards(partitioner, local, in_specs=(stream, stream), out_specs=rules.spec(ROUTER_AXES))
    return dx_BTD, run(x_BTD, dlogits_BTE).astype(like.dtype)


router_logits.defvjp(_logits_forward, _logits_backward)
