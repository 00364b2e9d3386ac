"""The DeepSeek V3 family (arXiv 2412.19437; also R1): as V2, with sigmoid scores, a bias on the choice, and weights that sum to 1.

The published checkpoints also have a module for multi-token prediction, stored as one more layer; it is read where model.mtp_layers wants
it. Initialization: as V2, choice biases 0. Block: the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.deepseek_v2 import deepseek_moe, fields_of_deepseek, latent_from_hf, moe_from_hf
from ridgeline.models.families.deepseek_v2 import tensor_map as latent_tensors
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import field, refuse_unless
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "DeepseekV3ForCausalLM"
DEFAULTS = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a DeepSeek V3 config.json. Raises UserError for what cannot be represented."""
    refuse_unless(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    moe = {
        **moe_from_hf({**DEFAULTS, **config}),
        "score": "sigmoid",
        "normalize": field(config, "norm_topk_prob", bool, True),
        "groups": field(config, "n_group", int, 8),
        "groups_per_token": field(config, "topk_group", int, 4),
        "group_score": "best_two",
        "choice_bias": True,
    }
    return {**latent_from_hf(config), "rope_interleaved": field(config, "rope_interleave", bool, True), "moe": moe}


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a DeepSeek V3 config.json. Raises UserError naming a key the architecture cannot express."""
    only = {"score": "sigmoid", "group_score": "best_two", "choice_bias": True}
    deepseek_moe(model, ARCHITECTURE, only)
    fixed = {"rope_interleave": model.rope_interleaved, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return {**fields_of_deepseek(model, ARCHITECTURE, mtp_layers=model.mtp_layers), **fixed, "num_nextn_predict_layers": model.mtp_layers}


MODULE = {"enorm": "embedding_norm.scale", "hnorm": "hidden_norm.scale", "eh_proj": "projection", "shared_head.norm": "final_norm.scale"}
"""Tensors of a module of multi-token prediction: Hugging Face's names and ours."""


def tensor_map(model: ModelConfig) -> list[TensorRule]:
    """Return the rules of the DeepSeek V3 layout: that of V2, and modules of multi-token prediction as layers after those of the model.

    Published modules also have copies of the embedding and the unembedding, which are not read.
    """
    return with_modules(latent_tensors(model), model)


def with_modules(rules: list[TensorRule], model: ModelConfig) -> list[TensorRule]:
    """Return rules with those of modules of multi-token prediction, whose blocks are as the layers of `blocks`."""
    if not model.mtp_layers:
        return rules
    layers = tuple(range(model.num_layers, model.num_layers + model.mtp_layers))
    blocks = [rule for rule in rules if rule.params[0].startswith("blocks.")]
    rules += [
        replace(rule, params=tuple(path.replace("blocks.", "mtp.block.", 1) for path in rule.params), layers=layers) for rule in blocks
    ]
    return rules + [
        TensorRule(f"model.layers.{{layer}}.{theirs}.weight", (f"mtp.{ours}",), "out_in" if theirs == "eh_proj" else "flat", layers=layers)
        for theirs, ours in MODULE.items()
    ]


def prediction_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the beginnings of the names of the tensors of multi-token prediction: layers after those of the model."""
    first = field(config, "num_hidden_layers", int)
    return tuple(f"model.layers.{first + index}." for index in range(min(16, field(config, "num_nextn_predict_layers", int, 1))))


FAMILY = Family(
    name="deepseek_v3",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=tensor_map,
    ignored_tensors=prediction_layers,
    stores_mtp=True,
    quantizations=("fp8",),
)
