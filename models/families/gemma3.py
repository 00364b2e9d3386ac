"""The Gemma 3 family, text only (arXiv 2503.19786): as Gemma 2, with norms of queries and keys instead of soft-capping, a sliding window in
five of six layers, and a longer RoPE base in the others.

Initialization: normal(0, init_std = 0.02) for the token table and every matrix, residual projections included, no scaling by depth (what
Hugging Face's `initializer_range` does for this family; the published weights do not document more); norm scales 1 (stored weights 0).
Block: the default one, with norms before and after attention and MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.gemma2 import gemma_fields_from_hf, gemma_fields_to_hf, rules
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import field, layer_types_from_hf, local_rope_from_hf, require

ARCHITECTURE = "Gemma3ForCausalLM"


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a Gemma 3 config.json. Raises UserError for what cannot be represented."""
    every = field(config, "sliding_window_pattern", int, 6)
    windows = layer_types_from_hf(config, field(config, "num_hidden_layers", int), every)
    rope = local_rope_from_hf({"rope_theta": 1e6, **config}, "rope_local_base_freq", 10000.0, windows)
    return {**gemma_fields_from_hf(config, **rope), **windows, "qk_norm": True}


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a Gemma 3 config.json. Raises UserError naming a key the architecture cannot express."""
    require(model, ARCHITECTURE, {"qk_norm": True})
    if model.local_rope_theta is None and model.sliding_window is not None:
        require(model, ARCHITECTURE, {"rope_scaling": None})  # layers with the window have none
    return {**gemma_fields_to_hf(model, ARCHITECTURE), "rope_local_base_freq": model.local_rope_theta or model.rope_theta}


FAMILY = Family(
    name="gemma3",
    residual_std=lambda model: model.init_std,
    hf_architecture=ARCHITECTURE,
    hf_model_type="gemma3_text",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=rules,
)
