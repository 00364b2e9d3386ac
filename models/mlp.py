"""The MLP of a block.

Legend: B batch, T sequence, D embed width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.activation import activated
from ridgeline.models.lora import adapters_of, make_adapters
from ridgeline.models.mup import matrix_std
from ridgeline.models.parallelize import Execution
from ridgeline.models.params import ParamFactory


@jax.custom_vjp
def materialized(x: jax.Array) -> jax.Array:
    """Return x, which XLA must have in memory: it fuses nothing after it into the operation that computes it. Its gradient is as it is."""
    return jax.lax.optimization_barrier(x)


materialized.defvjp(lambda x: (jax.lax.optimization_barrier(x), None), lambda _, gradient: (gradient,))


class MLP(nnx.Module):
    """Gated: down(act(gate(x)) * up(x)) (arXiv 2002.05202); plain: down(act(up(x)))."""

    def __init__(self, model: ModelConfig, execution: Execution, residual_std: float, make: ParamFactory) -> None:
        width, hidden, std = model.embed_dim, model.mlp_dim, matrix_std(model)
        self.gate = make.matrix((width, hidden), ("embed", "mlp"), std) if model.gated_mlp else None
        self.up = make.matrix((width, hidden), ("embed", "mlp"), std)
        self.down = make.matrix((hidden, width), ("mlp", "embed"), residual_std)
        self.gate_bias = make.constant((hidden,), ("mlp",), 0.0) if model.mlp_bias and model.gated_mlp else None
        self.up_bias = make.constant((hidden,), ("mlp",), 0.0) if model.mlp_bias else None
        self.down_bias = make.constant((width,), ("norm",), 0.0) if model.mlp_bias else None
        self.adapters = make_adapters(make, gate=self.gate, up=self.up, down=self.down)
        self.input_recent, self.down_recent = make.amax(2 if model.gated_mlp else 1), make.amax()
        self.activation, self.mlp_clamp = model.activation, model.mlp_clamp
        self.execution = execution

    def __call__(self, x_BTD: jax.Array, norm: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Map the residual stream to its update by the MLP of norm(x), same shape and dtype."""
        matmul = self.execution.matmul
        sides = [(self.up, self.up_bias)] + ([] if self.gate is None else [(self.gate, self.gate_bias)])
        adapters = adapters_of(self.adapters, "up", "gate")[: len(sides)]

        def widen(x_BTD: jax.Array) -> list[jax.Array]:
            kernels = [kernel for kernel, _ in sides]
            wide_BTF = matmul.shared(["btd,df->btf"] * len(sides), x_BTD, kernels, self.input_recent, adapters)
            return [self._hidden(each_BTF, bias) for each_BTF, (_, bias) in zip(wide_BTF, sides, strict=True)]

        # Only the inputs of the elementwise part are saved for the backward pass; recomputing it is faster than loading its intermediates.
        @partial(jax.checkpoint, prevent_cse=False)
        def activate(up_BTF: jax.Array, *gate_BTF: jax.Array) -> jax.Array:
            return activated(self.activation, self.mlp_clamp, up_BTF, *gate_BTF)

        def narrow(*wide_BTF: jax.Array) -> jax.Array:
            return matmul("btf,fd->btd", activate(*wide_BTF), self.down, self.down_recent, adapters_of(self.adapters, "down"))

        wide_BTF = self.execution.after_norm(norm, widen, x_BTD)
        wide_BTF = [checkpoint_name(side_BTF, name) for side_BTF, name in zip(wide_BTF, ("mlp_up", "mlp_gate"), strict=False)]
        return matmul.add_bias(self.execution.remat.wrap_matmuls(narrow)(*wide_BTF), self.down_bias)

    def _hidden(self, h_BTF: jax.Array, bias: nnx.Param | None) -> jax.Array:
        h_BTF = self.execution.partitioner.constrain(self.execution.matmul.add_bias(h_BTF, bias), "batch", "seq", "act_mlp")
        # XLA makes a kernel with two results of a float8 matmul, this activation and its input, which it cannot compile (jaxlib 0.10.2).
        return materialized(h_BTF) if self.execution.matmul.float8 and self.activation == "gelu_tanh" else h_BTF
