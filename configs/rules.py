"""Rules between settings. `check_config` needs no devices; `check_devices` checks the others for a number of devices.

Every message has the keys, and the nearest settings that are valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.configs import plugins
from ridgeline.configs.choices import CHOICES, PLUGIN_GROUPS, allowed_names
from ridgeline.configs.context import context_problems
from ridgeline.configs.errors import UserError, first_of, unknown_name
from ridgeline.configs.mesh import resolve_sizes, smaller_meshes
from ridgeline.configs.pipeline import pipeline_problems
from ridgeline.configs.remat import remat_problems
from ridgeline.configs.schema import (
    MESH_AXES,
    Config,
    DataConfig,
    LatentAttention,
    LoraConfig,
    ModelConfig,
    MoEConfig,
    PreferenceConfig,
    adapter_targets,
)

SHARDED_OVER = {
    "batch": ("data", "fsdp"),
    "residual_seq": ("context", "tensor"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "experts": ("expert",),
    "expert_embed": ("fsdp",),
}
"""Logical axis -> mesh axes it is sharded over, unless `mesh.rules` changes it (as in sharding/rules.py)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule. `keys`: the settings involved, most specific first; `message`: what is wrong and what is valid."""

    keys: tuple[str, ...]
    message: str


def check_config(config: Config) -> list[Problem]:
    """Return every broken rule that can be found without knowing the devices."""
    sizes = {axis: size for axis, size in config.mesh.sizes.items() if size >= 1}
    return [
        *_names(config),
        *_model(config),
        *_experts(config),
        *_lora(config),
        *_preference(config),
        *_mesh(config),
        *_divisibility(config, sizes),
        *_batch(config, sizes),
        *_context(config, sizes),
        *_pipeline(config, sizes),
        *_compute(config),
        *_precision(config),
        *_steps(config),
        *_evaluation(config),
        *_runtime(config),
    ]


def check_devices(config: Config, num_devices: int) -> dict[str, int]:
    """Return axis -> size on `num_devices` devices. Raises UserError when mesh, model or batch do not divide over them."""
    sizes = resolve_sizes(config.mesh, num_devices)
    if problems := layout_problems(config, sizes):
        first, *others = problems
        raise first_of(f"{first.keys[0]}: {first.message} (on {num_devices} devices)", [problem.keys[0] for problem in others])
    return sizes


def layout_problems(config: Config, sizes: dict[str, int]) -> list[Problem]:
    """Return why model and batch do not divide over a mesh of these sizes; empty when they do."""
    return [*_divisibility(config, sizes), *_batch(config, sizes), *_context(config, sizes), *_pipeline(config, sizes)]


def model_problems(model: ModelConfig) -> list[Problem]:
    """Return every broken rule of a model section."""
    return list(_model(Config(model=model, data=DataConfig(seq_len=1))))


def fit_devices(config: Config, num_devices: int) -> Config:
    """Return the config with the largest mesh of at most `num_devices` devices that its own mesh, model and batch allow."""
    for mesh in smaller_meshes(config.mesh, num_devices):
        fitted = config.model_copy(update={"mesh": mesh})
        if not layout_problems(fitted, mesh.sizes):
            return fitted
    raise AssertionError("one device always fits")


def place_on_devices(config: Config, num_devices: int) -> Config:
    """Return the config with its own mesh on `num_devices` devices or, where it names no rest (-1), on fewer. Raises UserError."""
    named = math.prod(config.mesh.sizes.values())
    sizes = check_devices(config, named if 1 <= named <= num_devices else num_devices)
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)})


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _nearest_text(value: int, allowed: list[int]) -> str:
    """Return the allowed numbers just below and above a value, as text."""
    below = [n for n in allowed if n < value][-1:]
    above = [n for n in allowed if n > value][:1]
    return " or ".join(str(n) for n in (*below, *above))


def _multiples(value: int, of: int) -> str:
    """Return the multiples of `of` around a value, as text."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


BLOCK = 32
"""Elements of a block of block-scaled matmuls. nvfp4 has blocks of 16 in the forward pass, but its gradients use mxfp8."""


