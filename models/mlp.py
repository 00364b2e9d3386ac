"""The feed-forward half of a block.

Legend: B batch, T sequence, D embed width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from configs.schema import ModelConfig
from models.params import ParamFactory
from models.projection import Projector

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """Gated: down(act(gate(x)) * up(x)) (arXiv 2002.05202); plain: down(act(up(x)))."""

    def __init__(self, model: ModelConfig, residual_std: float, make: ParamFactory, projector: Projector) -> None:
        width, hidden = model.embed_dim, model.mlp_dim
        self.gate = make.normal((width, hidden), ("embed", "mlp"), model.init_std) if model.gated_mlp else None
        self.up = make.normal((width, hidden), ("embed", "mlp"), model.init_std)
        self.down = make.normal((hidden, width), ("mlp", "embed"), residual_std)
        self.gate_bias = make.constant((hidden,), ("mlp",), 0.0) if model.mlp_bias and model.gated_mlp else None
        self.up_bias = make.constant((hidden,), ("mlp",), 0.0) if model.mlp_bias else None
        self.down_bias = make.constant((width,), ("norm",), 0.0) if model.mlp_bias else None
        self.activation = model.activation
        self.project = projector

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Map normed inputs to the residual update, same shape and dtype."""
        act = ACTIVATIONS[self.activation]
        up_BTF = checkpoint_name(self._hidden(x_BTD, self.up, self.up_bias), "mlp_up")
        # Only the inputs of the elementwise part are kept for the backward pass; recomputing it costs less than moving its intermediates.
        if self.gate is None:
            hidden_BTF = jax.checkpoint(act, prevent_cse=False)(up_BTF)
        else:
            gate_BTF = checkpoint_name(self._hidden(x_BTD, self.gate, self.gate_bias), "mlp_gate")
            hidden_BTF = jax.checkpoint(lambda gate, up: act(gate) * up, prevent_cse=False)(gate_BTF, up_BTF)
        return self.project.add_bias(self.project("btf,fd->btd", hidden_BTF, self.down), self.down_bias)

    def _hidden(self, x_BTD: jax.Array, kernel: nnx.Param, bias: nnx.Param | None) -> jax.Array:
        h_BTF = self.project.add_bias(self.project("btd,df->btf", x_BTD, kernel), bias)
        return self.project.partitioner.constrain(h_BTF, "batch", "seq", "act_mlp")
