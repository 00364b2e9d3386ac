"""Multi-token prediction (DeepSeek V3, arXiv 2412.19437, section 2.2): modules that predict tokens beyond the next one.

Module k combines the hidden state of token i with the embedding of token i + k, runs one block, and predicts token i + k + 1 with the
model's own embedding and unembedding (equations 21 to 23). As in the published checkpoints, the projection reads the norm of the embedding
first and that of the hidden state second, and a module has a final norm of its own. The first module reads the final-normed hidden state
of the model (as in vLLM, SGLang and Megatron-LM), the next one that of the module before it (as in Megatron-LM).

Legend: B batch, T sequence, D embed width, M modules, H = 1 + M heads: the model's own and that of each module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.block import Block
from ridgeline.models.mup import matrix_std
from ridgeline.models.norms import NORMS, Norm
from ridgeline.models.parallelize import Execution
from ridgeline.models.params import ParamFactory

TARGETS, WEIGHTS = "mtp_targets", "mtp_weights"
"""Arrays of a batch (loaders/rows.py): the target of each module, int32 [B, T, M], and its weight, float32 [B, T, M]."""


class PredictionModule(nnx.Module):
    """One module; its parameters are stacked over all modules."""

    def __init__(self, block: type[Block], model: ModelConfig, execution: Execution, residual_std: float, make: ParamFactory) -> None:
        """`block`: of the family; `execution`: of a block outside of a scan."""
        width = model.embed_dim

        def norm() -> Norm:
            return NORMS[model.norm](width, model.norm_eps, make, execution.partitioner)

        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.projection = make.matrix((2 * width, width), ("embed", "stream"), matrix_std(model))
        last = model if model.has_experts(model.num_layers - 1) else model.without_experts()
        self.block = block(last, execution, residual_std, make)
        self.final_norm = norm()
        self.execution = execution

    def __call__(self, hidden_BTD: jax.Array, embedded_BTD: jax.Array, run_block: Callable[[Block, jax.Array], jax.Array]) -> jax.Array:
        """Return the hidden states [B, T, D] before the final norm, from those of the module before and the embeddings k tokens ahead.

        run_block: (block, residual stream) -> the residual stream after the block.
        """
        partitioner, matmul = self.execution.partitioner, self.execution.matmul

        def on_shards(x_BTD: jax.Array) -> jax.Array:
            return partitioner.constrain(x_BTD, "batch", "residual_seq", "act_embed")

        def combine(hidden_BTD: jax.Array, embedded_BTD: jax.Array) -> jax.Array:
            both = jnp.concatenate([self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)], axis=-1)
            return matmul("btd,de->bte", on_shards(both), self.projection)

        with jax.named_scope("mtp"):
            x_BTD = on_shards(self.execution.remat.wrap_matmuls(combine)(hidden_BTD, embedded_BTD))
            return on_shards(run_block(self.block, x_BTD))


@jax.custom_vjp
def gradients_together(*inputs: Any) -> Any:
    """Return the inputs of a module. Their gradients are all there before one is used.

    XLA would compute those of the parameters at the end of the backward pass, and keep what they are computed from until then: 7.1 GB of a
    module of Llama 3.2 1B with 65,536 tokens per device.
    """
    return inputs


gradients_together.defvjp(lambda *inputs: (inputs, None), lambda _, gradients: tuple(jax.lax.optimization_barrier(gradients)))


def future_tokens(batch: Mapping[str, jax.Array]) -> jax.Array | None:
    """Return the token k places ahead of each, for every module k, int32 [B, T, M]; None where a batch has no targets for modules."""
    if TARGETS not in batch:
        return None
    return jnp.concatenate([batch["targets"][..., None], batch[TARGETS][..., :-1]], axis=-1)


def of_all_heads(first_BT: jax.Array, others_BTM: jax.Array) -> jax.Array:
    """Return the arrays of the model's own head and of the modules as rows [B * H, T]; the heads of a row follow each other.

    Rows are sharded in contiguous blocks, so nothing moves between devices.
    """
    all_BHT = jnp.concatenate([first_BT[:, None], jnp.moveaxis(others_BTM, -1, 1)], axis=1)
    return all_BHT.reshape(-1, first_BT.shape[1])
