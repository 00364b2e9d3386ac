"""Flax NNX decoders. `build` makes the model of a config.

Read decoder.py, block.py, attention/layer.py and mlp.py for the architecture, parallelize.py for how it is computed.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import ComputeConfig, PrecisionConfig
from ridgeline.configs.tuning_schema import LoraConfig
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
    lora: LoraConfig | None = None,
) -> Decoder:
    """Create the model of a config. Jittable, so that each parameter can be created directly in its shards.

    `delayed`: give every matmul of a layer an `Amax` for delayed scaling; without it scales are taken from the current tensors.
    `lora`: give matrices adapters in precision.params, if it has a rank; all other parameters are frozen then, and in the compute dtype.
    The adapters' values are drawn from the stream `adapters` of `rngs`.
    """
    frozen = lora is not None and lora.rank is not None
    execution = parallelize(model, compute, precision, partitioner, lora)
    make = ParamFactory(
        rngs,
        jnp.dtype(precision.compute if frozen else precision.params),
        row_shards=row_shards(partitioner) if delayed else None,
        lora=lora if frozen else None,
        adapter_dtype=jnp.dtype(precision.params),
    )
    return Decoder(find_family(model.family), model, execution, make)
