"""The GPT-2 family.

Initialization: normal(0, init_std = 0.02) for the token table, the position table and all matrices, except that the two projections
that write to the residual stream start at init_std / sqrt(2 L) (GPT-2 report, section 2.3: "scale the weights of residual layers at
initialization by a factor of 1/sqrt(N)", N the number of residual layers, two per block); biases 0, norm scales 1.
Block: the default one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.families.llama import PLAIN
from ridgeline.models.family import Family
from ridgeline.models.huggingface.config import activation_from_hf, field, refuse_unless, require
from ridgeline.models.huggingface.tensor_map import TensorRule

ARCHITECTURE = "GPT2LMHeadModel"
_LAYER = "transformer.h.{layer}."


def config_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section of a GPT-2 config.json. Raises UserError for what cannot be represented."""
    refuse_unless(config, {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False})
    width = field(config, "n_embd", int)
    return {
        "vocab_size": field(config, "vocab_size", int),
        "num_layers": field(config, "n_layer", int),
        "embed_dim": width,
        "num_heads": field(config, "n_head", int),
        "num_kv_heads": None,
        "head_dim": None,
        "mlp_dim": field(config, "n_inner", int, 4 * width),
        "max_seq_len": field(config, "n_positions", int),
        "norm": "layernorm",
        "norm_eps": field(config, "layer_norm_epsilon", float, 1e-5),
        "position": "learned",
        "rope_scaling": None,
        "activation": activation_from_hf(config, "activation_function", "gelu_new"),
        "gated_mlp": False,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "qk_norm": False,
        "tie_embeddings": field(config, "tie_word_embeddings", bool, True),
        "sliding_window": None,
        "init_std": field(config, "initializer_range", float, 0.02),
    }


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return a GPT-2 config.json. Raises UserError naming a key the architecture cannot express."""
    needed = {"norm": "layernorm", "position": "learned", "gated_mlp": False, "attention_bias": True, "output_bias": True}
    needed |= {"mlp_bias": True, "qk_norm": False, "sliding_window": None, "kv_heads": model.num_heads}
    require(model, ARCHITECTURE, {**needed, **PLAIN, "head_width": model.embed_dim // model.num_heads})
    activation = {"gelu_tanh": "gelu_new"}.get(model.activation, model.activation)
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_seq_len,
        "n_embd": model.embed_dim,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.mlp_dim,
        "activation_function": activation,
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": True,
    }


def tensor_map(model: ModelConfig) -> list[TensorRule]:
    """Return GPT-2's rules: matrices have our dim order (Conv1D); query, key and value are concatenated in one tensor."""
    fused = tuple(f"blocks.attention.{name}" for name in ("query", "key", "value"))
    rules = [
        TensorRule("transformer.wte.weight", ("embedding",), "in_out", vocab_dim=0),
        TensorRule("transformer.wpe.weight", ("position_embedding",), "in_out"),
        TensorRule(_LAYER + "attn.c_attn.weight", fused, "in_out"),
        TensorRule(_LAYER + "attn.c_attn.bias", tuple(f"{name}_bias" for name in fused), "flat"),
        TensorRule(_LAYER + "attn.c_proj.weight", ("blocks.attention.out",), "in_out", in_dims=2),
        TensorRule(_LAYER + "attn.c_proj.bias", ("blocks.attention.out_bias",), "flat"),
        TensorRule(_LAYER + "mlp.c_fc.weight", ("blocks.mlp.up",), "in_out"),
        TensorRule(_LAYER + "mlp.c_fc.bias", ("blocks.mlp.up_bias",), "flat"),
        TensorRule(_LAYER + "mlp.c_proj.weight", ("blocks.mlp.down",), "in_out"),
        TensorRule(_LAYER + "mlp.c_proj.bias", ("blocks.mlp.down_bias",), "flat"),
    ]
    norms = {_LAYER + "ln_1": "blocks.attention_norm", _LAYER + "ln_2": "blocks.mlp_norm", "transformer.ln_f": "final_norm"}
    for theirs, ours in norms.items():
        rules.append(TensorRule(theirs + ".weight", (ours + ".scale",), "flat"))
        rules.append(TensorRule(theirs + ".bias", (ours + ".bias",), "flat"))
    if not model.tie_embeddings:
        rules.append(TensorRule("lm_head.weight", ("output",), "out_in", vocab_dim=1))
    return rules


FAMILY = Family(
    name="gpt2",
    residual_std=lambda model: model.init_std / math.sqrt(2 * model.num_layers),
    hf_architecture=ARCHITECTURE,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_map=tensor_map,
)
