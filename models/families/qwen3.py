"""The Qwen3 (dense) family.

Initialization: normal(0, init_std = 0.02) for the token table and every matrix, residual projections included, no scaling by depth (what
Hugging Face's `initializer_range` does for this family; the published weights do not document more); biases 0, norm scales 1.
Block: the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.llama import fields_from_hf, fields_to_hf, tensor_map
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import field, require, window_from_hf, window_to_hf

ARCHITECTURE = "Qwen3ForCausalLM"


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a Qwen3 config.json. Raises UserError for what cannot be represented."""
    fields = fields_from_hf({"head_dim": 128, **config})
    attention_bias = field(config, "attention_bias", bool, False)
    return {
        **fields,
        "attention_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": False,
        "qk_norm": True,
        "sliding_window": window_from_hf(config, fields["num_layers"]),
    }


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a Qwen3 config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"output_bias": model.attention_bias, "mlp_bias": False, "qk_norm": True})
    return {**fields_to_hf(model, ARCHITECTURE), **window_to_hf(model), "attention_bias": model.attention_bias}


FAMILY = Family(
    name="qwen3",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=tensor_map,
)
