"""The Qwen3 family with a mixture of experts (arXiv 2505.09388): Qwen3's attention, experts instead of the MLP.

Initialization: normal(0, init_std = 0.02) for every matrix, router and experts included, no scaling by depth (Hugging Face's
`initializer_range`); norm scales 1. Block: the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families import qwen3
from ridgeline.models.families.llama import fields_to_hf
from ridgeline.models.families.llama import tensor_map as llama_tensors
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import field, refuse_unless, require, require_moe, window_to_hf
from ridgeline.models.huggingface.expert_tensors import with_experts
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "Qwen3MoeForCausalLM"
_MLP = "model.layers.{layer}.mlp."


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a Qwen3 MoE config.json. Raises UserError for what cannot be represented."""
    refuse_unless(config, {"decoder_sparse_step": 1})
    dense = field(config, "mlp_only_layers", list, [])
    if dense != list(range(len(dense))):
        raise UserError("config.json: mlp_only_layers must be the first layers, 0, 1, ... (model.moe.dense_layers), in order")
    experts = field(config, "num_experts", int, field(config, "num_local_experts", int, 128))
    width = field(config, "hidden_size", int) // max(1, field(config, "num_attention_heads", int))
    return {
        **qwen3.config_from_hf({"head_dim": width, "max_window_layers": 0, **config}),
        "moe": {
            "experts": experts,
            "experts_per_token": field(config, "num_experts_per_tok", int, 8),
            "expert_dim": field(config, "moe_intermediate_size", int, 768),
            "dense_layers": len(dense),
            "normalize": field(config, "norm_topk_prob", bool, False),
        },
    }


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a Qwen3 MoE config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"output_bias": model.attention_bias, "mlp_bias": False, "qk_norm": True})
    moe = require_moe(model, ARCHITECTURE, {})
    return {
        **fields_to_hf(model, ARCHITECTURE),
        **window_to_hf(model),
        "attention_bias": model.attention_bias,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": model.expert_width,
        "norm_topk_prob": moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(moe.dense_layers)),
    }


def tensor_map(model: ModelConfig) -> list[TensorRule]:
    """Return the rules of the Qwen3 MoE layout."""
    names = {name: f"{name}_proj" for name in ("gate", "up", "down")}
    return with_experts(llama_tensors(model), model, _MLP + "gate.weight", _MLP + "experts.{expert}.{matrix}.weight", names)


FAMILY = Family(
    name="qwen3_moe",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=tensor_map,
)
