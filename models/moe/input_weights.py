"""Experts whose input, not their result, is multiplied by the router's weight (model.moe.scale_input).

The gate and up projections have no nonlinearity before them, so that their results are multiplied: (w x) W = w (x W). The transfers are
those of weighted results: no row of tokens is stored twice, and the gradients of the weights go back once.

Legend: B rows, T tokens of a row, K experts per token, R rows of the experts' buffers, F hidden width of an expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ridgeline.models.moe.experts import Experts, Plan
from ridgeline.sharding.manual import on_shards

Arrays = tuple[jax.Array, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_rows(experts: Experts, rows_RF: Arrays, weights_BTK: jax.Array, plan: Plan) -> Arrays:
    """Return arrays in the rows of the experts, each row times the weight of its assignment, in their dtype; 0 in empty rows.

    weights: of the router, float32; their values are in the plan, and their gradients are those of the result.
    """

    def local(rows_RF: Arrays, plan: Plan) -> Arrays:
        return tuple((h_RF * plan.row_weights[:, None]).astype(h_RF.dtype) for h_RF in rows_RF)

    specs = (experts._rows_spec,) * len(rows_RF)
    weighted: Arrays = on_shards(experts.matmul.partitioner, local, (specs, experts._plan_spec), specs)(rows_RF, plan)
    return weighted


def _forward(experts: Experts, rows_RF: Arrays, weights_BTK: jax.Array, plan: Plan) -> tuple[Arrays, Any]:
    return weighted_rows(experts, rows_RF, weights_BTK, plan), (rows_RF, weights_BTK, plan)


def _backward(experts: Experts, residuals: Any, grads_RF: Arrays) -> tuple[Arrays, jax.Array, None]:
    rows_RF, weights_BTK, plan = residuals

    def local(rows_RF: Arrays, weights_BTK: jax.Array, plan: Plan, grads_RF: Arrays) -> tuple[Arrays, jax.Array]:
        drows_RF = tuple((grad_RF * plan.row_weights[:, None]).astype(grad_RF.dtype) for grad_RF in grads_RF)
        parts_R = [jnp.sum(grad_RF.astype(jnp.float32) * h_RF, -1) for grad_RF, h_RF in zip(grads_RF, rows_RF, strict=True)]
        return drows_RF, experts._back(experts._assigned(sum(parts_R[1:], parts_R[0]), plan), plan, weights_BTK)

    specs = (experts._rows_spec,) * len(rows_RF)
    run = on_shards(
        experts.matmul.partitioner, local, (specs, experts._choice_spec, experts._plan_spec, specs), (specs, experts._choice_spec)
    )
    drows_RF, dweights_BTK = run(rows_RF, weights_BTK, plan, grads_RF)
    return drows_RF, dweights_BTK, None


weighted_rows.defvjp(_forward, _backward)
