"""The Llama 2 and 3.x family.

Initialisation: normal(0, init_std = 0.02) for the token table and every matrix, residual projections included, no scaling by depth (what
Hugging Face's `initializer_range` does for this family; the published weights do not say more); biases 0, norm scales 1.
Block: the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.schema import ModelConfig
from ridgeline.models.family import Family
from ridgeline.models.hf_fields import field, require
from ridgeline.models.hf_llama import fields_from_hf, fields_to_hf, tensor_map

ARCHITECTURE = "LlamaForCausalLM"


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a Llama config.json. Raises UserError for what we cannot represent."""
    attention_bias = field(config, "attention_bias", bool, False)
    return {
        **fields_from_hf(config),
        "attention_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": field(config, "mlp_bias", bool, False),
        "qk_norm": False,
        "sliding_window": None,
    }


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a Llama config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"output_bias": model.attention_bias, "qk_norm": False, "sliding_window": None})
    return {**fields_to_hf(model, ARCHITECTURE), "attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias}


FAMILY = Family(
    name="llama",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=tensor_map,
)
