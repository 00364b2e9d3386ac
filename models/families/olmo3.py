"""The OLMo 3 family (arXiv 2512.13961): as OLMo 2, with a sliding window in three of four layers and scaled positions in the others.

Initialization: normal(0, init_std = 0.02) for the token table and every matrix, residual projections included, no scaling by depth (what
Hugging Face's `initializer_range` does for this family; the published weights do not document more); norm scales 1.
Block: the default one, with the norms at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families import olmo2
from ridgeline.models.families.llama import fields_to_hf
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import layer_types_from_hf, layer_types_to_hf, local_rope_from_hf, require, rope_to_hf

ARCHITECTURE = "Olmo3ForCausalLM"
THETA = 500000.0
"""Default base of the rotary frequencies."""


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of an OLMo 3 config.json. Raises UserError for what cannot be represented."""
    config = {"rope_theta": THETA, **config}
    fields = olmo2.config_from_hf({**config, "rope_parameters": None, "rope_scaling": None})
    windows = layer_types_from_hf(config, fields["num_layers"], every=4)
    return {**fields, **local_rope_from_hf(config, "rope_theta", THETA, windows), **windows}


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return an OLMo 3 config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"output_bias": model.attention_bias, "mlp_bias": False, "qk_norm": True})
    require(model, ARCHITECTURE, {"head_width": model.embed_dim // model.num_heads})  # it has no head_dim
    if model.local_rope_theta is None and model.sliding_window is not None:
        require(model, ARCHITECTURE, {"rope_scaling": None})  # layers with the window have none
    differs = olmo2.POST_NORMS | {key: getattr(model, key) for key in ("local_rope_theta", "full_attention_every")}
    full, local = rope_to_hf(model), model.local_rope_theta or model.rope_theta
    kinds = {
        "full_attention": {"rope_type": "default", "rope_theta": model.rope_theta} | (full["rope_scaling"] or {}),
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    fields = {**fields_to_hf(model, ARCHITECTURE, **differs), **layer_types_to_hf(model), "attention_bias": model.attention_bias}
    return {**fields, "rope_parameters": kinds}


FAMILY = Family(
    name="olmo3",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=olmo2.rules,
)
