"""The Gemma 2 family (arXiv 2408.00118): soft-capping, a sliding window in every other layer, four norms per block.

Initialization: normal(0, init_std = 0.02) for the token table and every matrix, residual projections included, no scaling by depth (what
Hugging Face's `initializer_range` does for this family; the published weights do not document more); norm scales 1 (stored weights 0).
Block: the default one, with norms before and after attention and MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.llama import fields_from_hf, fields_to_hf, tensor_map
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import (
    ACTIVATIONS_TO_HF,
    activation_from_hf,
    field,
    layer_types_from_hf,
    layer_types_to_hf,
    refuse_unless,
    require,
)
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "Gemma2ForCausalLM"
FIXED = {"norm": "rmsnorm_1p", "norm_position": "both", "scale_embeddings": True}
NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a Gemma 2 config.json. Raises UserError for what cannot be represented."""
    config = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, **config}
    fields = gemma_fields_from_hf(config)
    return {**fields, **layer_types_from_hf(config, fields["num_layers"], every=2), "qk_norm": False}


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a Gemma 2 config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"qk_norm": False})
    return gemma_fields_to_hf(model, ARCHITECTURE)


def gemma_fields_from_hf(config: Mapping[str, Any], **rope: Any) -> dict[str, Any]:
    """Return the model section of a Gemma 2 or 3 config.json without the kinds of layers; `rope` as in `fields_from_hf`."""
    refuse_unless(config, {"use_bidirectional_attention": False})
    bias = field(config, "attention_bias", bool, False)
    defaults = {"head_dim": 256, "tie_word_embeddings": True}
    return {
        **fields_from_hf({**defaults, **config}, **rope),
        **FIXED,
        "activation": activation_from_hf(config, "hidden_activation", "gelu_pytorch_tanh"),
        "query_pre_attn_scalar": field(config, "query_pre_attn_scalar", float, 256.0),
        "attention_softcap": field(config, "attn_logit_softcapping", float, None),
        "logit_softcap": field(config, "final_logit_softcapping", float, None),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": False,
    }


def gemma_fields_to_hf(model: ModelConfig, architecture: str) -> dict[str, Any]:
    """Return the config.json fields of Gemma 2 and 3. Raises UserError naming a key the architectures cannot express."""
    require(model, architecture, {"output_bias": model.attention_bias, "mlp_bias": False})
    own = ("full_attention_every", "local_rope_theta", "query_pre_attn_scalar", "attention_softcap", "logit_softcap")
    fields = fields_to_hf(model, architecture, **FIXED, **{key: getattr(model, key) for key in own})
    scalar = model.query_pre_attn_scalar or model.head_width
    del fields["hidden_act"]
    return {
        **fields,
        **layer_types_to_hf(model),
        "hidden_activation": ACTIVATIONS_TO_HF[model.activation],
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
        "attention_bias": model.attention_bias,
    }


def rules(model: ModelConfig) -> list[TensorRule]:
    """Return the rules of the Llama layout with Gemma's norms."""
    return tensor_map(model, NORMS)


FAMILY = Family(
    name="gemma2",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=rules,
)
