"""The OLMo 2 family (arXiv 2501.00656): norms after attention and MLP, and of whole queries and keys.

Initialization: normal(0, init_std = 0.02) for the token table and every matrix, residual projections included, no scaling by depth (what
Hugging Face's `initializer_range` does for this family; the published weights do not document more); norm scales 1.
Block: the default one, with the norms at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.llama import fields_from_hf, fields_to_hf, tensor_map
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import field, require
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "Olmo2ForCausalLM"
POST_NORMS = {"norm_position": "post", "qk_norm_dims": "all_heads"}
NORMS = {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"}


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of an OLMo 2 config.json. Raises UserError for what cannot be represented."""
    bias = field(config, "attention_bias", bool, False)
    fields = fields_from_hf({"rms_norm_eps": 1e-5, **config})
    return {**fields, **POST_NORMS, "attention_bias": bias, "output_bias": bias, "mlp_bias": False, "qk_norm": True, "sliding_window": None}


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return an OLMo 2 config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"output_bias": model.attention_bias, "mlp_bias": False, "qk_norm": True, "sliding_window": None})
    require(model, ARCHITECTURE, {"head_width": model.embed_dim // model.num_heads})  # it has no head_dim
    return {**fields_to_hf(model, ARCHITECTURE, **POST_NORMS), "attention_bias": model.attention_bias}


def rules(model: ModelConfig) -> list[TensorRule]:
    """Return the rules of the Llama layout with OLMo 2's norms."""
    return tensor_map(model, NORMS)


FAMILY = Family(
    name="olmo2",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=rules,
)
