"""A tiny decoder and batches for the model tests.

B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ridgeline import models
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import ComputeConfig, PrecisionConfig
from ridgeline.models.decoder import Decoder
from ridgeline.models.loss import LossSums, cross_entropy
from ridgeline.sharding.partition import Partitioner

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "num_layers": 3,
    "embed_dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_dim": 24,
    "max_seq_len": 64,
}


QUICK_COMPILE = {"xla_backend_optimization_level": 0}
"""These programs are compiled once and run once."""


def create(model: ModelConfig, compute: ComputeConfig, precision: PrecisionConfig, partitioner: Partitioner | None = None) -> Decoder:
    """Create a decoder from seed 0, on one device unless `partitioner` is given."""
    return models.build(model, compute, precision, partitioner or Partitioner.single(), nnx.Rngs(params=0))


@functools.cache
def initial_state(model: ModelConfig, precision: PrecisionConfig) -> nnx.State:
    """The parameters of a model; how it is computed does not change them."""
    return jax.jit(lambda: nnx.state(create(model, ComputeConfig(), precision)), compiler_options=QUICK_COMPILE)()


def build(
    model: ModelConfig | None = None,
    compute: ComputeConfig | None = None,
    precision: PrecisionConfig | None = None,
    partitioner: Partitioner | None = None,
) -> Decoder:
    """Build a decoder on one device unless `partitioner` is given, in float32 unless `precision` is; its parameters are not sharded."""
    model, precision = model or ModelConfig(**BASE), precision or PrecisionConfig(compute="float32")
    structure = nnx.split(nnx.eval_shape(lambda: create(model, compute or ComputeConfig(), precision, partitioner)))[0]
    return nnx.merge(structure, initial_state(model, precision))


def tokens(rows: int, length: int, vocab_size: int = BASE["vocab_size"], seed: int = 0) -> jax.Array:
    """Random token ids int32 [B, T]."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab_size, (rows, length)), jnp.int32)


def loss(decoder: Decoder, x_BTD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> LossSums:
    """The project's loss of hidden states."""
    return cross_entropy(
        x_BTD,
        decoder.unembedding(),
        targets_BT,
        weights_BT,
        vocab_size=decoder.model.vocab_size,
        chunk=1024,
        z_loss=0.0,
        partitioner=Partitioner.single(),
    )


def value_and_grad(decoder: Decoder, tokens_BT: jax.Array) -> tuple[jax.Array, Any]:
    """Mean next-token loss and its gradients as a nested dict."""
    graphdef, state = nnx.split(decoder)

    def objective(params: Any) -> jax.Array:
        merged = nnx.merge(graphdef, params)
        sums = loss(merged, merged(tokens_BT), jnp.roll(tokens_BT, -1, axis=1), jnp.ones(tokens_BT.shape))
        return sums.nats / sums.weight

    value, grads = jax.jit(jax.value_and_grad(objective), compiler_options=QUICK_COMPILE)(state)
    return value, nnx.to_pure_dict(grads)