def _precision(config: Config) -> Iterator[Problem]:
    for key in ("params", "compute", "gradients", "moments"):
        if getattr(config.precision, key) == "float16":
            yield Problem((f"precision.{key}",), "float16 needs loss scaling, which is not supported; use bfloat16 or float32")
    if config.precision.moments == "int8" and config.optimizer.kind != "adamw":
        yield Problem(
            ("precision.moments", "optimizer.kind"),
            f"int8 moments need AdamW; set precision.moments=bfloat16, or optimizer.kind=adamw (it is {config.optimizer.kind})",
        )
    if config.precision.stochastic_rounding and config.precision.params != "bfloat16":
        yield Problem(
            ("precision.stochastic_rounding", "precision.params"),
            f"only bfloat16 parameters can be rounded stochastically; set precision.params=bfloat16 (it is {config.precision.params})",
        )
    if config.precision.matmul != "compute" and config.precision.compute != "bfloat16":
        yield Problem(
            ("precision.matmul", "precision.compute"),
            f"{config.precision.matmul} matmuls have bfloat16 results; set precision.compute=bfloat16 (it is {config.precision.compute})",
        )
    if config.precision.block_scaled is not None:
        model = config.model
        widths = {
            "model.embed_dim": model.embed_dim,
            "model.mlp_dim": model.mlp_dim,
            "model.num_heads": model.num_heads * model.head_width,
            "model.num_kv_heads": model.kv_heads * model.head_width,
            "data.seq_len": config.data.seq_len,
        }
        for key, width in widths.items():
            if width % BLOCK:
                yield Problem(
                    ("precision.matmul", key),
                    f"{config.precision.matmul} needs multiples of {BLOCK}, {key} is {width}; or set precision.matmul=fp8 (no blocks)",
                )


