"""Tiny random Hugging Face models of every family and variant, and the same models here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers
from flax import nnx

from ridgeline import models
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import ComputeConfig, PrecisionConfig
from ridgeline.models.decoder import Decoder
from ridgeline.models.huggingface.convert import HfCheckpoint, open_hf
from ridgeline.sharding.partition import Partitioner

torch.set_num_threads(1)  # for tensors this small, threads cost far more than they save

FP32 = PrecisionConfig(params="float32", compute="float32")
COMPUTE = ComputeConfig.model_validate({"attention": {"backend": "reference"}})

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 3000.0}
QWEN3_MOE = LLAMA | {"num_key_value_heads": 2, "head_dim": 24, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
DEEPSEEK = LLAMA | {
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "first_k_dense_replace": 1,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "num_key_value_heads": 4,
}
DEEPSEEK_ROPE = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.1}
LLAMA4 = LLAMA | {
    "num_hidden_layers": 5,
    "no_rope_layer_interval": 2,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 20,
    "intermediate_size_mlp": 44,
    "num_local_experts": 5,
    "attention_chunk_size": 9,
    "floor_scale": 5,
    "attn_scale": 0.4,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@dataclass(frozen=True)
class Variant:
    """A Hugging Face config class and its arguments."""

    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def config(self) -> transformers.PretrainedConfig:
        config_class = {
            "deepseek_v2": transformers.DeepseekV2Config,
            "deepseek_v3": transformers.DeepseekV3Config,
            "gemma2": transformers.Gemma2Config,
            "gemma3": transformers.Gemma3TextConfig,
            "glm4": transformers.Glm4Config,
            "gpt_oss": transformers.GptOssConfig,
            "gpt2": transformers.GPT2Config,
            "llama": transformers.LlamaConfig,
            "llama4": transformers.Llama4TextConfig,
            "mistral": transformers.MistralConfig,
            "olmo2": transformers.Olmo2Config,
            "olmo3": transformers.Olmo3Config,
            "phi3": transformers.Phi3Config,
            "qwen2": transformers.Qwen2Config,
            "qwen3": transformers.Qwen3Config,
            "mixtral": transformers.MixtralConfig,
            "qwen3_moe": transformers.Qwen3MoeConfig,
        }[self.kind]
        return config_class(**self.arguments)


VARIANTS: dict[str, Variant] = {
    "gpt2": Variant(
        "gpt2", {"vocab_size": 97, "n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
    ),
    "llama2": Variant("llama", LLAMA),
    "llama-biases": Variant("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama3": Variant("llama", LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-linear": Variant("llama", LLAMA | {"num_key_value_heads": 1, "rope_parameters": LINEAR_ROPE}),
    "llama-yarn": Variant("llama", LLAMA | {"num_key_value_heads": 2, "rope_parameters": YARN_ROPE}),
    "mistral": Variant("mistral", LLAMA | {"num_key_value_heads": 2, "head_dim": 6, "sliding_window": 7}),
    "mistral-full": Variant("mistral", LLAMA | {"num_key_value_heads": 2, "sliding_window": None}),
    "olmo2": Variant("olmo2", LLAMA | {"num_key_value_heads": 2}),
    "gemma2": Variant(
        "gemma2",
        LLAMA
        | {"num_key_value_heads": 2, "head_dim": 6, "sliding_window": 7, "query_pre_attn_scalar": 11}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": Variant(  # the layers after the last period are none of it
        "gemma3",
        LLAMA
        | {"num_hidden_layers": 5, "num_key_value_heads": 1, "head_dim": 6, "sliding_window": 7, "query_pre_attn_scalar": 11}
        | {"sliding_window_pattern": 3, "rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": LOCAL_ROPE}},
    ),
    "phi3": Variant("phi3", LLAMA | {"num_key_value_heads": 2, "sliding_window": 7, "partial_rotary_factor": 0.75}),
    "glm4": Variant("glm4", LLAMA | {"num_key_value_heads": 2, "head_dim": 12}),
    "olmo3": Variant(
        "olmo3",
        LLAMA
        | {"num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 7}
        | {"rope_parameters": {"full_attention": YARN_ROPE, "sliding_attention": LOCAL_ROPE}},
    ),
    "qwen2": Variant("qwen2", LLAMA | {"num_key_value_heads": 2}),
    "qwen2-window": Variant(
        "qwen2", LLAMA | {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
    ),
    "qwen3": Variant("qwen3", LLAMA | {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True}),
    "mixtral": Variant("mixtral", LLAMA | {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "gpt-oss": Variant(
        "gpt_oss",
        LLAMA
        | {"num_hidden_layers": 5, "num_key_value_heads": 2, "head_dim": 10, "sliding_window": 7, "swiglu_limit": 0.7}
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": YARN_ROPE | {"truncate": False}},
    ),
    "llama4": Variant("llama4", LLAMA4 | {"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}}),
    "llama4-interleaved": Variant(
        "llama4",
        LLAMA4 | {"use_qk_norm": False, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2, "attn_temperature_tuning": False},
    ),
    "qwen3-moe": Variant("qwen3_moe", QWEN3_MOE | {"mlp_only_layers": [0]}),
    "deepseek-v2-lite": Variant("deepseek_v2", DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"}),
    "deepseek-v2": Variant(
        "deepseek_v2",
        DEEPSEEK
        | {"q_lora_rank": 22, "n_shared_experts": 2, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
        | {"routed_scaling_factor": 1.5, "rope_parameters": DEEPSEEK_ROPE},
    ),
    "deepseek-v3": Variant(
        "deepseek_v3",
        DEEPSEEK | {"q_lora_rank": 22, "n_shared_experts": 1, "n_group": 3, "topk_group": 2, "rope_parameters": DEEPSEEK_ROPE},
    ),
}


def save_random_model(variant: Variant, directory: Path) -> torch.nn.Module:
    """Write a random model as transformers writes it; all parameters are random, so that no bias or scale can be mixed up unseen."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(variant.config(), attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name or ".ln_" in name else 0.0
            std = 0.1 if parameter.dim() == 1 else 0.15
            parameter.copy_(center * (not name.endswith("bias")) + std * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(directory)
    return model.eval()


def load_theirs(directory: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


def build_ours(model: ModelConfig) -> Decoder:
    return models.build(model, COMPUTE, FP32, Partitioner.single(), nnx.Rngs(params=0))


def load_ours(directory: Path) -> tuple[HfCheckpoint, Decoder, Any]:
    """Return the opened checkpoint, our decoder's structure (graphdef) and the parameters loaded from it."""
    checkpoint = open_hf(directory)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build_ours(checkpoint.model)), nnx.Param)
    sharding = Partitioner.single().replicated()
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), nnx.to_pure_dict(state))
    return checkpoint, graphdef, checkpoint.load(abstract)


def random_tokens(shape: tuple[int, ...], vocab_size: int = 97, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)
