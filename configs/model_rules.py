"""Rules of the `model` section, and of the settings that depend on its experts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ridgeline.configs.model_schema import LatentAttention, ModelConfig, MoEConfig
from ridgeline.configs.problem import Problem, divisors, multiples, nearest_text
from ridgeline.configs.schema import Config


def model_rules(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.num_heads % model.kv_heads:
        fits = nearest_text(model.kv_heads, divisors(model.num_heads))
        yield Problem(
            ("model.num_kv_heads", "model.num_heads"),
            f"model.num_heads={model.num_heads} must be a multiple of model.num_kv_heads={model.kv_heads} (num_kv_heads={fits} works)",
        )
    if model.head_dim is None and model.latent_attention is None and model.embed_dim % model.num_heads:
        yield Problem(
            ("model.embed_dim", "model.num_heads"),
            f"model.embed_dim={model.embed_dim} must be a multiple of model.num_heads={model.num_heads} "
            f"(embed_dim={multiples(model.embed_dim, model.num_heads)} works, or set model.head_dim)",
        )
    elif model.latent_attention is not None and model.rotary_dims % 2:
        key = "model.latent_attention.rope_dim"
        yield Problem((key,), f"rotary embedding needs an even number of dims, got {key}={model.rotary_dims}")
    elif model.position == "rope" and (model.rotary_dims % 2 or model.rotary_dims == 0):
        yield Problem(
            ("model.rotary_fraction", "model.head_dim", "model.num_heads", "model.embed_dim"),
            "rotary embedding needs an even head width"
            + (f", got {model.head_width}" if model.rotary_fraction == 1 else f" after model.rotary_fraction, got {model.rotary_dims}"),
        )
    if model.pad_vocab_to is not None and model.pad_vocab_to < model.vocab_size:
        yield Problem(
            ("model.pad_vocab_to", "model.vocab_size"), f"must be at least model.vocab_size={model.vocab_size}, got {model.pad_vocab_to}"
        )
    if model.sliding_window is not None and model.sliding_window > model.max_seq_len:
        yield Problem(
            ("model.sliding_window", "model.max_seq_len"),
            f"must be at most model.max_seq_len={model.max_seq_len}, got {model.sliding_window} (null turns it off)",
        )
    if model.full_attention_every is not None and (model.local_span is None or model.full_attention_every < 2):
        yield Problem(
            ("model.full_attention_every", "model.sliding_window", "model.attention_chunk"),
            "must be at least 2 and needs model.sliding_window or model.attention_chunk, "
            f"got {model.full_attention_every} (null: all layers are alike)",
        )
    if model.local_rope_theta is not None and (model.full_attention_every is None or model.position != "rope"):
        yield Problem(
            ("model.local_rope_theta", "model.full_attention_every", "model.position"),
            "needs model.full_attention_every and model.position=rope (null: one base for all layers)",
        )
    yield from _chunks(config)
    if model.mlp_clamp is not None and not model.gated_mlp:
        yield Problem(("model.mlp_clamp", "model.gated_mlp"), "needs model.gated_mlp=true (null: no clamp)")
    if config.data.seq_len > model.max_seq_len:
        yield Problem(
            ("data.seq_len", "model.max_seq_len"),
            f"data.seq_len={config.data.seq_len} is longer than model.max_seq_len={model.max_seq_len}; "
            "lower data.seq_len or raise model.max_seq_len",
        )
    yield from _rope(config)
    if model.latent_attention is not None:
        yield from _latent(config, model.latent_attention)
    if model.moe is not None:
        yield from _moe(model, model.moe)
    if model.mup is not None:
        yield from _mup(config)


def _chunks(config: Config) -> Iterator[Problem]:
    """Yield the settings of chunked attention, layers without rotary positions, and norms without scales that do not work."""
    model = config.model
    if model.attention_chunk is not None and model.sliding_window is not None:
        yield Problem(("model.attention_chunk", "model.sliding_window"), "is in place of model.sliding_window; set one of them to null")
    if not model.full_attention_rope and (model.full_attention_every is None or model.position != "rope"):
        yield Problem(
            ("model.full_attention_rope", "model.full_attention_every", "model.position"),
            "false needs model.full_attention_every and model.position=rope (true: all layers have rotary positions)",
        )
    if not model.full_attention_rope and model.latent_attention is not None:
        yield Problem(("model.full_attention_rope", "model.latent_attention"), "latent attention needs model.full_attention_rope=true")
    if model.attention_temperature is not None and model.full_attention_rope:
        yield Problem(
            ("model.attention_temperature", "model.full_attention_rope"),
            "is of layers without rotary positions: set model.full_attention_rope=false, or model.attention_temperature=null",
        )
    if not model.qk_norm_scale and (not model.qk_norm or model.qk_norm_dims != "head" or model.position != "rope"):
        yield Problem(
            ("model.qk_norm_scale", "model.qk_norm", "model.qk_norm_dims", "model.position"),
            "false needs model.qk_norm=true, model.qk_norm_dims=head and model.position=rope",
        )
    cut = model.attention_chunk is not None and model.attention_chunk < config.data.seq_len
    if cut and config.compute.attention.backend == "cudnn":
        yield Problem(
            ("compute.attention.backend", "model.attention_chunk", "data.seq_len"),
            f"cudnn supports no chunks of {model.attention_chunk} tokens in data.seq_len={config.data.seq_len}; "
            "set compute.attention.backend=pallas (auto chooses it)",
        )


MUP_OPTIMIZERS = ("adamw", "lion")
"""Optimizers whose learning rates by width are known: the column of Adam in table 8 of muP (lion's updates have the size of Adam's)."""


def _mup(config: Config) -> Iterator[Problem]:
    """Yield the settings that do not work with muP."""
    model, kind = config.model, config.optimizer.kind
    if kind not in MUP_OPTIMIZERS:
        yield Problem(("optimizer.kind", "model.mup"), f"{kind} has no learning rates by width; use {' or '.join(MUP_OPTIMIZERS)}")
    if model.mup is not None and model.mup.base_head_dim is not None and model.query_pre_attn_scalar is not None:
        base = f"model.head_dim^2 / base_head_dim={model.head_width**2 / model.mup.base_head_dim:g}"
        yield Problem(
            ("model.mup.base_head_dim", "model.query_pre_attn_scalar"), f"both divide the scores; set query_pre_attn_scalar to {base}"
        )
    for key, works, wanted in (
        ("model.latent_attention", model.latent_attention is None, "null"),
        ("lora.rank", config.lora.rank is None, "null (or export the model with `ridge convert to-hf` and start from that)"),
    ):
        if not works:
            yield Problem((key, "model.mup"), f"does not support muP; set {key}={wanted}")


def _latent(config: Config, latent: LatentAttention) -> Iterator[Problem]:
    """Yield the settings that do not work with latent attention."""
    model, name = config.model, "model.latent_attention"
    if model.num_kv_heads not in (None, model.num_heads):
        yield Problem(("model.num_kv_heads", name), f"latent attention has keys of every head; set it to null, got {model.num_kv_heads}")
    if model.head_dim is not None:
        yield Problem(("model.head_dim", name), f"a head has nope_dim + rope_dim of {name}; set it to null, got {model.head_dim}")
    if latent.value_dim > model.head_width:
        widest = f"nope_dim + rope_dim={model.head_width}"
        yield Problem((f"{name}.value_dim",), f"must be at most {widest} of {name}, got {latent.value_dim}")
    for key, works, wanted in (
        ("model.position", model.position == "rope", "rope"),
        ("model.rotary_fraction", model.rotary_fraction == 1, "1.0"),
        ("model.attention_bias", not model.attention_bias, "false"),
        ("model.output_bias", not model.output_bias, "false"),
        ("model.qk_norm", not model.qk_norm, "false"),
        ("model.query_pre_attn_scalar", model.query_pre_attn_scalar is None, "null"),
        ("compute.tensor_overlap", config.compute.tensor_overlap == "gather", "gather"),
        ("precision.matmul", config.precision.matmul == "compute", "compute"),
        ("precision.moments", config.precision.moments != "int8", "bfloat16"),
    ):
        if not works:
            yield Problem((key, name), f"does not support latent attention; set {key}={wanted}")
    if config.optimizer.kind in ("adafactor", "muon"):
        yield Problem(("optimizer.kind", name), f"{config.optimizer.kind} does not support latent attention; use adamw, lion or sgd")


def _moe(model: ModelConfig, moe: MoEConfig) -> Iterator[Problem]:
    def problem(key: str, message: str, *others: str) -> Problem:
        return Problem((f"model.moe.{key}", *(f"model.moe.{other}" for other in others)), message)

    if moe.experts_per_token > moe.experts:
        yield problem("experts_per_token", f"must be at most model.moe.experts={moe.experts}, got {moe.experts_per_token}", "experts")
    if moe.dense_layers >= model.num_layers:
        most = model.num_layers - 1
        yield problem("dense_layers", f"must be less than model.num_layers={model.num_layers}, got {moe.dense_layers} (at most {most})")
    if moe.every > 1 and moe.dense_layers:
        yield problem("every", f"needs model.moe.dense_layers=0, got {moe.dense_layers} (every=1: experts in all others)", "dense_layers")
    if moe.scale_input and model.mlp_bias:
        message = "true does not support biases of experts; set model.mlp_bias=false"
        yield Problem(("model.moe.scale_input", "model.mlp_bias"), message)
    if moe.every > model.num_layers:
        yield problem("every", f"must be at most model.num_layers={model.num_layers}, got {moe.every}")
    if moe.experts % moe.groups:
        fits = nearest_text(moe.groups, divisors(moe.experts))
        yield problem("groups", f"model.moe.experts={moe.experts} does not divide into {moe.groups} groups ({fits} works)", "experts")
    elif moe.groups_per_token > moe.groups:
        yield problem("groups_per_token", f"must be at most model.moe.groups={moe.groups}, got {moe.groups_per_token}", "groups")
    elif (reach := moe.groups_per_token * (moe.experts // moe.groups)) < moe.experts_per_token:
        least = math.ceil(moe.experts_per_token * moe.groups / moe.experts)
        yield problem(
            "groups_per_token",
            f"{moe.groups_per_token} groups have {reach} experts, fewer than model.moe.experts_per_token={moe.experts_per_token} "
            f"(groups_per_token={least} works)",
            "experts_per_token",
        )


def experts_rules(config: Config) -> Iterator[Problem]:
    """Yield the settings outside of the model that do not work with experts, or only with them."""
    if config.model.moe is None:
        if config.compute.experts.capacity_factor is not None:
            yield Problem(("compute.experts.capacity_factor", "model.moe"), "there are no experts: set it to null, or set model.moe")
        return
    if config.model.mlp_bias and config.compute.experts.capacity_factor is not None:
        yield Problem(("compute.experts.capacity_factor", "model.mlp_bias"), "experts with biases drop no tokens; set capacity_factor=null")
    if config.precision.block_scaled is not None:
        yield Problem(("precision.matmul", "model.moe"), f"{config.precision.matmul} does not support experts; set precision.matmul=fp8")
    if config.compute.tensor_overlap == "ring":
        yield Problem(("compute.tensor_overlap", "model.moe"), "ring does not support experts; set compute.tensor_overlap=gather")
    if config.mesh.zero_stage:
        yield Problem(("mesh.zero_stage", "model.moe"), "does not support experts; set mesh.zero_stage=0, or shard them over mesh.fsdp")
    if config.optimizer.kind in ("adafactor", "muon"):
        yield Problem(("optimizer.kind", "model.moe"), f"{config.optimizer.kind} does not support experts; use adamw, lion or sgd")


def _rope(config: Config) -> Iterator[Problem]:
    scaling = config.model.rope_scaling
    if scaling is None:
        return
    if config.model.position != "rope":
        yield Problem(("model.rope_scaling", "model.position"), "needs model.position=rope (null turns the scaling off)")
    for key in ("mscale", "mscale_all_dim"):
        if getattr(scaling, key) is not None and (scaling.kind != "yarn" or config.model.latent_attention is None):
            name = f"model.rope_scaling.{key}"
            yield Problem(
                (name, "model.rope_scaling.kind", "model.latent_attention"), "only for yarn with latent attention; set it to null"
            )
    if scaling.factor < 1:
        yield Problem(("model.rope_scaling.factor",), f"must be at least 1, got {scaling.factor}")
    if scaling.kind == "llama3" and scaling.low_freq_factor > scaling.high_freq_factor:
        yield Problem(
            ("model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"),
            f"must be at most model.rope_scaling.high_freq_factor={scaling.high_freq_factor}, got {scaling.low_freq_factor}",
        )
