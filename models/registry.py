"""The families there are, and `build`, the one way to make a model."""

from __future__ import annotations

from flax import nnx

from ridgeline.configs.errors import unknown_name
from ridgeline.configs.schema import ComputeConfig, ModelConfig, PrecisionConfig
from ridgeline.models import gpt2, llama, qwen2, qwen3
from ridgeline.models.decoder import Decoder
from ridgeline.models.family import Family
from ridgeline.sharding.partition import Partitioner

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (gpt2, llama, qwen2, qwen3)}


def family(name: str) -> Family:
    """Return the family called `name`; raises UserError with the nearest name when there is none."""
    if name not in FAMILIES:
        raise unknown_name("model family (model.family)", name, FAMILIES)
    return FAMILIES[name]


def build(
    model: ModelConfig,
    compute: ComputeConfig,
    precision: PrecisionConfig,
    partitioner: Partitioner,
    rngs: nnx.Rngs,
    *,
    delayed: bool = False,
) -> Decoder:
    """Create the model of a config. Jittable, so that parameters can be created directly in their shards.

    `delayed`: give every product of a layer a `Recent` for its scales; without, they come from the tensors themselves.
    """
    return Decoder(family(model.family), model, compute, precision, partitioner, rngs, delayed=delayed)
