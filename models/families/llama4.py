"""The Llama 4 family, text only (Scout and Maverick): chunked attention with rotary positions in three of four layers, attention to all
earlier tokens without positions in the others; a shared expert and one of many in each or in every other layer.

Initialization: normal(0, init_std = 0.02) for every matrix, router and experts included, no scaling by depth (Hugging Face's
`initializer_range`); norm scales 1. Block: the default one. Published checkpoints also have a vision encoder, which is not part of the
model: import reads `text_config` and skips its tensors, and export writes the text model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.llama import fields_from_hf, fields_to_hf
from ridgeline.models.families.llama import tensor_map as llama_tensors
from ridgeline.models.family import Family, Wrapper
from ridgeline.models.huggingface.config import field, refuse_unless, require, require_moe
from ridgeline.models.huggingface.expert_tensors import AllExperts, with_layers, without_mlp
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "Llama4ForCausalLM"
CHUNKED, FULL = "chunked_attention", "full_attention"
DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
"""What config.json omits where it has Hugging Face's default."""
_MLP = "model.layers.{layer}.feed_forward."


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a Llama 4 text config.json. Raises UserError for what cannot be represented."""
    fields = fields_from_hf({**DEFAULTS, **config})
    bias, layers = field(config, "attention_bias", bool, False), fields["num_layers"]
    every = _full_attention_every(config, layers)
    tuned = config.get("attn_temperature_tuning", True)  # a number in the first published configs
    temperature = {"scale": field(config, "attn_scale", float, 0.1), "interval": int(field(config, "floor_scale", float, 8192))}
    return {
        **fields,
        "rope_interleaved": True,
        "mlp_dim": field(config, "intermediate_size_mlp", int, 16384),
        "moe": {
            "experts": field(config, "num_local_experts", int, 16),
            "experts_per_token": field(config, "num_experts_per_tok", int, 1),
            "expert_dim": field(config, "intermediate_size", int, 8192),
            "shared_experts": 1,
            "every": _experts_every(config, layers),
            "score": "sigmoid",
            "normalize": False,
            "scale_input": True,
        },
        "attention_chunk": field({"attention_chunk_size": 8192, **config}, "attention_chunk_size", int),
        "full_attention_every": every,
        "full_attention_rope": every is None,
        "attention_temperature": temperature if tuned and every is not None else None,
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": False,
        "qk_norm": (normed := field(config, "use_qk_norm", bool, True)),
        "qk_norm_scale": not normed,
        "sliding_window": None,
    }


def _full_attention_every(config: Mapping[str, Any], layers: int) -> int | None:
    """Return how many layers after each other have one with attention to all earlier tokens, which has no positions; None: no layer has."""
    interval = max(1, field(config, "no_rope_layer_interval", int, 4))
    rotary = field(config, "no_rope_layers", list, []) or [int((layer + 1) % interval != 0) for layer in range(layers)]
    every = rotary.index(0) + 1 if 0 in rotary else None
    if every == 1 or rotary != [int(every is None or (layer + 1) % every != 0) for layer in range(layers)]:
        raise _unsupported("no_rope_layers", rotary, "a 0 in every n-th layer, n at least 2")
    kinds = [CHUNKED if positions else FULL for positions in rotary]
    refuse_unless(config, {"layer_types": kinds})
    return every


def _experts_every(config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers after each other have one with experts."""
    step = field(config, "interleave_moe_layer_step", int, 1)
    listed = config.get("moe_layers")
    found = field(config, "moe_layers", list, list(range(step - 1, layers, max(1, step))))
    every = found[0] + 1 if found and isinstance(found[0], int) else 0
    if not 1 <= every <= layers or found != list(range(every - 1, layers, every)):
        raise _unsupported(
            "moe_layers" if listed is not None else "interleave_moe_layer_step",
            step if listed is None else found,
            "experts in every n-th layer",
        )
    return every


def _unsupported(key: str, value: int | Sequence[Any], allowed: str) -> UserError:
    shown = value if isinstance(value, int) else ", ".join(map(str, value[:12]))
    return UserError(f"config.json: {key} = {shown} is not supported (only {allowed})")


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a Llama 4 text config.json. Raises UserError naming a key the architecture cannot express."""
    every, temperature = model.full_attention_every, model.attention_temperature
    require(model, ARCHITECTURE, {"output_bias": model.attention_bias, "mlp_bias": False, "sliding_window": None})
    require(model, ARCHITECTURE, {"qk_norm_scale": not model.qk_norm, "full_attention_rope": every is None})
    if model.attention_chunk is None:
        require(model, ARCHITECTURE, {"attention_chunk": 8192})
    only = {"score": "sigmoid", "normalize": False, "scale_input": True, "dense_layers": 0, "shared_experts": 1}
    moe = require_moe(model, ARCHITECTURE, {**only, "every": 1 if model.moe is None else model.moe.every})
    own = ("full_attention_every", "full_attention_rope", "attention_chunk", "attention_temperature", "qk_norm_scale")
    differs = {"rope_interleaved": True} | {key: getattr(model, key) for key in own}
    rotary = [int(every is None or (layer + 1) % every != 0) for layer in range(model.num_layers)]
    return {
        **fields_to_hf(model, ARCHITECTURE, **differs),
        "intermediate_size": model.expert_width,
        "intermediate_size_mlp": model.mlp_dim,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
        "interleave_moe_layer_step": moe.every,
        "moe_layers": [layer for layer in range(model.num_layers) if model.has_experts(layer)],
        "no_rope_layers": rotary,
        "layer_types": [CHUNKED if positions else FULL for positions in rotary],
        "attention_chunk_size": model.attention_chunk,
        "attn_temperature_tuning": temperature is not None,
        **({} if temperature is None else {"attn_scale": temperature.scale, "floor_scale": temperature.interval}),
        "use_qk_norm": model.qk_norm,
        "attention_bias": model.attention_bias,
    }


def tensor_map(model: ModelConfig) -> list[TensorRule]:
    """Return the rules of the Llama 4 layout: the experts of a layer are one tensor, in which gate and up follow each other."""
    without_norms = llama_tensors(model.model_copy(update={"qk_norm": False}))
    dense = [replace(rule, hf=rule.hf.replace(".mlp.", ".feed_forward.")) for rule in without_norms]
    of_experts: list[TensorRule] = [
        TensorRule(_MLP + "router.weight", ("blocks.mlp.router",), "out_in"),
        AllExperts(_MLP + "experts.gate_up_proj", ("blocks.mlp.gate", "blocks.mlp.up"), "in_out", order=(1, 0, 2), concatenated=True),
        AllExperts(_MLP + "experts.down_proj", ("blocks.mlp.down",), "in_out", order=(1, 2, 0)),
    ]
    for name in ("gate", "up", "down"):
        of_experts.append(TensorRule(f"{_MLP}shared_expert.{name}_proj.weight", (f"blocks.mlp.shared.{name}",), "out_in"))
    return without_mlp(dense, model) + with_layers(of_experts, model)


FAMILY = Family(
    name="llama4",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    hf_model_type="llama4_text",
    hf_wrapper=Wrapper("Llama4ForConditionalGeneration", "llama4", "language_model.", ("vision_model.", "multi_modal_projector.")),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=tensor_map,
)
