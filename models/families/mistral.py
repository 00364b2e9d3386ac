"""The Mistral family (arXiv 2310.06825): the layout of Llama, with a sliding window in the first models.

Initialization: normal(0, init_std = 0.02) for the token table and every matrix, residual projections included, no scaling by depth (what
Hugging Face's `initializer_range` does for this family; the published weights do not document more); norm scales 1.
Block: the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.llama import fields_from_hf, fields_to_hf, tensor_map
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import field, require

ARCHITECTURE = "MistralForCausalLM"
FIXED = {"attention_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": False}
"""What no Mistral model has."""


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a Mistral config.json. Raises UserError for what cannot be represented."""
    window = field({"sliding_window": 4096, **config}, "sliding_window", int, None)  # null: none; absent: 4096
    return {**fields_from_hf({"num_key_value_heads": 8, **config}), **FIXED, "sliding_window": window}


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a Mistral config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, FIXED)
    return {**fields_to_hf(model, ARCHITECTURE), "sliding_window": model.sliding_window}


FAMILY = Family(
    name="mistral",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=tensor_map,
)
