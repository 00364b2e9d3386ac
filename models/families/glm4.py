"""The GLM-4 family (GLM-4-0414): rotary positions, interleaved, in half of each head; four norms per block; fused gate and up matrices.

Initialization: normal(0, init_std = 0.02) for the token table and every matrix, residual projections included, no scaling by depth (what
Hugging Face's `initializer_range` does for this family; the published weights do not document more); biases 0, norm scales 1.
Block: the default one, with norms before and after attention and MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.llama import fields_from_hf, fields_to_hf, fused, tensor_map
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import field, require, rope_from_hf
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "Glm4ForCausalLM"
FIXED = {"norm_position": "both", "rope_interleaved": True}
NORMS = {
    "input_layernorm": "attention_norm",
    "post_self_attn_layernorm": "attention_post_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_mlp_layernorm": "mlp_post_norm",
}


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a GLM-4 config.json. Raises UserError for what cannot be represented."""
    defaults = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07}
    fields = fields_from_hf({**defaults, **config}, **rope_from_hf(config, rotary_fraction=0.5))
    biases = {"attention_bias": field(config, "attention_bias", bool, True), "output_bias": False, "mlp_bias": False}
    return {**fields, **FIXED, **biases, "qk_norm": False, "sliding_window": None}


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a GLM-4 config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"output_bias": False, "mlp_bias": False, "qk_norm": False, "sliding_window": None})
    fields = fields_to_hf(model, ARCHITECTURE, **FIXED, rotary_fraction=model.rotary_fraction)
    rotary = {"partial_rotary_factor": model.rotary_fraction, "attention_bias": model.attention_bias}
    return {**fields, **rotary, "pad_token_id": None}  # transformers' default is an id of GLM-4's vocabulary


def rules(model: ModelConfig) -> list[TensorRule]:
    """Return the rules of the Llama layout with GLM-4's norms and fused matrix."""
    return fused(tensor_map(model, NORMS), "mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))


FAMILY = Family(
    name="glm4",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=rules,
)
