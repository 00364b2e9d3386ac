"""The Mixtral family (arXiv 2401.04088): the Llama architecture with a mixture of experts in every layer.

Initialization: normal(0, init_std = 0.02) for every matrix, router and experts included, no scaling by depth (Hugging Face's
`initializer_range`); norm scales 1. Block: the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.llama import fields_from_hf, fields_to_hf
from ridgeline.models.families.llama import tensor_map as llama_tensors
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import field, require, require_moe
from ridgeline.models.huggingface.expert_tensors import with_experts
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "MixtralForCausalLM"
_MOE = "model.layers.{layer}.block_sparse_moe."


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a Mixtral config.json. Raises UserError for what cannot be represented."""
    return {
        **fields_from_hf({"rope_theta": 1e6, "rms_norm_eps": 1e-5, **config}),
        "moe": {"experts": field(config, "num_local_experts", int, 8), "experts_per_token": field(config, "num_experts_per_tok", int, 2)},
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_window": field(config, "sliding_window", int, None),
    }


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a Mixtral config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"attention_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": False})
    moe = require_moe(model, ARCHITECTURE, {"normalize": True, "dense_layers": 0, "expert_dim": None})
    return {
        **fields_to_hf(model, ARCHITECTURE),
        "sliding_window": model.sliding_window,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
    }


def tensor_map(model: ModelConfig) -> list[TensorRule]:
    """Return the rules of the Mixtral layout."""
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    return with_experts(llama_tensors(model), model, _MOE + "gate.weight", _MOE + "experts.{expert}.{matrix}.weight", names)


FAMILY = Family(
    name="mixtral",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=tensor_map,
)
