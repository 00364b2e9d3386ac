"""The mixture of experts of a block, in place of its MLP.

Legend: B rows, T tokens of a row, D embed width, K experts per token, R rows of the experts' buffers, F hidden width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.lora import adapters_of
from ridgeline.models.mlp import MLP
from ridgeline.models.moe.adapters import make_expert_adapters
from ridgeline.models.moe.biases import HIDDEN_BIAS_AXES, UPDATE_BIAS_AXES, add_biases, weighted_biases
from ridgeline.models.moe.experts import GRADIENT_INPUTS, MATRIX_AXES, Plan
from ridgeline.models.moe.router import ROUTER_AXES, Choice, RouterSums, choose, router_logits, sums_of
from ridgeline.models.mup import matrix_std
from ridgeline.models.parallelize import Execution
from ridgeline.models.params import ParamFactory, may_defer
from ridgeline.models.remat import GROUPED_MATMUL


class RouterState(nnx.Variable):
    """The `RouterSums` of the last call."""


class MixtureOfExperts(nnx.Module):
    """Sum over the chosen experts of weight * expert(x), plus the shared experts (arXiv 2101.03961, 2401.06066)."""

    def __init__(self, model: ModelConfig, execution: Execution, residual_std: float, make: ParamFactory) -> None:
        moe = model.moe
        assert moe is not None
        width, hidden, experts, std = model.embed_dim, model.expert_width, moe.experts, matrix_std(model)
        self.router = make.normal((width, experts), ROUTER_AXES, model.init_std / model.width_ratio)
        # Not trained by the optimizer, and in float32 whatever the parameters are: its steps are small.
        self.router_bias = replace(make, dtype=jnp.dtype("float32")).constant((experts,), ("router",), 0.0) if moe.choice_bias else None
        shape = (width, experts, hidden)
        self.gate = make.matrix(shape, MATRIX_AXES, std, (0,)) if model.gated_mlp else None
        self.up = make.matrix(shape, MATRIX_AXES, std, (0,))
        self.down = make.matrix(shape, MATRIX_AXES, residual_std, (2,))  # [D, E, F] as the others
        for matrix in (self.gate, self.up, self.down):
            may_defer(matrix, *GRADIENT_INPUTS, dtype=execution.matmul.gradient_dtype)
        self.logit_bias = make.normal((experts,), ("router",), model.init_std) if moe.logit_bias else None
        bias = model.mlp_bias
        self.gate_bias = make.constant((experts, hidden), HIDDEN_BIAS_AXES, 0.0) if bias and model.gated_mlp else None
        self.up_bias = make.constant((experts, hidden), HIDDEN_BIAS_AXES, 0.0) if bias else None
        self.down_bias = make.constant((experts, width), UPDATE_BIAS_AXES, 0.0) if bias else None
        self.adapters = make_expert_adapters(make, width, experts, hidden, gated=model.gated_mlp)
        shared = model.without_experts(moe.shared_experts * hidden) if moe.shared_experts else None
        self.shared = None if shared is None else MLP(shared, execution, residual_std, make)
        self.moe, self.execution = moe, execution

    def __call__(self, x_BTD: jax.Array, norm: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Map the residual stream to its update by the experts of norm(x), same shape and dtype; set the sums of the router."""
        update_BTD, sums = self.with_sums(x_BTD, norm)
        self.set_sums(sums)
        return update_BTD

    @property
    def matrices(self) -> list[nnx.Param]:
        """Trained matrices of the experts."""
        return [matrix for matrix in (self.up, self.gate, self.down) if isinstance(matrix, nnx.Param)]

    def gather(self, after: jax.Array) -> tuple[jax.Array, list[Any]]:
        """Return an array as it is, and the matrices gathered over fsdp (`Experts.gather`)."""
        assert self.execution.experts is not None
        return self.execution.experts.gather(self.matrices, after)

    def set_sums(self, sums: RouterSums) -> None:
        """Set what `router_sums` returns."""
        self.sums = RouterState(sums)

    def with_sums(self, x_BTD: jax.Array, norm: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, RouterSums]:
        """Return the update and the sums of the router, and change nothing: for a function that is computed a second time."""
        execution = self.execution
        experts, remat, partitioner = execution.experts, execution.remat, execution.partitioner
        assert experts is not None

        def widen(x_BTD: jax.Array) -> tuple[list[jax.Array], Choice, Plan, RouterSums]:
            x_BTD = partitioner.constrain(norm(x_BTD), "batch", "residual_seq", "act_embed")
            with jax.named_scope("router"):
                bias_E = None if self.router_bias is None else self.router_bias[...]
                logits_BTE = router_logits(partitioner, x_BTD, self.router[...])
                if self.logit_bias is not None:
                    logits_BTE += self.logit_bias[...].astype(jnp.float32)
                choice, scores_BTE = choose(partitioner, self.moe, logits_BTE, bias_E)
                plan, dropped = experts.plan(choice.experts_BTK, choice.weights_BTK)
                sums = sums_of(partitioner, logits_BTE, scores_BTE, choice, dropped)
            kernels = (self.up,) if self.gate is None else (self.up, self.gate)
            return experts.widen(x_BTD, plan, kernels, adapters_of(self.adapters, "up", "gate")[: len(kernels)]), choice, plan, sums

        biases = tuple(bias[...] for bias in (self.up_bias, self.gate_bias) if bias is not None)

        def narrow(choice: Choice, plan: Plan, *wide_RF: jax.Array) -> jax.Array:
            wide_RF = add_biases(experts, wide_RF, plan, biases) if biases else wide_RF
            update_BTD = experts.narrow(wide_RF, choice.weights_BTK, plan, self.down, *adapters_of(self.adapters, "down"))
            if self.down_bias is None:
                return update_BTD
            return (update_BTD + weighted_biases(partitioner, *choice, self.down_bias[...])).astype(update_BTD.dtype)

        wide_RF, choice, plan, sums = remat.wrap_matmuls(widen)(x_BTD)
        names = ("mlp_up", "mlp_gate")
        wide_RF = [checkpoint_name(checkpoint_name(side_RF, name), GROUPED_MATMUL) for side_RF, name in zip(wide_RF, names, strict=False)]
        update_BTD: jax.Array = remat.wrap_matmuls(narrow)(choice, plan, *wide_RF)
        return (update_BTD if self.shared is None else update_BTD + self.shared(x_BTD, norm)), sums


def router_sums(block: Any) -> RouterSums | None:
    """Return the sums of the router after a call of a block; None for a block without experts."""
    layer = getattr(block, "mlp", None)
    return layer.sums.get_raw_value() if isinstance(layer, MixtureOfExperts) else None
