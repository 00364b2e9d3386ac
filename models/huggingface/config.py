"""Reading and writing the fields of a Hugging Face config.json that several families share.

A field that changes the computation and is not supported raises UserError with its name; dropout, cache and training hints are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.configs.foreign import shortened
from ridgeline.configs.model_schema import ModelConfig, MoEConfig, RopeScaling
from ridgeline.configs.section import Section

ACTIVATIONS_FROM_HF = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "relu": "relu",
}
"""Hugging Face activation -> model.activation."""
ACTIVATIONS_TO_HF = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "gelu_sigmoid": "quick_gelu", "relu": "relu"}

LARGEST = 2**31 - 1
"""Largest number of a config.json."""

YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "mscale": None, "mscale_all_dim": None, "attention_factor": None}
"""The yarn settings that models/rope.py implements."""


def field(config: Mapping[str, Any], key: str, kind: type, default: Any = ...) -> Any:
    """Return config.json's `key` as `kind`; without a default the key is required. Raises UserError naming the key."""
    value = config.get(key)
    if value is None:
        if default is ...:
            raise UserError(f"config.json lacks '{key}'")
        return default
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and not abs(value) <= LARGEST:  # of another size, infinite or not a number
        raise UserError(f"config.json: '{key}' is {shortened(value)}, out of range")
    if kind is float and number:
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"config.json: '{key}' is {shortened(repr(value))}, expected {kind.__name__}")
    return value


def refuse_unless(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise UserError when a key has another value than the only supported one (null counts as absent)."""
    for key, value in expected.items():
        if config.get(key) is not None and config[key] != value:
            raise UserError(f"config.json: {key} = {shortened(repr(config[key]))} is not supported (only {value!r})")


def activation_from_hf(config: Mapping[str, Any], key: str, default: str) -> str:
    """Return model.activation. Raises UserError for an unsupported one."""
    name = field(config, key, str, default)
    if name not in ACTIVATIONS_FROM_HF:
        raise unknown_name(f"activation in config.json ({key})", shortened(name), ACTIVATIONS_FROM_HF)
    return ACTIVATIONS_FROM_HF[name]


def rope_from_hf(config: Mapping[str, Any], *, rotary_fraction: float | None = None, mscale: bool = False) -> dict[str, Any]:
    """Return rope_theta, rope_scaling and rotary_fraction of the model section.

    Reads both spellings: `rope_theta` beside `rope_scaling` (transformers 4) and everything in `rope_parameters` (transformers 5).
    rotary_fraction: the default of partial_rotary_factor; None: the family rotates whole heads. mscale: yarn may have DeepSeek's factors.
    Raises UserError for an unsupported scaling.
    """
    rope = {**field(config, "rope_scaling", dict, {}), **field(config, "rope_parameters", dict, {})}
    if rotary_fraction is None:
        refuse_unless(config, {"partial_rotary_factor": 1.0})
        refuse_unless(rope, {"partial_rotary_factor": 1.0})
    whole = 1.0 if rotary_fraction is None else rotary_fraction
    fraction = field(rope, "partial_rotary_factor", float, field(config, "partial_rotary_factor", float, whole))
    theta = field(rope, "rope_theta", float, field(config, "rope_theta", float, 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None, "rotary_fraction": fraction}
    kinds = ("default", "linear", "llama3", "yarn")
    if kind not in kinds:
        raise unknown_name("rope type in config.json", shortened(kind), kinds)
    scaling: dict[str, Any] = {"kind": kind, "factor": field(rope, "factor", float)}
    if kind != "linear":
        original = field(rope, "original_max_position_embeddings", int, field(config, "max_position_embeddings", int))
        scaling["original_max_seq_len"] = original
    if kind == "llama3":
        scaling["low_freq_factor"] = field(rope, "low_freq_factor", float)
        scaling["high_freq_factor"] = field(rope, "high_freq_factor", float)
    if kind == "yarn":
        scaling["truncate"] = field(rope, "truncate", bool, True)
    if kind == "yarn" and mscale:
        factors = {key: field(rope, key, float, None) or None for key in ("mscale", "mscale_all_dim")}
        refuse_unless({**rope, **dict.fromkeys(factors)}, YARN_DEFAULTS)
        scaling |= factors
    elif kind == "yarn":
        factor = 0.1 * math.log(max(scaling["factor"], 1.0)) + 1.0
        given = rope.get("attention_factor")
        written = isinstance(given, float) and math.isclose(given, factor, rel_tol=1e-6)  # the default, written out
        refuse_unless(rope | {"attention_factor": None} if written else rope, YARN_DEFAULTS)
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_fraction": fraction}


def local_rope_from_hf(config: Mapping[str, Any], theta: str, default: float, windows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary fields of a model whose layers with a window have rotary positions of their own, without scaling.

    theta: the key of their base (transformers 4), with its default; transformers 5 has `rope_parameters` by kind of layer.
    windows: of `layer_types_from_hf`.
    """
    kinds = field(config, "rope_parameters", dict, {})
    full, local = (field(kinds, f"{kind}_attention", dict, {}) for kind in ("full", "sliding"))
    refuse_unless(local, {"rope_type": "default", "partial_rotary_factor": 1.0})
    rope = rope_from_hf({**config, "rope_parameters": full})
    base = field(local, "rope_theta", float, field(config, theta, float, default))
    alike = windows["sliding_window"] is None or (base == rope["rope_theta"] and rope["rope_scaling"] is None)
    return {**rope, "local_rope_theta": None if alike else base}


def rope_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields of rotary positions, in the spelling every transformers version reads."""
    scaling = model.rope_scaling
    partial = {} if model.rotary_fraction == 1 else {"partial_rotary_factor": model.rotary_fraction}
    return {"rope_theta": model.rope_theta, "rope_scaling": None if scaling is None else _scaling_to_hf(scaling), **partial}


def _scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        fields["original_max_position_embeddings"] = scaling.original_max_seq_len
    if not scaling.truncate:
        fields["truncate"] = False
    if scaling.kind == "llama3":
        fields |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    factors = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return fields | {key: value for key, value in factors.items() if value is not None}


def window_from_hf(config: Mapping[str, Any], num_layers: int) -> int | None:
    """Return model.sliding_window of a Qwen config. Raises UserError where only some layers have the window."""
    kinds = {shortened(kind) for kind in field(config, "layer_types", list, [])}
    if kinds:
        if not kinds <= {"full_attention", "sliding_attention"} or len(kinds) > 1:
            raise UserError(f"config.json: layer_types has {', '.join(sorted(map(str, kinds)))}; all layers must have the same type")
        windowed = kinds == {"sliding_attention"}
    else:
        first = field(config, "max_window_layers", int, 28)
        windowed = field(config, "use_sliding_window", bool, False) and first < num_layers
        if windowed and first > 0:
            raise UserError(f"config.json: max_window_layers = {first} sets a window in only some layers; supported: 0, or >= {num_layers}")
    return field(config, "sliding_window", int) if windowed else None


def window_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields of a window in every layer, or in none."""
    if model.sliding_window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": model.sliding_window, "max_window_layers": 0}


FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types_from_hf(config: Mapping[str, Any], num_layers: int, every: int) -> dict[str, Any]:
    """Return sliding_window and full_attention_every of a model whose layers alternate.

    every: each how manyth layer has no window where `layer_types` is absent. Raises UserError for any other pattern.
    """
    default = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(num_layers)]
    kinds = field(config, "layer_types", list, default)
    window = field({"sliding_window": 4096, **config}, "sliding_window", int, None)
    if window is None or all(kind == FULL for kind in kinds):
        return {"sliding_window": None, "full_attention_every": None}
    period = kinds.index(FULL) + 1 if FULL in kinds else None
    wanted = [SLIDING if period is None or (layer + 1) % period else FULL for layer in range(num_layers)]
    if kinds != wanted or period == 1:
        listed = ", ".join(shortened(kind) for kind in kinds[:12])
        raise UserError(f"config.json: layer_types = {listed} is not supported (only {SLIDING}, with {FULL} in every n-th layer)")
    return {"sliding_window": window, "full_attention_every": period}


