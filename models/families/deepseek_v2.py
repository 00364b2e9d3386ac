"""The DeepSeek V2 family (arXiv 2405.04434): multi-head latent attention, routed and shared experts after some dense layers.

Initialization: normal(0, init_std = 0.02) for every matrix, router and experts included, no scaling by depth (Hugging Face's
`initializer_range`); norm scales 1. Block: the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig, MoEConfig
from ridgeline.models.families.llama import fields_from_hf, fields_to_hf
from ridgeline.models.families.llama import tensor_map as llama_tensors
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import field, refuse_unless, require, require_moe, rope_from_hf
from ridgeline.models.huggingface.expert_tensors import with_experts, with_layers
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "DeepseekV2ForCausalLM"
FIXED = {"attention_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": False, "sliding_window": None}
"""Settings that these architectures do not have."""
METHODS = {"greedy": False, "group_limited_greedy": True}
"""topk_method -> whether groups are chosen before experts."""
_LAYER = "model.layers.{layer}."


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a DeepSeek V2 config.json. Raises UserError for what cannot be represented."""
    refuse_unless(config, {"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False})
    method = field(config, "topk_method", str, "greedy")
    if method not in METHODS:
        raise UserError(f"config.json: topk_method = {method!r} is not supported (only {', '.join(METHODS)})")
    moe = moe_from_hf({"n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 0, **config})
    groups = {"groups": field(config, "n_group", int), "groups_per_token": field(config, "topk_group", int)} if METHODS[method] else {}
    section = {**moe, **groups, "score": "softmax", "group_score": "best", "normalize": False}
    return {**latent_from_hf(config), "rope_interleaved": True, "moe": section}


def latent_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of DeepSeek V2 and V3 without the experts."""
    refuse_unless(config, {"attention_bias": False, "moe_layer_freq": 1})
    q_rank = config.get("q_lora_rank", 1536)  # null: no latent
    latent = {
        "q_rank": q_rank if q_rank is None else field(config, "q_lora_rank", int, 1536),
        "kv_rank": field(config, "kv_lora_rank", int, 512),
        "nope_dim": field(config, "qk_nope_head_dim", int, 128),
        "rope_dim": field(config, "qk_rope_head_dim", int, 64),
        "value_dim": field(config, "v_head_dim", int, 128),
    }
    fields = fields_from_hf(config, **rope_from_hf(config, mscale=True)) | {"head_dim": None, "latent_attention": latent}
    return {**fields, **FIXED}


def moe_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of model.moe that DeepSeek V2 and V3 share."""
    return {
        "experts": field(config, "n_routed_experts", int),
        "experts_per_token": field(config, "num_experts_per_tok", int),
        "expert_dim": field(config, "moe_intermediate_size", int),
        "shared_experts": field(config, "n_shared_experts", int),
        "dense_layers": field(config, "first_k_dense_replace", int),
        "scale": field(config, "routed_scaling_factor", float, 1.0),
    }


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a DeepSeek V2 config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"rope_interleaved": True})
    only = {"score": "softmax", "normalize": False, "choice_bias": False}
    moe = deepseek_moe(model, ARCHITECTURE, {**only, "group_score": "best"})
    method = "group_limited_greedy" if moe.grouped else "greedy"
    return {**fields_of_deepseek(model, ARCHITECTURE), "topk_method": method, "scoring_func": "softmax"}


def deepseek_moe(model: ModelConfig, architecture: str, needed: Mapping[str, Any]) -> MoEConfig:
    """Return model.moe; raises UserError for none, no shared experts, and other values than `needed`."""
    free = ("scale", "groups", "groups_per_token", "shared_experts")
    moe = model.moe
    own = {} if moe is None else {key: getattr(moe, key) for key in free} | {"shared_experts": max(1, moe.shared_experts)}
    return require_moe(model, architecture, {**own, **needed})


def fields_of_deepseek(model: ModelConfig, architecture: str, **differs: Any) -> dict[str, Any]:
    """Return the config.json fields of DeepSeek V2 and V3; `differs` as in `fields_to_hf`."""
    moe, latent = model.moe, model.latent_attention
    if latent is None:
        raise UserError(f"model.latent_attention = null is not supported by Hugging Face's {architecture}")
    require(model, architecture, FIXED)
    assert moe is not None
    fields = fields_to_hf(model, architecture, rope_interleaved=model.rope_interleaved, latent_attention=latent, **differs)
    del fields["head_dim"]
    return {
        **fields,
        "attention_bias": False,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": model.expert_width,
        "n_shared_experts": moe.shared_experts,
        "first_k_dense_replace": moe.dense_layers,
        "moe_layer_freq": 1,
        "routed_scaling_factor": moe.scale,
        "norm_topk_prob": moe.normalize,
        "n_group": moe.groups,
        "topk_group": moe.groups_per_token,
    }


def tensor_map(model: ModelConfig) -> list[TensorRule]:
    """Return the rules of the DeepSeek V2 and V3 layout."""
    latent, attention = model.latent_attention, _LAYER + "self_attn."
    assert latent is not None and model.moe is not None
    dense = [rule for rule in llama_tensors(model) if not rule.params[0].startswith("blocks.attention.")]
    matrices = {"kv_a_proj_with_mqa": "key_value_down", "kv_b_proj": "key_value"}
    matrices |= {"q_proj": "query"} if latent.q_rank is None else {"q_a_proj": "query_down", "q_b_proj": "query"}
    norms = {"kv_a_layernorm": "key_value_norm"} | ({} if latent.q_rank is None else {"q_a_layernorm": "query_norm"})
    dense += [TensorRule(f"{attention}{theirs}.weight", (f"blocks.attention.{ours}",), "out_in") for theirs, ours in matrices.items()]
    dense += [TensorRule(f"{attention}{theirs}.weight", (f"blocks.attention.{ours}.scale",), "flat") for theirs, ours in norms.items()]
    dense.append(TensorRule(f"{attention}o_proj.weight", ("blocks.attention.out",), "out_in", in_dims=2))
    names, mlp = {name: f"{name}_proj" for name in ("gate", "up", "down")}, _LAYER + "mlp."
    rules = with_experts(dense, model, mlp + "gate.weight", mlp + "experts.{expert}.{matrix}.weight", names)
    shared = [
        TensorRule(f"{mlp}shared_experts.{theirs}.weight", (f"blocks.mlp.shared.{ours}",), "out_in") for ours, theirs in names.items()
    ]
    if model.moe.choice_bias:
        shared.append(TensorRule(mlp + "gate.e_score_correction_bias", ("blocks.mlp.router_bias",), "flat"))
    return rules + with_layers(shared, model)


FAMILY = Family(
    name="deepseek_v2",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=tensor_map,
)
