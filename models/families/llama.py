"""The Llama 2 and 3.x family, and the Hugging Face layout that most other families share with it.

Initialization: normal(0, init_std = 0.02) for the token table and every matrix, residual projections included, no scaling by depth (what
Hugging Face's `initializer_range` does for this family; the published weights do not document more); biases 0, norm scales 1.
Block: the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import ACTIVATIONS_TO_HF, activation_from_hf, field, require, rope_from_hf, rope_to_hf
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "LlamaForCausalLM"
_LAYER = "model.layers.{layer}."
PLAIN = {
    "norm_position": "pre",
    "qk_norm_dims": "head",
    "rotary_fraction": 1.0,
    "rope_interleaved": False,
    "local_rope_theta": None,
    "full_attention_every": None,
    "full_attention_rope": True,
    "attention_chunk": None,
    "attention_temperature": None,
    "qk_norm_scale": True,
    "query_pre_attn_scalar": None,
    "attention_sinks": False,
    "mlp_clamp": None,
    "attention_softcap": None,
    "logit_softcap": None,
    "scale_embeddings": False,
    "latent_attention": None,
    "mtp_layers": 0,
}
"""What the oldest architectures have; their config.json has no fields for it."""


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a Llama config.json. Raises UserError for what cannot be represented."""
    attention_bias = field(config, "attention_bias", bool, False)
    return {
        **fields_from_hf(config),
        "attention_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": field(config, "mlp_bias", bool, False),
        "qk_norm": False,
        "sliding_window": None,
    }


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a Llama config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"output_bias": model.attention_bias, "qk_norm": False, "sliding_window": None})
    return {**fields_to_hf(model, ARCHITECTURE), "attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias}


def fields_from_hf(config: Mapping[str, Any], **rope: Any) -> dict[str, Any]:
    """Return the model section of a config.json of the Llama layout, the fields that are equal in its families.

    rope: the rotary fields, where `rope_from_hf` is not what reads them.
    """
    width, heads = field(config, "hidden_size", int), field(config, "num_attention_heads", int)
    return {
        "vocab_size": field(config, "vocab_size", int),
        "num_layers": field(config, "num_hidden_layers", int),
        "embed_dim": width,
        "num_heads": heads,
        "num_kv_heads": field(config, "num_key_value_heads", int, heads),
        "head_dim": field(config, "head_dim", int, width // max(heads, 1)),
        "mlp_dim": field(config, "intermediate_size", int),
        "max_seq_len": field(config, "max_position_embeddings", int),
        "norm": "rmsnorm",
        "norm_eps": field(config, "rms_norm_eps", float, 1e-6),
        "position": "rope",
        **(rope or rope_from_hf(config)),
        "activation": activation_from_hf(config, "hidden_act", "silu"),
        "gated_mlp": True,
        "tie_embeddings": field(config, "tie_word_embeddings", bool, False),
        "init_std": field(config, "initializer_range", float, 0.02),
    }


def fields_to_hf(model: ModelConfig, architecture: str, **differs: Any) -> dict[str, Any]:
    """Return the config.json fields that these families share. Raises UserError for what the layout cannot express.

    differs: what the family has in place of `PLAIN`.
    """
    require(model, architecture, {"norm": "rmsnorm", "position": "rope", "gated_mlp": True} | PLAIN | differs)
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.embed_dim,
        "intermediate_size": model.mlp_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "hidden_act": ACTIVATIONS_TO_HF[model.activation],
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        **rope_to_hf(model),
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "use_cache": True,
    }


NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
"""The norms of a block: Hugging Face's names and ours."""


def tensor_map(model: ModelConfig, norms: Mapping[str, str] = NORMS) -> list[TensorRule]:
    """Return the rules of the Llama layout, with the biases and head norms the model has, and the norms of its blocks."""
    rules = [
        TensorRule("model.embed_tokens.weight", ("embedding",), "in_out", vocab_dim=0),
        TensorRule("model.norm.weight", ("final_norm.scale",), "flat"),
        TensorRule(_LAYER + "self_attn.q_proj.weight", ("blocks.attention.query",), "out_in"),
        TensorRule(_LAYER + "self_attn.k_proj.weight", ("blocks.attention.key",), "out_in"),
        TensorRule(_LAYER + "self_attn.v_proj.weight", ("blocks.attention.value",), "out_in"),
        TensorRule(_LAYER + "self_attn.o_proj.weight", ("blocks.attention.out",), "out_in", in_dims=2),
        TensorRule(_LAYER + "mlp.gate_proj.weight", ("blocks.mlp.gate",), "out_in"),
        TensorRule(_LAYER + "mlp.up_proj.weight", ("blocks.mlp.up",), "out_in"),
        TensorRule(_LAYER + "mlp.down_proj.weight", ("blocks.mlp.down",), "out_in"),
    ]
    rules += [TensorRule(_LAYER + f"{theirs}.weight", (f"blocks.{ours}.scale",), "flat") for theirs, ours in norms.items()]
    if model.attention_bias:
        rules += [
            TensorRule(_LAYER + f"self_attn.{letter}_proj.bias", (f"blocks.attention.{name}_bias",), "flat")
            for letter, name in (("q", "query"), ("k", "key"), ("v", "value"))
        ]
    if model.output_bias:
        rules.append(TensorRule(_LAYER + "self_attn.o_proj.bias", ("blocks.attention.out_bias",), "flat"))
    if model.mlp_bias:
        rules += [TensorRule(_LAYER + f"mlp.{name}_proj.bias", (f"blocks.mlp.{name}_bias",), "flat") for name in ("gate", "up", "down")]
    if model.qk_norm:
        rules.append(TensorRule(_LAYER + "self_attn.q_norm.weight", ("blocks.attention.query_norm.scale",), "flat"))
        rules.append(TensorRule(_LAYER + "self_attn.k_norm.weight", ("blocks.attention.key_norm.scale",), "flat"))
    if not model.tie_embeddings:
        rules.append(TensorRule("lm_head.weight", ("output",), "out_in", vocab_dim=1))
    return rules


def fused(rules: list[TensorRule], name: str, parts: tuple[str, ...]) -> list[TensorRule]:
    """Return the rules with the tensors of `parts` of a layer, such as mlp.gate_proj, concatenated to one called `name`."""
    joined = [next(rule for rule in rules if rule.hf == f"{_LAYER}{part}.weight") for part in parts]
    one = replace(joined[0], hf=f"{_LAYER}{name}.weight", params=tuple(path for rule in joined for path in rule.params))
    return [one, *(rule for rule in rules if rule not in joined)]


FAMILY = Family(
    name="llama",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=tensor_map,
)