def layer_types_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields of the kinds of layers."""
    kinds = [SLIDING if model.windowed(layer) else FULL for layer in range(model.num_layers)]
    return {"sliding_window": model.sliding_window or model.max_seq_len, "layer_types": kinds}


def require_moe(model: ModelConfig, architecture: str, needed: Mapping[str, Any]) -> MoEConfig:
    """Return model.moe of an architecture with softmax scores and neither groups, shared experts nor choice bias.

    Raises UserError naming the first key whose value it cannot represent.
    """
    if model.moe is None:
        raise UserError(f"model.moe = null is not supported by Hugging Face's {architecture} (it needs experts)")
    only = {"score": "softmax", "scale": 1.0, "scale_input": False, "every": 1, "groups": 1, "groups_per_token": 1, "shared_experts": 0}
    _require(model.moe, "model.moe", architecture, {**only, "choice_bias": False, "logit_bias": False, **needed})
    return model.moe


def require(model: ModelConfig, architecture: str, needed: Mapping[str, Any]) -> None:
    """Raise UserError naming the first key of the model section whose value `architecture` cannot represent."""
    _require(model, "model", architecture, needed)


def _require(section: Section, name: str, architecture: str, needed: Mapping[str, Any]) -> None:
    for key, value in needed.items():
        have = getattr(section, key)
        if have != value:
            wanted = {None: "null", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value
            raise UserError(f"{name}.{key} = {_text(have)} is not supported by Hugging Face's {architecture} (only {wanted})")


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
