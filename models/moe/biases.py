"""Biases of experts.

Those of the gate and up projections are added in the rows of the experts. That of the down projection is added per token, as one matmul
with the weights of the token's experts, so that it needs no dispatch. Gradients are reduced once, by hand.

Legend: B rows, T tokens of a row, D embed width, E experts, K experts per token, F hidden width of an expert, R rows of the
experts' buffers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ridgeline.models.moe.experts import Experts, Plan, tie_weight_gradients
from ridgeline.sharding.manual import on_shards, reduce_gradient

if TYPE_CHECKING:
    from ridgeline.sharding.partition import Partitioner

HIDDEN_BIAS_AXES = ("experts", "mlp")
"""Logical axes of the biases [E, F] of the gate and up projections."""
UPDATE_BIAS_AXES = ("router", "norm")
"""Logical axes of the bias [E, D] of the down projection."""
Arrays = tuple[jax.Array, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def add_biases(experts: Experts, hidden_RF: Arrays, plan: Plan, biases_EF: Arrays) -> Arrays:
    """Return arrays in the rows of the experts plus the bias of each row's expert; the biases are the stored (sharded) parameters."""

    def local(hidden_RF: Arrays, plan: Plan, biases_EF: Arrays) -> Arrays:
        expert_R = _expert_of_rows(experts, plan, hidden_RF[0].shape[0])
        return tuple(h_RF + bias_EF.astype(h_RF.dtype)[expert_R] for h_RF, bias_EF in zip(hidden_RF, biases_EF, strict=True))

    biased: Arrays = _on_shards(experts, local, len(hidden_RF))(hidden_RF, plan, biases_EF)
    return biased


def _add_forward(experts: Experts, hidden_RF: Arrays, plan: Plan, biases_EF: Arrays) -> tuple[Arrays, Any]:
    return add_biases(experts, hidden_RF, plan, biases_EF), (plan, tuple(jnp.zeros(0, bias.dtype) for bias in biases_EF))


def _add_backward(experts: Experts, residuals: Any, dhidden_RF: Arrays) -> tuple[Arrays, None, Arrays]:
    plan, like = residuals
    partitioner = experts.matmul.partitioner

    def local(dhidden_RF: Arrays, plan: Plan) -> tuple[Arrays, Arrays]:
        # In a kernel of their own: the one that computes these gradients, fused with sums, would not write them in the place of its inputs
        # (gpt-oss, data=2 x fsdp=2 x expert=8, block inputs in host memory: 73.4 GB, and 62.6 so).
        dhidden_RF = jax.lax.optimization_barrier(dhidden_RF)
        sums: Arrays = tuple(experts.kernel.sums(dh_RF, plan.load_E) for dh_RF in dhidden_RF)  # rows of no expert have no gradient
        if not experts.matmul.frozen:
            dhidden_RF, sums = tie_weight_gradients(dhidden_RF, sums, dhidden_RF[0])
        grads = [grad.astype(experts.matmul.gradient_dtype) for grad in sums]
        # The devices of `expert` have other experts, each with the tokens of all of that axis.
        tokens = tuple(axis for axis in partitioner.rules.token_axes if axis != "expert")
        return dhidden_RF, tuple(reduce_gradient(partitioner, grad, HIDDEN_BIAS_AXES, tokens) for grad in grads)

    dhidden_RF, grads = _on_shards(experts, local, len(dhidden_RF), backward=True)(dhidden_RF, plan)
    return dhidden_RF, None, tuple(grad.astype(each.dtype) for grad, each in zip(grads, like, strict=True))


add_biases.defvjp(_add_forward, _add_backward)


def _on_shards(experts: Experts, local: Any, count: int, *, backward: bool = False) -> Any:
    rules = experts.matmul.partitioner.rules
    plan, rows = experts._plan_spec, (PartitionSpec(rules.token_axes, rules.mesh_axes("mlp") or None),) * count
    biases = (rules.spec(HIDDEN_BIAS_AXES),) * count
    in_specs, out_specs = ((rows, plan), (rows, biases)) if backward else ((rows, plan, biases), rows)
    return on_shards(experts.matmul.partitioner, local, in_specs, out_specs)


def _expert_of_rows(experts: Experts, plan: Plan, rows: int) -> jax.Array:
    """Return the expert of each row of a device's buffer, numbered on the device; rows of no expert have that before them."""
    starts_E = experts.kernel.starts(plan.load_E, rows)
    return jnp.searchsorted(starts_E, jnp.arange(rows), side="right", method="compare_all") - 1


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_biases(partitioner: Partitioner, experts_BTK: jax.Array, weights_BTK: jax.Array, bias_ED: jax.Array) -> jax.Array:
    """Return the sum over the experts of each token of weight * bias, float32 [B, T, D], sharded as between blocks."""
    weight_BTE = _weight_of_experts(experts_BTK, weights_BTK, bias_ED.shape[0])
    return jnp.einsum("bte,ed->btd", weight_BTE, bias_ED.astype(jnp.float32))


def _weighted_forward(partitioner: Partitioner, experts_BTK: jax.Array, weights_BTK: jax.Array, bias_ED: jax.Array) -> tuple[Any, Any]:
    return weighted_biases(partitioner, experts_BTK, weights_BTK, bias_ED), (experts_BTK, weights_BTK, bias_ED)


def _weighted_backward(partitioner: Partitioner, residuals: Any, dy_BTD: jax.Array) -> tuple[None, jax.Array, jax.Array]:
    experts_BTK, weights_BTK, bias_ED = residuals
    dweight_BTE = jnp.einsum("btd,ed->bte", dy_BTD, bias_ED.astype(jnp.float32))
    dweights_BTK = jnp.sum(jnp.where(experts_BTK[..., None] == jnp.arange(bias_ED.shape[0]), dweight_BTE[..., None, :], 0), -1)

    def local(experts_BTK: jax.Array, weights_BTK: jax.Array, dy_BTD: jax.Array) -> jax.Array:
        grad_ED = jnp.einsum("bte,btd->ed", _weight_of_experts(experts_BTK, weights_BTK, bias_ED.shape[0]), dy_BTD)
        tokens = (*partitioner.rules.mesh_axes("batch"), *partitioner.rules.mesh_axes("residual_seq"))
        return reduce_gradient(partitioner, grad_ED, UPDATE_BIAS_AXES, tokens)

    stream = partitioner.rules.spec(("batch", "residual_seq", None))
    run = on_shards(partitioner, local, (stream, stream, stream), partitioner.rules.spec(UPDATE_BIAS_AXES))
    return None, dweights_BTK, run(experts_BTK, weights_BTK, dy_BTD).astype(bias_ED.dtype)


weighted_biases.defvjp(_weighted_forward, _weighted_backward)


def _weight_of_experts(experts_BTK: jax.Array, weights_BTK: jax.Array, experts: int) -> jax.Array:
    return jnp.sum(jnp.where(experts_BTK[..., None] == jnp.arange(experts), weights_BTK[..., None], 0), -2)
