"""Rules between settings. `check_config` needs no devices; `check_devices` checks the others for a number of devices.

Every message has the keys, and the nearest settings that are valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ridgeline.configs import plugins
from ridgeline.configs.choices import CHOICES, PLUGIN_GROUPS, allowed_names
from ridgeline.configs.context import context_problems
from ridgeline.configs.corruption import corruption_rules
from ridgeline.configs.curriculum import curriculum_rules
from ridgeline.configs.errors import UserError, first_of, unknown_name
from ridgeline.configs.mesh import resolve_sizes, smaller_meshes
from ridgeline.configs.model_rules import experts_rules, model_rules
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.pipeline import pipeline_problems
from ridgeline.configs.problem import Problem, divisors, multiples, nearest_text
from ridgeline.configs.remat import remat_problems
from ridgeline.configs.schema import MESH_AXES, Config, DataConfig
from ridgeline.configs.tuning_rules import distillation_rules, lora_rules, mtp_rules, policy_rules, preference_rules

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


def check_config(config: Config) -> list[Problem]:
    """Return every broken rule that can be found without knowing the devices."""
    sizes = {axis: size for axis, size in config.mesh.sizes.items() if size >= 1}
    return [
        *_names(config),
        *model_rules(config),
        *experts_rules(config),
        *mtp_rules(config),
        *lora_rules(config),
        *preference_rules(config),
        *distillation_rules(config),
        *policy_rules(config),
        *_mesh(config),
        *_divisibility(config, sizes),
        *_batch(config, sizes),
        *_context(config, sizes),
        *_pipeline(config, sizes),
        *_compute(config),
        *_offload(config),
        *_precision(config),
        *_steps(config),
        *curriculum_rules(config),
        *_evaluation(config),
        *_runtime(config),
        *corruption_rules(config),
        *_loss_spikes(config),
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


def batch_shards(config: Config, sizes: dict[str, int]) -> int:
    """Return over how many devices the rows of a microbatch are divided."""
    return _axes_of(config, "batch", sizes)[1]


def model_problems(model: ModelConfig) -> list[Problem]:
    """Return every broken rule of a model section."""
    return list(model_rules(Config(model=model, data=DataConfig(seq_len=1))))


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


OFFLOADED_KINDS = ("adamw", "lion", "sgd")
"""Values of optimizer.kind that update each parameter by itself. Muon communicates for all stacks of matrices at once; Adafactor's state
is too small to be worth a copy."""


def _offload(config: Config) -> Iterator[Problem]:
    """Yield the settings that do not work with an update of one parameter after the other."""
    if not config.optimizer.offload:
        return
    if config.optimizer.kind not in OFFLOADED_KINDS:
        yield Problem(
            ("optimizer.offload", "optimizer.kind"),
            f"works with optimizer.kind={', '.join(OFFLOADED_KINDS)}, not {config.optimizer.kind}; set optimizer.offload=false",
        )
    if config.corruption_check.every:
        yield Problem(
            ("optimizer.offload", "corruption_check.every"),
            "the digests of corruption_check would need the whole state on the device; set corruption_check.every=0",
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
            fits = f"{key}={multiples(dim, parts)} works"
            if len(axes) == 1:
                fits = f"mesh.{axes[0]}={nearest_text(parts, divisors(dim))} works, or {fits}"
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
            return  # said by preference_rules
        parts *= 2
        over = f"{over} x 2 rows of a pair" if over else "the 2 rows of a pair"
    keys = ("data.batch_size", "trainer.accumulation", *(f"mesh.{axis}" for axis in axes))
    if rows % accumulation:
        yield Problem(
            keys[:2],
            f"data.batch_size={rows} does not divide by trainer.accumulation={accumulation} "
            f"(data.batch_size={multiples(rows, accumulation)} works, "
            f"or trainer.accumulation={nearest_text(accumulation, divisors(rows))})",
        )
    elif rows // accumulation % parts:
        each = f"{rows // accumulation} rows per microbatch (data.batch_size={rows} / trainer.accumulation={accumulation})"
        yield Problem(keys, f"{each} do not divide by {over} (data.batch_size={multiples(rows, accumulation * parts)} works)")
    evaluation_rows = config.evaluation.batch_size
    if evaluation_rows is not None and evaluation_rows % parts:
        works = multiples(evaluation_rows, parts)
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
        fits = nearest_text(compute.scan_unroll, divisors(config.model.num_layers))
        yield Problem(
            ("compute.scan_unroll", "model.num_layers"),
            f"must divide model.num_layers={config.model.num_layers}, got {compute.scan_unroll} ({fits} works)",
        )
    elif compute.scan_layers and config.model.moe is not None and config.model.moe.dense_layers % compute.scan_unroll:
        yield Problem(
            ("compute.scan_unroll", "model.moe.dense_layers"),
            f"must divide model.moe.dense_layers={config.model.moe.dense_layers}, got {compute.scan_unroll} (1 works)",
        )
    if compute.attention.backend == "cudnn" and config.data.document_masking:
        yield Problem(
            ("compute.attention.backend", "data.document_masking"),
            "cudnn supports no packed documents; set compute.attention.backend=pallas (auto chooses it), or data.document_masking=false",
        )
    for keys, message in remat_problems(compute.remat.policy, compute.remat.names):
        yield Problem(keys, message)


def _loss_spikes(config: Config) -> Iterator[Problem]:
    policy, saving = config.loss_spikes.policy, config.checkpoint
    if policy == "warn":
        return
    if config.policy.loss is not None:
        yield Problem(("loss_spikes.policy", "policy.loss"), "policy updates are not judged; set loss_spikes.policy=warn")
    if policy == "skip":
        return
    if saving.every == 0 and saving.every_minutes == 0:
        yield Problem(("loss_spikes.policy", "checkpoint.every"), "rollback needs checkpoints; set checkpoint.every to more than 0")
    newer = max(saving.keep_last, 2) - 1  # checkpoints that may be younger than the start of the spike
    least = -(-(config.loss_spikes.skip_before + 2) // newer)
    if 0 < saving.every < least:
        yield Problem(
            ("checkpoint.every", "loss_spikes.policy", "checkpoint.keep_last"),
            f"must be at least {least} with loss_spikes.policy=rollback, to keep a checkpoint from before a spike, got {saving.every}",
        )


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
    if schedule.initial_fraction and not schedule.warmup_steps:
        yield Problem(
            ("schedule.initial_fraction", "schedule.warmup_steps"),
            "there is no warmup; set schedule.warmup_steps, or initial_fraction to 0",
        )
    if config.init_optimizer and config.init_from is None:
        yield Problem(("init_optimizer", "init_from"), "needs init_from, the run whose optimizer state is taken")
    start = config.profiler.start_step
    if start is not None and start >= steps:
        yield Problem(("profiler.start_step", "trainer.steps"), f"must be less than trainer.steps={steps}, got {start}")
    checkpoint = config.checkpoint
    if checkpoint.keep_every and (not checkpoint.every or checkpoint.keep_every % checkpoint.every):
        fits = f"{multiples(checkpoint.keep_every, checkpoint.every)} works" if checkpoint.every else "0 turns it off"
        yield Problem(
            ("checkpoint.keep_every", "checkpoint.every"),
            f"must be a multiple of checkpoint.every={checkpoint.every}, got {checkpoint.keep_every} ({fits})",
        )
    yield from _checkpoint_tiers(config)


def _checkpoint_tiers(config: Config) -> Iterator[Problem]:
    checkpoint, sets = config.checkpoint, list(config.evaluation.sets)
    if checkpoint.keep_best and not sets:
        yield Problem(("checkpoint.keep_best", "evaluation.sets"), "needs an evaluation set, whose loss says which checkpoints are best")
    elif checkpoint.keep_best and checkpoint.best_set is not None and checkpoint.best_set not in sets:
        yield Problem(("checkpoint.best_set",), f"is not an evaluation set: {checkpoint.best_set!r} (sets: {', '.join(sets)})")
    if checkpoint.copy_to is not None and "://" not in checkpoint.copy_to:
        yield Problem(("checkpoint.copy_to",), f"must be a URL such as s3://bucket/run, got {checkpoint.copy_to!r}")
    local = checkpoint.local
    if local.directory is not None and checkpoint.every and local.every >= checkpoint.every:
        yield Problem(
            ("checkpoint.local.every", "checkpoint.every"),
            f"must be less than checkpoint.every={checkpoint.every}, got {local.every}: local checkpoints are the frequent ones",
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
