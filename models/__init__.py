"""Flax NNX decoders. `build` makes the model of a config.

Read decoder.py, block.py, attention/layer.py and mlp.py for the architecture, parallelize.py for how it is computed.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from ridgeline.configs.schema import ComputeConfig, ModelConfig, PrecisionConfig
from ridgeline.models.decoder import Decoder
from ridgeline.models.family import find_family
from ridgeline.models.matmul.fp8 import row_shards
from ridgeline.models.parallelize import parallelize
from ridgeline.models.params import ParamFactory
from ridgeline.sharding.partition import Partitioner

__all__ = ["build"]


def build(
    model: ModelConfig,
    compute: ComputeConfig,
    precision: PrecisionConfig,
    partitioner: Partitioner,
    rngs: nnx.Rngs,
    *,
    delayed: bool = False,
) -> Decoder:
    """Create the model of a config. Jittable, so that each parameter can be created directly in its shards.

    `delayed`: give every matmul of a layer an `Amax` for delayed scaling; without it scales are taken from the current tensors.
    """
    execution = parallelize(model, compute, precision, partitioner)
    make = ParamFactory(rngs, jnp.dtype(precision.params), row_shards=row_shards(partitioner) if delayed else None)
    return Decoder(find_family(model.family), model, execution, make)
