"""The Phi-3 and Phi-4 family (arXiv 2404.14219, 2412.08905): as Llama, with fused matrices in the checkpoints.

Initialization: normal(0, init_std = 0.02) for the token table and every matrix, residual projections included, no scaling by depth (what
Hugging Face's `initializer_range` does for this family; the published weights do not document more); norm scales 1.
Block: the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.llama import fields_from_hf, fields_to_hf, fused, tensor_map
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import field, require, rope_from_hf
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "Phi3ForCausalLM"
FIXED = {"attention_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": False}
"""What no Phi-3 model has."""


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a Phi-3 config.json. Raises UserError for what cannot be represented, such as longrope."""
    fields = fields_from_hf({"rms_norm_eps": 1e-5, **config}, **rope_from_hf(config, rotary_fraction=1.0))
    return {**fields, **FIXED, "sliding_window": field(config, "sliding_window", int, None)}


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a Phi-3 config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {**FIXED, "rope_scaling": None, "head_width": model.embed_dim // model.num_heads})
    fields = fields_to_hf(model, ARCHITECTURE, rotary_fraction=model.rotary_fraction)
    # transformers' defaults are ids of Phi-3's vocabulary, and padding would give a row of the table no gradient
    return {**fields, "sliding_window": model.sliding_window, "pad_token_id": None}


def rules(model: ModelConfig) -> list[TensorRule]:
    """Return the rules of the Llama layout with the two fused matrices."""
    joined = fused(tensor_map(model), "self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
    return fused(joined, "mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))


FAMILY = Family(
    name="phi3",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=rules,
)
