"""The feed-forward half of a block.

Legend: B batch, T sequence, D embed width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ridgeline.configs.schema import ModelConfig
from ridgeline.models.norms import Prepare, unprepared
from ridgeline.models.params import ParamFactory
from ridgeline.models.projection import Projector
from ridgeline.models.remat import Remat

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """Gated: down(act(gate(x)) * up(x)) (arXiv 2002.05202); plain: down(act(up(x)))."""

    def __init__(self, model: ModelConfig, remat: Remat, residual_std: float, make: ParamFactory, projector: Projector) -> None:
        width, hidden = model.embed_dim, model.mlp_dim
        self.gate = make.normal((width, hidden), ("embed", "mlp"), model.init_std) if model.gated_mlp else None
        self.up = make.normal((width, hidden), ("embed", "mlp"), model.init_std)
        self.down = make.normal((hidden, width), ("mlp", "embed"), residual_std)
        self.gate_bias = make.constant((hidden,), ("mlp",), 0.0) if model.mlp_bias and model.gated_mlp else None
        self.up_bias = make.constant((hidden,), ("mlp",), 0.0) if model.mlp_bias else None
        self.down_bias = make.constant((width,), ("norm",), 0.0) if model.mlp_bias else None
        self.input_recent, self.down_recent = make.recent(2 if model.gated_mlp else 1), make.recent()
        self.activation = model.activation
        self.project = projector
        self.remat = remat

    def __call__(self, x_BTD: jax.Array, prepare: Prepare = unprepared) -> jax.Array:
        """Map prepare(x), which is the normed input, to the residual update, same shape and dtype."""
        act, wrap = ACTIVATIONS[self.activation], self.remat.wrap_products

        def widen(x_BTD: jax.Array) -> list[jax.Array]:
            kernels = [kernel for kernel, _ in sides]
            wide_BTF = self.project.several(["btd,df->btf"] * len(sides), prepare(x_BTD), kernels, self.input_recent)
            return [self._hidden(each_BTF, bias) for each_BTF, (_, bias) in zip(wide_BTF, sides, strict=True)]

        # Only the inputs of the elementwise part are kept for the backward pass; recomputing it costs less than moving its intermediates.
        @partial(jax.checkpoint, prevent_cse=False)
        def activate(up_BTF: jax.Array, *gate_BTF: jax.Array) -> jax.Array:
            return act(gate_BTF[0]) * up_BTF if gate_BTF else act(up_BTF)

        def narrow(*wide_BTF: jax.Array) -> jax.Array:
            return self.project("btf,fd->btd", activate(*wide_BTF), self.down, self.down_recent)

        sides = [(self.up, self.up_bias)]
        sides += [] if self.gate is None else [(self.gate, self.gate_bias)]
        names = ("mlp_up", "mlp_gate")
        wide_BTF = [checkpoint_name(side_BTF, name) for side_BTF, name in zip(wrap(widen)(x_BTD), names, strict=False)]
        return self.project.add_bias(wrap(narrow)(*wide_BTF), self.down_bias)

    def _hidden(self, h_BTF: jax.Array, bias: nnx.Param | None) -> jax.Array:
        return self.project.partitioner.constrain(self.project.add_bias(h_BTF, bias), "batch", "seq", "act_mlp")
