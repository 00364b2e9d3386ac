"""Rules of adapters and of losses other than next-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.configs.errors import unknown_name
from ridgeline.configs.problem import Problem, multiples
from ridgeline.configs.schema import Config, LossConfig
from ridgeline.configs.tuning_schema import DistillationConfig, LoraConfig, PreferenceConfig, adapter_targets, expert_targets


def lora_rules(config: Config) -> Iterator[Problem]:
    """Yield the settings that do not work with low-rank adapters."""
    lora, of_experts = config.lora, expert_targets(config.model)
    allowed = (*adapter_targets(config.model), *of_experts)
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
    if named := [name for name in lora.targets if name in of_experts]:
        for key, on, off in (("lora.dora", lora.dora, "false"), ("lora.dropout", lora.dropout > 0, "0")):
            if on:
                yield Problem((key, "lora.targets"), f"does not support adapters of routed experts ({named[0]}); set {key}={off}")
        if config.mesh.zero_stage:
            yield Problem(("mesh.zero_stage", "lora.targets"), f"does not support adapters of routed experts ({named[0]}); set it to 0")
    for key, works, wanted in (
        ("mesh.pipeline", config.mesh.pipeline == 1, "1"),
        ("precision.matmul", config.precision.matmul == "compute", "compute"),
        ("precision.moments", config.precision.moments != "int8", "float32"),
        ("compute.tensor_overlap", config.compute.tensor_overlap == "gather", "gather"),
        ("optimizer.kind", config.optimizer.kind not in ("adafactor", "muon"), "adamw"),
    ):
        if not works:
            yield Problem((key, "lora.rank"), f"does not support adapters; set {key}={wanted}")


def preference_rules(config: Config) -> Iterator[Problem]:
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
        yield Problem(("data.batch_size", "preference.loss"), f"a pair is 2 rows: must be even, got {rows} ({multiples(rows, 2)} works)")
    if config.loss.z_loss:
        yield Problem(("loss.z_loss", "preference.loss"), "does not support preference pairs; set loss.z_loss=0")
    if config.mesh.pipeline != 1:
        yield Problem(("mesh.pipeline", "preference.loss"), "does not support preference pairs; set mesh.pipeline=1")


def distillation_rules(config: Config) -> Iterator[Problem]:
    """Yield the settings that do not work with a teacher, or only with one."""
    distillation, sources = config.distillation, config.data.train
    if distillation.weight is None:
        set_without = [f"distillation.{key}" for key, value in DistillationConfig() if getattr(distillation, key) != value]
        set_without += [f"data.train.{index}.teacher" for index, source in enumerate(sources) if source.teacher is not None]
        if set_without:
            yield Problem(
                (set_without[0], "distillation.weight"),
                "there is no distillation; set distillation.weight, such as distillation.weight=0.5",
            )
        return
    if distillation.top_k > config.model.vocab_size:
        vocabulary = f"model.vocab_size={config.model.vocab_size}"
        yield Problem(("distillation.top_k", "model.vocab_size"), f"must be at most {vocabulary}, got {distillation.top_k}")
    for index, source in enumerate(sources):
        if source.teacher is None:
            yield Problem(
                (f"data.train.{index}.teacher", "distillation.weight"),
                f"has no teacher; write its predictions with `ridge data teacher TEACHER {source.path} -o DIR` and set teacher to DIR",
            )
    for key, loss in (("preference.loss", config.preference.loss), ("policy.loss", config.policy.loss)):
        if loss is not None:
            yield Problem((key, "distillation.weight"), "a run has one loss; set one of the two to null")
    if config.mesh.pipeline != 1:
        yield Problem(("mesh.pipeline", "distillation.weight"), "does not support distillation; set mesh.pipeline=1")


def policy_rules(config: Config) -> Iterator[Problem]:
    """Yield the settings that do not work with policy updates, or only with them."""
    policy = config.policy
    if policy.loss is None:
        for key in policy.keys_without[:1]:
            yield Problem((f"policy.{key}", "policy.loss"), "there are no policy updates; set policy.loss, such as policy.loss=grpo")
        return
    if (policy.loss == "dr_grpo") != (policy.max_completion is not None):
        change = "set the largest number of tokens of a completion" if policy.loss == "dr_grpo" else f"not used by {policy.loss}; remove it"
        yield Problem(("policy.max_completion", "policy.loss"), change)
    if config.preference.loss is not None:
        yield Problem(("preference.loss", "policy.loss"), "a run has one loss; set one of the two to null")
    if config.loss.z_loss:
        yield Problem(("loss.z_loss", "policy.loss"), "does not support policy updates; set loss.z_loss=0")
    if config.mesh.pipeline != 1:
        yield Problem(("mesh.pipeline", "policy.loss"), "does not support policy updates; set mesh.pipeline=1")
    if config.model.moe is not None:
        yield Problem(("model.moe", "policy.loss"), "does not support policy updates yet; use a dense model")
    if config.data.train or config.evaluation.sets:
        key = "data.train" if config.data.train else "evaluation.sets"
        yield Problem((key, "policy.loss"), "policy updates read rollouts, no corpora; remove it")
    if config.init_from is None:
        yield Problem(("init_from", "policy.loss"), "policy updates start from a trained model; set init_from")
    if config.init_optimizer:
        yield Problem(("init_optimizer", "policy.loss"), "policy updates start with a new optimizer state; set init_optimizer=false")


WITHOUT_MTP = "of a run that has them: `ridge convert to-hf RUN DIR --without-mtp`, then init_from=DIR"
"""How a model with modules of multi-token prediction is read without them; from a Hugging Face directory that needs nothing."""


def mtp_rules(config: Config) -> Iterator[Problem]:
    """Yield the settings that do not work with modules of multi-token prediction, or only with them."""
    name = "model.mtp_layers"
    if not config.model.mtp_layers:
        if config.loss.mtp_weight != LossConfig().mtp_weight:
            yield Problem(("loss.mtp_weight", name), f"there are no modules of multi-token prediction; set {name}, such as {name}=1")
        return
    if config.model.mtp_layers >= config.data.seq_len:
        most = config.data.seq_len - 1
        yield Problem((name, "data.seq_len"), f"must be less than data.seq_len={most + 1}, got {config.model.mtp_layers} (at most {most})")
    for key, works, wanted in (
        ("model.mup", config.model.mup is None, "null"),
        ("mesh.pipeline", config.mesh.pipeline == 1, "1"),
        ("precision.matmul", config.precision.matmul == "compute", "compute"),
        ("precision.moments", config.precision.moments != "int8", "bfloat16"),
        ("compute.tensor_overlap", config.compute.tensor_overlap == "gather", "gather"),
        ("optimizer.kind", config.optimizer.kind not in ("adafactor", "muon"), "adamw"),
    ):
        if not works:
            yield Problem((key, name), f"does not support multi-token prediction; set {key}={wanted}, or {name}=0")
    for key, works in (
        ("preference.loss", config.preference.loss is None),
        ("policy.loss", config.policy.loss is None),
        ("distillation.weight", config.distillation.weight is None),
        ("lora.rank", config.lora.rank is None),
    ):
        if not works:
            without = f"set {name}=0 to train the model without them ({WITHOUT_MTP})"
            yield Problem((key, name), f"does not support modules of multi-token prediction; {without}, or {key}=null")
