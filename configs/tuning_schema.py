"""The sections of the schema for tuning: adapters (`lora`) and losses other than next-token prediction."""

from __future__ import annotations

import math
from typing import Literal

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.section import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
)


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): the model is frozen, and products of two narrow matrices are added to its matrices.

    y = x W + scale * dropout(x) A B, A [inputs, rank], B [rank, outputs]. B begins at 0, so that the first loss is that of the model.
    """

    rank: PositiveInt | None = None
    """Rank of the adapters; null: no adapters, all parameters are trained."""
    alpha: PositiveFloat = 16.0
    """The product is multiplied by alpha / rank."""
    targets: list[str] = []
    """Matrices with an adapter, by name: query, key, value, out, gate, up, down; of latent attention query_down, query, key_value_down,
    key_value, out; of routed experts expert_gate, expert_up, expert_down. []: all that the model has in attention, MLP and shared
    experts."""
    dropout: Fraction = 0.0
    """Share of the elements of an adapter's input that are set to 0 in training; the others are divided by 1 - dropout."""
    dora: bool = False
    """DoRA (arXiv 2402.09353): the columns of W + scale * A B are divided by their norm and multiplied by a trained magnitude."""
    rslora: bool = False
    """The product is multiplied by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    base: Literal["compute", "int8"] = "compute"
    """How the frozen matrices of attention, MLP and experts are stored. compute: in precision.compute. int8: in 8 bits with one float32
    scale per output channel (half of the bytes of bfloat16), dequantized to precision.compute where they are used. Embeddings, norms,
    biases, routers and the output head stay in precision.compute."""

    @property
    def scale(self) -> float:
        """Factor of the product A B."""
        assert self.rank is not None
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def targets_of(self, model: ModelConfig) -> tuple[str, ...]:
        """Return the names of the matrices that have an adapter; () without adapters."""
        if self.rank is None:
            return ()
        if not self.targets:
            return adapter_targets(model)
        return tuple(name for name in (*adapter_targets(model), *expert_targets(model)) if name in self.targets)


def adapter_targets(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the matrices that can have an adapter: those of attention, MLP and shared experts."""
    attention: tuple[str, ...] = ("query", "key", "value", "out")
    if (latent := model.latent_attention) is not None:
        attention = (*(("query_down",) if latent.q_rank else ()), "query", "key_value_down", "key_value", "out")
    if not model.dense_layers and (model.moe is None or not model.moe.shared_experts):
        return attention
    return (*attention, *(("gate",) if model.gated_mlp else ()), "up", "down")


EXPERT = "expert_"
"""Beginning of the names of routed experts' matrices in lora.targets."""


def expert_targets(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the routed experts' matrices, which have an adapter only where lora.targets names them."""
    if model.moe is None:
        return ()
    return (*((f"{EXPERT}gate",) if model.gated_mlp else ()), f"{EXPERT}up", f"{EXPERT}down")


class PreferenceConfig(Section):
    """Training on preference pairs, against the log-probabilities that the model gives both sides before training (the reference)."""

    loss: Literal["dpo", "ipo", "hinge", "robust"] | None = None
    """dpo, ipo, hinge (SLiC) or robust (DPO of noisy pairs); null: next-token training. Rows 2k and 2k + 1 of a batch are a pair."""
    beta: PositiveFloat = 0.1
    """Weight of the log-ratio to the reference: the smaller, the further the model may move from it. ipo: the regularization (tau)."""
    label_smoothing: Fraction = 0.0
    """dpo and robust only: share of pairs whose sides are assumed to be swapped, less than 0.5. dpo: conservative DPO."""


class PolicyConfig(Section):
    """Policy updates on rollouts (`ridgeline.open_policy`): reinforcement learning with rewards that the caller computes."""

    loss: Literal["grpo", "dr_grpo", "dapo"] | None = None
    """grpo; dr_grpo (divides by `max_completion` instead of the length); dapo (mean over all tokens); null: next-token training."""
    clip_low: Fraction = 0.2
    """The probability ratio of a token counts down to 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The probability ratio of a token counts up to 1 + clip_high."""
    kl: NonNegativeFloat = 0.0
    """Weight of the divergence from the model before training, whose parameters are then kept in memory; 0: none."""
    unbiased_kl: bool = False
    """Multiply the estimate of the divergence by the probability ratio, which makes its gradient unbiased."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation that the rewards minus the mean of their group are divided by."""
    epochs: PositiveInt = 1
    """Passes over the rollouts of an update; the log-probabilities before the update are those that the ratio is taken to."""
    max_completion: PositiveInt | None = None
    """dr_grpo only: the divisor, the largest number of tokens of a completion."""

    @property
    def keys_without(self) -> list[str]:
        """Keys that are set although there is no loss."""
        return [key for key, value in PolicyConfig() if getattr(self, key) != value] if self.loss is None else []


class DistillationConfig(Section):
    """Training towards the predictions of a teacher, which `ridge data teacher` stores for each corpus (data.train[].teacher).

    loss = (1 - weight) x cross-entropy + weight x temperature^2 x KL(teacher || student). models/distillation.py has the formulas.
    """

    weight: PositiveFraction | None = None
    """Share of the divergence from the teacher in the loss; null: no teacher."""
    temperature: PositiveFloat = 1.0
    """Both models' logits are divided by it before their softmax."""
    top_k: PositiveInt = 64
    """Most likely tokens of the teacher that are used, at most as many as are stored."""
    rest: Literal["bucket", "renormalize"] = "bucket"
    """The other tokens. bucket: they are one further outcome. renormalize: the probabilities of the top_k are divided by their sum, of the
    teacher and of the student."""

    @property
    def outcomes(self) -> int:
        """Log-probabilities per token."""
        return self.top_k + (self.rest == "bucket")
