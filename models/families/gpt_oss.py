"""The gpt-oss family (arXiv 2508.10925): experts with biases and a clamped SwiGLU, attention sinks, a window in every other layer.

Initialization: normal(0, init_std = 0.02) for every matrix, for sinks and the router's bias, no scaling by depth (Hugging Face's
`initializer_range`); other biases 0, norm scales 1. Block: the default one. Published weights of experts are MXFP4; they are dequantized
when they are read, and exported unquantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.llama import fields_from_hf, fields_to_hf
from ridgeline.models.families.llama import tensor_map as llama_tensors
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import field, layer_types_from_hf, layer_types_to_hf, refuse_unless, require, require_moe
from ridgeline.models.huggingface.expert_tensors import AllExperts, without_mlp
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "GptOssForCausalLM"
_LAYER = "model.layers.{layer}."
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
DEFAULTS = {"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128}
"""What config.json omits where it has Hugging Face's default."""


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a gpt-oss config.json. Raises UserError for what cannot be represented."""
    refuse_unless(config, {"swiglu_alpha": 1.702, "hidden_act": "silu"})
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {"rope_scaling": YARN, **{key: value for key, value in config.items() if key != "rope_scaling"}}
    fields = fields_from_hf({**DEFAULTS, **config})
    bias = field(config, "attention_bias", bool, True)
    return {
        **fields,
        **layer_types_from_hf({**DEFAULTS, **config}, fields["num_layers"], every=2),
        "moe": {
            "experts": field(config, "num_local_experts", int, 128),
            "experts_per_token": field(config, "num_experts_per_tok", int, 4),
            "logit_bias": True,
        },
        "activation": "gelu_sigmoid",
        "mlp_clamp": field(config, "swiglu_limit", float, 7.0),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": True,
        "qk_norm": False,
        "attention_sinks": True,
    }


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a gpt-oss config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"activation": "gelu_sigmoid", "mlp_bias": True, "qk_norm": False, "output_bias": model.attention_bias})
    if model.mlp_clamp is None:
        require(model, ARCHITECTURE, {"mlp_clamp": 7.0})
    moe = require_moe(model, ARCHITECTURE, {"normalize": True, "dense_layers": 0, "expert_dim": None, "logit_bias": True})
    differs = {"attention_sinks": True, "mlp_clamp": model.mlp_clamp, "full_attention_every": model.full_attention_every}
    fields = fields_to_hf(model, ARCHITECTURE, **differs)
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta"), **(fields.pop("rope_scaling") or {})}
    return {
        **fields,
        **layer_types_to_hf(model),
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": model.attention_bias,
        "swiglu_limit": model.mlp_clamp,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
    }


def tensor_map(model: ModelConfig) -> list[TensorRule]:
    """Return the rules of the gpt-oss layout: the experts of a layer are one tensor, in which gate and up take turns."""
    rules = without_mlp(llama_tensors(model), model)
    router, experts = _LAYER + "mlp.router.", _LAYER + "mlp.experts."
    return [
        *rules,
        TensorRule(_LAYER + "self_attn.sinks", ("blocks.attention.sinks",), "flat"),
        TensorRule(router + "weight", ("blocks.mlp.router",), "out_in"),
        TensorRule(router + "bias", ("blocks.mlp.logit_bias",), "flat"),
        AllExperts(experts + "gate_up_proj", ("blocks.mlp.gate", "blocks.mlp.up"), "in_out", order=(1, 0, 2)),
        AllExperts(experts + "gate_up_proj_bias", ("blocks.mlp.gate_bias", "blocks.mlp.up_bias"), "in_out", order=(0, 1)),
        AllExperts(experts + "down_proj", ("blocks.mlp.down",), "in_out", order=(1, 2, 0)),
        AllExperts(experts + "down_proj_bias", ("blocks.mlp.down_bias",), "in_out", order=(0, 1)),
    ]


FAMILY = Family(
    name="gpt_oss",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=tensor_map,
    reads_quantized=("mxfp4",),
)