def _names(config: Config) -> Iterator[Problem]:
    chosen = {
        "compute.attention.backend": config.compute.attention.backend,
        "compute.attention.context": config.compute.attention.context,
        "compute.experts.exchange": config.compute.experts.exchange,
        "optimizer.kind": config.optimizer.kind,
        "schedule.kind": config.schedule.kind,
    }
    for key, name in chosen.items():
        if name not in allowed_names(key):
            yield Problem((key,), str(unknown_name(CHOICES[key][0], name, allowed_names(key))))
        elif key in PLUGIN_GROUPS:
            try:
                plugins.find(PLUGIN_GROUPS[key], name, CHOICES[key][1])
            except UserError as error:
                yield Problem((key,), str(error))
    for group in ("writers", "metrics"):
        for name in getattr(config.logging, group):
            if name not in plugins.names(group):
                yield Problem((f"logging.{group}",), str(unknown_name(plugins.GROUPS[group], name, plugins.names(group))))
    for logical, axes in config.mesh.rules.items():
        for axis in axes:
            if axis not in MESH_AXES:
                yield Problem((f"mesh.rules.{logical}",), str(unknown_name("mesh axis", axis, MESH_AXES)))


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.num_heads % model.kv_heads:
        fits = _nearest_text(model.kv_heads, divisors(model.num_heads))
        yield Problem(
            ("model.num_kv_heads", "model.num_heads"),
            f"model.num_heads={model.num_heads} must be a multiple of model.num_kv_heads={model.kv_heads} (num_kv_heads={fits} works)",
        )
    if model.head_dim is None and model.latent_attention is None and model.embed_dim % model.num_heads:
        yield Problem(
            ("model.embed_dim", "model.num_heads"),
            f"model.embed_dim={model.embed_dim} must be a multiple of model.num_heads={model.num_heads} "
            f"(embed_dim={_multiples(model.embed_dim, model.num_heads)} works, or set model.head_dim)",
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
    if model.full_attention_every is not None and (model.sliding_window is None or model.full_attention_every < 2):
        yield Problem(
            ("model.full_attention_every", "model.sliding_window"),
            f"must be at least 2 and needs model.sliding_window, got {model.full_attention_every} (null: all layers are alike)",
        )
    if model.local_rope_theta is not None and (model.full_attention_every is None or model.position != "rope"):
        yield Problem(
            ("model.local_rope_theta", "model.full_attention_every", "model.position"),
            "needs model.full_attention_every and model.position=rope (null: one base for all layers)",
        )
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
    if moe.experts % moe.groups:
        fits = _nearest_text(moe.groups, divisors(moe.experts))
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


def _experts(config: Config) -> Iterator[Problem]:
    """Yield the settings outside of the model that do not work with experts, or only with them."""
    if config.model.moe is None:
        if config.compute.experts.capacity_factor is not None:
            yield Problem(("compute.experts.capacity_factor", "model.moe"), "there are no experts: set it to null, or set model.moe")
        return
    if config.model.mlp_bias and config.compute.experts.capacity_factor is not None:
        yield Problem(("compute.experts.capacity_factor", "model.mlp_bias"), "experts with biases drop no tokens; set capacity_factor=null")
    if config.precision.matmul != "compute":
        yield Problem(
            ("precision.matmul", "model.moe"), f"{config.precision.matmul} does not support experts; set precision.matmul=compute"
        )
    if config.compute.tensor_overlap == "ring":
        yield Problem(("compute.tensor_overlap", "model.moe"), "ring does not support experts; set compute.tensor_overlap=gather")
    if config.mesh.zero_stage:
        yield Problem(("mesh.zero_stage", "model.moe"), "does not support experts; set mesh.zero_stage=0, or shard them over mesh.fsdp")
    if config.optimizer.kind in ("adafactor", "muon"):
        yield Problem(("optimizer.kind", "model.moe"), f"{config.optimizer.kind} does not support experts; use adamw, lion or sgd")


def _lora(config: Config) -> Iterator[Problem]:
    """Yield the settings that do not work with low-rank adapters."""
    lora, allowed = config.lora, adapter_targets(config.model)
    for name in lora.targets:
        if name not in allowed:
            yield Problem(("lora.targets",), str(unknown_name("matrix", name, allowed)))
    if len(set(lora.targets)) < len(lora.targets):
        yield Problem(("lora.targets",), f"names a matrix twice: {', '.join(lora.targets)}")
    if lora.dropout == 1:
        yield Problem(("lora.dropout",), "must be less than 1, got 1.0")
    if lora.rank is None:
        set_without = [key for key, value in LoraConfig() if getattr(lora, key) != value]
        if set_without:
            yield Problem((f"lora.{set_without[0]}", "lora.rank"), "there are no adapters; set lora.rank, such as lora.rank=16")
        return
    if lora.rank > config.model.embed_dim:
        widest = f"model.embed_dim={config.model.embed_dim}"
        yield Problem(("lora.rank", "model.embed_dim"), f"must be at most {widest}, got {lora.rank}; for full rank train without adapters")
    for key, works, wanted in (
        ("mesh.pipeline", config.mesh.pipeline == 1, "1"),
        ("precision.matmul", config.precision.matmul == "compute", "compute"),
        ("precision.moments", config.precision.moments != "int8", "float32"),
        ("compute.tensor_overlap", config.compute.tensor_overlap == "gather", "gather"),
        ("optimizer.kind", config.optimizer.kind not in ("adafactor", "muon"), "adamw"),
    ):
        if not works:
            yield Problem((key, "lora.rank"), f"does not support adapters; set {key}={wanted}")


def _preference(config: Config) -> Iterator[Problem]:
    """Yield the settings that do not work with preference pairs, or only with them."""
    preference, rows = config.preference, config.data.batch_size
    if preference.loss is None:
        set_without = [key for key, value in PreferenceConfig() if getattr(preference, key) != value]
        if set_without:
            keys = (f"preference.{set_without[0]}", "preference.loss")
            yield Problem(keys, "there is no loss of pairs; set preference.loss, such as preference.loss=dpo")
        return
    if preference.label_smoothing and preference.loss not in ("dpo", "robust"):
        yield Problem(
            ("preference.label_smoothing", "preference.loss"),
            f"only for dpo and robust (preference.loss is {preference.loss}); set it to 0",
        )
    elif preference.label_smoothing >= 0.5:
        yield Problem(("preference.label_smoothing",), f"must be less than 0.5, got {preference.label_smoothing:g}")
    if rows % 2:
        yield Problem(("data.batch_size", "preference.loss"), f"a pair is 2 rows: must be even, got {rows} ({_multiples(rows, 2)} works)")
    if config.loss.z_loss:
        yield Problem(("loss.z_loss", "preference.loss"), "does not support preference pairs; set loss.z_loss=0")
    if config.mesh.pipeline != 1:
        yield Problem(("mesh.pipeline", "preference.loss"), "does not support preference pairs; set mesh.pipeline=1")


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
    if scaling.kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield Problem(
            ("model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"),
            f"must be less than model.rope_scaling.high_freq_factor={scaling.high_freq_factor}, got {scaling.low_freq_factor}",
        )


def _mesh(config: Config) -> Iterator[Problem]:
    free = [axis for axis, size in config.mesh.sizes.items() if size == -1]
    if len(free) > 1:
        named = " and ".join(f"mesh.{axis}" for axis in free)
        yield Problem(tuple(f"mesh.{axis}" for axis in free), f"only one mesh axis may be -1 (the remaining devices), got {named}")
    for axis, size in config.mesh.sizes.items():
        if size == 0:
            yield Problem((f"mesh.{axis}",), "must be at least 1, or -1 for the remaining devices, got 0")
        elif size != 1 and axis == "expert" and config.model.moe is None:
            yield Problem(("mesh.expert", "model.moe"), f"the model has no experts, so only 1 is supported, got {size} (or set model.moe)")
    if config.mesh.zero_stage and config.optimizer.kind == "muon":
        yield Problem(
            ("mesh.zero_stage", "optimizer.kind"), "muon needs whole matrices; set mesh.zero_stage=0, or shard them over mesh.fsdp"
        )
    if config.mesh.zero_stage and "embed" in config.mesh.rules:
        yield Problem(("mesh.zero_stage", "mesh.rules.embed"), "supports only the default rule of `embed`; remove mesh.rules.embed")


def _axes_of(config: Config, logical: str, sizes: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes of known size that a logical axis is sharded over, and the product of their sizes."""
    logical = "mlp" if logical == "expert_mlp" else logical
    with_expert = ("expert",) if logical in ("batch", "embed") else ()  # sharding/rules.py, WITH_EXPERTS
    with_pipeline = ("pipeline",) if logical in ("embed", "expert_embed") else ()  # WITH_PIPELINE
    axes = tuple(config.mesh.rules.get(logical, (*SHARDED_OVER[logical], *with_expert, *with_pipeline)))
    if logical == "embed" and config.mesh.zero_stage:
        axes += ("data",)
    known = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
    return known, math.prod(sizes[axis] for axis in known)


def _divisibility(config: Config, sizes: dict[str, int]) -> Iterator[Problem]:
    model = config.model
    if config.precision.block_scaled is not None and sizes["tensor"] > 1:
        wanted = "set mesh.tensor=1, or precision.matmul=fp8"
        yield Problem(("mesh.tensor",), f"{config.precision.matmul} does not support parameters sharded over tensor; {wanted}")
    dims = {
        "heads": ("model.num_heads", model.num_heads),
        "kv_heads": ("model.num_kv_heads", model.kv_heads),
        **({"mlp": ("model.mlp_dim", model.mlp_dim)} if model.dense_layers else {}),
        "vocab": ("model.pad_vocab_to" if model.pad_vocab_to else "model.vocab_size", model.padded_vocab_size),
        "embed": ("model.embed_dim", model.embed_dim),
        **_latent_dims(model),
        "residual_seq": ("data.seq_len", config.data.seq_len),
    }
    if model.moe is not None:
        dims = {"experts": ("model.moe.experts", model.moe.experts), **dims}
        dims["expert_mlp"] = ("model.moe.expert_dim" if model.moe.expert_dim else "model.mlp_dim", model.expert_width)
    heads_broken = False  # then the key/value heads do not divide either: one message is enough
    for logical, (key, dim) in dims.items():
        axes, parts = _axes_of(config, "embed" if logical.endswith("_rank") else logical, sizes)
        if dim % parts == 0 or (logical == "kv_heads" and heads_broken):
            continue
        heads_broken |= logical == "heads"
        over = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes)
        if logical == "vocab":
            fits = f"set model.pad_vocab_to={math.ceil(dim / parts) * parts}"
        else:
            fits = f"{key}={_multiples(dim, parts)} works"
            if len(axes) == 1:
                fits = f"mesh.{axes[0]}={_nearest_text(parts, divisors(dim))} works, or {fits}"
        keys = (*(f"mesh.{axis}" for axis in axes), key)
        yield Problem(keys, f"{key}={dim} does not divide by {over} ({fits})")


def _latent_dims(model: ModelConfig) -> dict[str, tuple[str, int]]:
    """Return the ranks of latent attention, which are sharded as `embed`: name -> (key, dim)."""
    latent = model.latent_attention
    ranks = {} if latent is None else {"q_rank": latent.q_rank, "kv_rank": latent.kv_rank}
    return {name: (f"model.latent_attention.{name}", rank) for name, rank in ranks.items() if rank}


def _batch(config: Config, sizes: dict[str, int]) -> Iterator[Problem]:
    rows, accumulation = config.data.batch_size, config.trainer.accumulation
    axes, parts = _axes_of(config, "batch", sizes)
    over = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes)
    if config.preference.loss is not None:
        if rows % 2:
            return  # said by _preference
        parts *= 2
        over = f"{over} x 2 rows of a pair" if over else "the 2 rows of a pair"
    keys = ("data.batch_size", "trainer.accumulation", *(f"mesh.{axis}" for axis in axes))
    if rows % accumulation:
        yield Problem(
            keys[:2],
            f"data.batch_size={rows} does not divide by trainer.accumulation={accumulation} "
            f"(data.batch_size={_multiples(rows, accumulation)} works, "
            f"or trainer.accumulation={_nearest_text(accumulation, divisors(rows))})",
        )
    elif rows // accumulation % parts:
        each = f"{rows // accumulation} rows per microbatch (data.batch_size={rows} / trainer.accumulation={accumulation})"
        yield Problem(keys, f"{each} do not divide by {over} (data.batch_size={_multiples(rows, accumulation * parts)} works)")
    evaluation_rows = config.evaluation.batch_size
    if evaluation_rows is not None and evaluation_rows % parts:
        works = _multiples(evaluation_rows, parts)
        yield Problem(("evaluation.batch_size", *keys[2:]), f"{evaluation_rows} rows do not divide by {over} ({works} works)")


def _context(config: Config, sizes: dict[str, int]) -> Iterator[Problem]:
    if config.compute.attention.context in CHOICES["compute.attention.context"][1]:
        for keys, message in context_problems(config, sizes):
            yield Problem(keys, message)


def _pipeline(config: Config, sizes: dict[str, int]) -> Iterator[Problem]:
    for keys, message in pipeline_problems(config, sizes):
        yield Problem(keys, message)


def _compute(config: Config) -> Iterator[Problem]:
    compute = config.compute
    if compute.tensor_overlap == "ring" and config.precision.matmul != "compute":
        yield Problem(
            ("compute.tensor_overlap", "precision.matmul"),
            f"ring needs precision.matmul=compute (it is {config.precision.matmul}); or set compute.tensor_overlap=gather",
        )
    if compute.tensor_overlap == "ring" and config.mesh.rules:
        yield Problem(
            ("compute.tensor_overlap", "mesh.rules"),
            "ring supports only the default sharding rules; remove mesh.rules, or set compute.tensor_overlap=gather",
        )
    if compute.scan_layers and config.model.num_layers % compute.scan_unroll:
        fits = _nearest_text(compute.scan_unroll, divisors(config.model.num_layers))
        yield Problem(
            ("compute.scan_unroll", "model.num_layers"),
            f"must divide model.num_layers={config.model.num_layers}, got {compute.scan_unroll} ({fits} works)",
        )
    elif compute.scan_layers and config.model.moe is not None and config.model.dense_layers % compute.scan_unroll:
        yield Problem(
            ("compute.scan_unroll", "model.moe.dense_layers"),
            f"must divide model.moe.dense_layers={config.model.dense_layers}, got {compute.scan_unroll} (1 works)",
        )
    if compute.attention.backend == "cudnn" and config.data.document_masking:
        yield Problem(
            ("compute.attention.backend", "data.document_masking"),
            "cudnn supports no packed documents; set compute.attention.backend=pallas (auto chooses it), or data.document_masking=false",
        )
    for keys, message in remat_problems(compute.remat.policy, compute.remat.names):
        yield Problem(keys, message)


def _steps(config: Config) -> Iterator[Problem]:
    steps, schedule = config.trainer.steps, config.schedule
    if schedule.warmup_steps > steps:
        yield Problem(
            ("schedule.warmup_steps", "trainer.steps"),
            f"schedule.warmup_steps={schedule.warmup_steps} is more than trainer.steps={steps}; "
            "lower schedule.warmup_steps or raise trainer.steps",
        )
    elif schedule.kind == "wsd" and schedule.warmup_steps + schedule.decay_fraction * steps > steps:
        yield Problem(
            ("schedule.decay_fraction", "schedule.warmup_steps", "trainer.steps"),
            f"warmup ({schedule.warmup_steps} steps) and decay ({schedule.decay_fraction} of {steps} steps) overlap; "
            f"schedule.decay_fraction may be at most {1 - schedule.warmup_steps / steps:g}",
        )
    start = config.profiler.start_step
    if start is not None and start >= steps:
        yield Problem(("profiler.start_step", "trainer.steps"), f"must be less than trainer.steps={steps}, got {start}")
    checkpoint = config.checkpoint
    if checkpoint.keep_every and (not checkpoint.every or checkpoint.keep_every % checkpoint.every):
        fits = f"{_multiples(checkpoint.keep_every, checkpoint.every)} works" if checkpoint.every else "0 turns it off"
        yield Problem(
            ("checkpoint.keep_every", "checkpoint.every"),
            f"must be a multiple of checkpoint.every={checkpoint.every}, got {checkpoint.keep_every} ({fits})",
        )


def _evaluation(config: Config) -> Iterator[Problem]:
    evaluation = config.evaluation
    if evaluation.every and not evaluation.sets:
        yield Problem(
            ("evaluation.every", "evaluation.sets"), "there is no set to evaluate; add one to evaluation.sets, or set evaluation.every=0"
        )
    tasks, samples = evaluation.tasks, evaluation.samples
    if tasks.every and not tasks.names:
        yield Problem(("evaluation.tasks.every", "evaluation.tasks.names"), "there is no task; add one to evaluation.tasks.names, or set 0")
    if samples.every and not samples.wanted:
        yield Problem(
            ("evaluation.samples.every", "evaluation.samples.prompts"),
            "there is no prompt; add one to evaluation.samples.prompts, or set 0",
        )
    if samples.top_p is not None and samples.top_p > 1:
        yield Problem(("evaluation.samples.top_p",), f"must be at most 1, got {samples.top_p}")
    for axis in ("pipeline", "context") if tasks.names or samples.wanted else ():
        if (size := config.mesh.sizes[axis]) != 1:
            key = (
                "evaluation.tasks.names" if tasks.names else "evaluation.samples.prompts" if samples.prompts else "evaluation.samples.file"
            )
            yield Problem((f"mesh.{axis}", key), f"{key} do not go with mesh.{axis}={size}; remove them, or set mesh.{axis}=1")
    first: dict[str, str] = {}
    for name, path in evaluation.sets.items():
        if str(path) in first:
            yield Problem((f"evaluation.sets.{name}",), f"has the same directory as evaluation.sets.{first[str(path)]}: {path}")
        first.setdefault(str(path), name)


def _runtime(config: Config) -> Iterator[Problem]:
    runtime = config.runtime
    if runtime.cpu_devices > 1 and runtime.platform in ("cuda", "rocm"):
        yield Problem(
            ("runtime.cpu_devices", "runtime.platform"),
            f"virtual devices exist only on the cpu platform, runtime.platform is {runtime.platform} (set it to cpu, or cpu_devices to 1)",
        )
    if runtime.deterministic and runtime.platform == "rocm":
        yield Problem(
            ("runtime.deterministic", "runtime.platform"),
            "deterministic operations exist for CUDA only (CPUs need none); set runtime.deterministic=false, or another platform",
        )
