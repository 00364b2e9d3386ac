"""The `model` section of the schema: what is trained, so a checkpoint fixes it."""

from __future__ import annotations

import math
from typing import Any, Literal

from ridgeline.configs.section import (
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

DType = Literal["float32", "bfloat16", "float16"]


class RopeScaling(Section):
    """Scaling of the rotary frequencies for sequences longer than the model was trained with."""

    kind: Literal["linear", "llama3", "yarn"] = "llama3"
    """linear: positions are divided by `factor`. llama3: the piecewise rule of Llama 3.1. yarn: arXiv 2309.00071."""
    factor: PositiveFloat = 8.0
    """Extended context length over the original one. The default is that of Llama 3.1."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3 only: wavelengths above original_max_seq_len / low_freq_factor are divided by `factor`."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3 only: wavelengths below original_max_seq_len / high_freq_factor stay unchanged."""
    original_max_seq_len: PositiveInt = 8192
    """Context length of the original training, in tokens."""
    truncate: bool = True
    """yarn only: round the bounds of the interpolated dims to whole dims."""
    mscale: PositiveFloat | None = None
    """yarn of model.latent_attention only: rotated dims are multiplied by (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)
    (DeepSeek V2, arXiv 2405.04434); null: by 0.1 ln(factor) + 1, as in other models."""
    mscale_all_dim: PositiveFloat | None = None
    """yarn of model.latent_attention only: attention scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2; null: by 1."""


class MoEConfig(Section):
    """A mixture of experts in place of the MLP: a router chooses some of many MLPs (experts) for each token."""

    experts: PositiveInt = 8
    """Number of routed experts (E)."""
    experts_per_token: PositiveInt = 2
    """Routed experts that process each token (top-k)."""
    expert_dim: PositiveInt | None = None
    """Hidden width of one expert; null: model.mlp_dim."""
    shared_experts: NonNegativeInt = 0
    """Experts that process every token, as one MLP of shared_experts * expert_dim."""
    dense_layers: NonNegativeInt = 0
    """Number of first layers that have an MLP of model.mlp_dim instead of experts."""
    every: PositiveInt = 1
    """Every n-th layer has experts, the layers between have an MLP of model.mlp_dim (Llama 4); needs dense_layers=0. 1: every layer."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to the scores of the experts."""
    normalize: bool = True
    """Divide the weights of the chosen experts by their sum."""
    scale: PositiveFloat = 1.0
    """Factor of the weights of the chosen experts."""
    scale_input: bool = False
    """Multiply the input of the chosen experts by their weights, and not their results (Llama 4)."""
    groups: PositiveInt = 1
    """Groups of neighboring experts; the experts of a token are in `groups_per_token` of them."""
    groups_per_token: PositiveInt = 1
    """Groups that are chosen for each token."""
    group_score: Literal["best", "best_two"] = "best_two"
    """Score of a group: that of its best expert (DeepSeek V2), or the sum of its best two (DeepSeek V3)."""
    logit_bias: bool = False
    """A bias per expert in the router's logits."""
    choice_bias: bool = False
    """Add a bias per expert to the scores when experts are chosen, not to their weights. The train step changes it by
    loss.router_bias_rate."""

    @property
    def grouped(self) -> bool:
        """Whether groups are chosen before experts."""
        return self.groups_per_token < self.groups


class LatentAttention(Section):
    """Multi-head latent attention: keys and values are projections of one narrow vector per token, the latent (arXiv 2405.04434)."""

    q_rank: PositiveInt | None = None
    """Width of the latent of the queries; null: queries are projected from the residual stream (DeepSeek V2 Lite)."""
    kv_rank: PositiveInt = 512
    """Width of the latent of keys and values."""
    nope_dim: PositiveInt = 128
    """Dims of each query and key head without rotary positions."""
    rope_dim: PositiveInt = 64
    """Dims of each query and key head with rotary positions; those of the keys are the same in all heads."""
    value_dim: PositiveInt = 128
    """Width of each value head."""


class AttentionTemperature(Section):
    """Attention temperature by position: queries at position p are multiplied by 1 + scale * ln(1 + floor((p + 1) / interval)), so that
    attention to long contexts stays as sharp as to short ones (Llama 4; arXiv 2501.19399)."""

    scale: PositiveFloat = 0.1
    """Factor of the logarithm."""
    interval: PositiveInt = 8192
    """Tokens after which the queries grow."""


class MupConfig(Section):
    """Maximal update parametrization (muP, arXiv 2203.03466, table 8): settings tuned at a base width hold at other widths.

    With m = embed_dim / base_embed_dim: matrices of the layers start at init_std / sqrt(m), the router at init_std / m, logits are
    multiplied by 1/m, and the optimizer divides the learning rate of these matrices by m. At the base width nothing changes. The width of
    the MLP and the total width of the heads are assumed to grow in proportion to embed_dim.
    """

    base_embed_dim: PositiveInt
    """model.embed_dim of the base model."""
    base_head_dim: PositiveInt | None = None
    """Head width of the base model: attention scores are divided by head width / sqrt(base_head_dim) instead of sqrt(head width). null: the
    same head width at all sizes, so that larger models have more heads."""


class ModelConfig(Section):
    """The architecture. A checkpoint fixes all of it."""

    family: str = "llama"
    """Architecture family. Its defaults are in configs/models/families/<family>.yaml."""
    vocab_size: PositiveInt = 32000
    """Number of token ids (V)."""
    pad_vocab_to: PositiveInt | None = None
    """Rows of the embedding table, when more than vocab_size are needed to divide over `tensor`; null: vocab_size.
    The logits of the padded rows are masked out."""
    num_layers: PositiveInt = 4
    """Number of transformer blocks (L)."""
    embed_dim: PositiveInt = 256
    """Width of the residual stream (D)."""
    num_heads: PositiveInt = 4
    """Number of query heads (N)."""
    num_kv_heads: PositiveInt | None = None
    """Number of key/value heads (K); null: num_heads (multi-head attention)."""
    head_dim: PositiveInt | None = None
    """Width of one head (H); null: embed_dim / num_heads."""
    latent_attention: LatentAttention | None = None
    """Multi-head latent attention; null: queries, keys and values are projected from the residual stream."""
    mlp_dim: PositiveInt = 1024
    """Hidden width of the MLP (F)."""
    moe: MoEConfig | None = None
    """Mixture of experts; null: every layer has one MLP."""
    max_seq_len: PositiveInt = 2048
    """Longest sequence of the model, in tokens."""
    norm: Literal["rmsnorm", "rmsnorm_1p", "layernorm"] = "rmsnorm"
    """Normalization of the residual stream. rmsnorm_1p: RMSNorm that multiplies by 1 + its weight (Gemma)."""
    norm_position: Literal["pre", "post", "both"] = "pre"
    """Norms of a block. pre: before attention and before the MLP. post: of their results, before the residual adds (OLMo 2). both: at the
    four places (Gemma 2). A norm before the unembedding is there always."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in the normalization."""
    position: Literal["rope", "learned"] = "rope"
    """rope: rotary embedding of queries and keys. learned: a table of max_seq_len rows added to the token embeddings."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies. The default is that of RoFormer, arXiv 2104.09864."""
    rope_scaling: RopeScaling | None = None
    """Rotary scaling for long contexts; null: none."""
    local_rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies of layers with the window, which then have no rope_scaling; null: as the layers without it. Needs
    full_attention_every."""
    rotary_fraction: Fraction = 1.0
    """Share of a head's dims that is rotated, from the first (partial rotary embedding)."""
    rope_interleaved: bool = False
    """true: dims 2i and 2i + 1 are a pair (GLM). false: dims i and i + half."""
    activation: Literal["silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu"] = "silu"
    """Activation function of the MLP. gelu_sigmoid: x * sigmoid(1.702 x)."""
    gated_mlp: bool = True
    """true: down(act(gate(x)) * up(x)). false: down(act(up(x)))."""
    mlp_clamp: PositiveFloat | None = None
    """c: down(act(min(gate(x), c)) * (clip(up(x), -c, c) + 1)) in MLP and experts (gpt-oss); needs gated_mlp. null: no clamp."""
    attention_bias: bool = False
    """Bias in the query, key and value projections."""
    output_bias: bool = False
    """Bias in the attention output projection."""
    mlp_bias: bool = False
    """Bias in the projections of the MLP, or of each expert."""
    qk_norm: bool = False
    """RMSNorm of queries and keys."""
    qk_norm_scale: bool = True
    """A learned scale in these norms. false: none, and layers without rotary positions have no such norm (Llama 4)."""
    qk_norm_dims: Literal["head", "all_heads"] = "head"
    """Dims of the norms of queries and keys. head: each head, with one scale for all (Qwen3). all_heads: the whole projection (OLMo 2)."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Attention scores are divided by the square root of it; null: the head width."""
    attention_sinks: bool = False
    """A learned logit per query head in the denominator of the attention softmax, so that a query can attend to nothing (gpt-oss)."""
    attention_softcap: PositiveFloat | None = None
    """Soft-capping of attention scores: softcap * tanh(scores / softcap), before the mask (Gemma 2); null: none."""
    logit_softcap: PositiveFloat | None = None
    """Soft-capping of the logits; null: none."""
    scale_embeddings: bool = False
    """Multiply token embeddings by sqrt(embed_dim) (Gemma)."""
    tie_embeddings: bool = False
    """Use the embedding table as the output projection (unembedding)."""
    sliding_window: PositiveInt | None = None
    """Number of tokens each token attends to, itself included; null: all earlier tokens."""
    attention_chunk: PositiveInt | None = None
    """Number of tokens of a chunk: a token attends to the earlier ones of its own chunk of the document (Llama 4); null: none. It is in
    place of sliding_window."""
    full_attention_every: PositiveInt | None = None
    """Every n-th layer attends to all earlier tokens, the layers between have the sliding_window or the attention_chunk; null: all have."""
    full_attention_rope: bool = True
    """false: layers that attend to all earlier tokens have no rotary positions (Llama 4); needs full_attention_every."""
    attention_temperature: AttentionTemperature | None = None
    """Scaling of queries by position in the layers without rotary positions; null: none. Needs full_attention_rope=false."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the normal initialization. Each family's file in models/ documents which parameters use it."""
    mup: MupConfig | None = None
    """Width scaling by muP; null: the standard parametrization."""
    mtp_layers: NonNegativeInt = 0
    """Modules of multi-token prediction, trained with loss.mtp_weight (DeepSeek V3, arXiv 2412.19437, section 2.2): module k predicts the
    token k + 1 places ahead, with a block of its own and the model's embedding and unembedding. Evaluation and generation do not use them.
    0: none."""

    @property
    def width_ratio(self) -> float:
        """Width over that of the base model of muP; 1 without it."""
        return 1.0 if self.mup is None else self.embed_dim / self.mup.base_embed_dim

    @property
    def embedding_scale(self) -> float:
        """Factor of the token embeddings with scale_embeddings: sqrt(embed_dim), with muP that of the base model."""
        return math.sqrt(self.embed_dim / self.width_ratio) if self.scale_embeddings else 1.0

    @property
    def query_scale(self) -> float:
        """Factor of the queries, after which attention scores are divided by sqrt(head width)."""
        base = None if self.mup is None else self.mup.base_head_dim
        if base is not None:
            return math.sqrt(base / self.head_width)
        return 1.0 if self.query_pre_attn_scalar is None else math.sqrt(self.head_width / self.query_pre_attn_scalar)

    @property
    def kv_heads(self) -> int:
        """Key/value heads, with the default resolved."""
        return self.num_kv_heads or self.num_heads

    @property
    def expert_width(self) -> int:
        """Hidden width of one routed expert, with the default resolved."""
        return (self.moe and self.moe.expert_dim) or self.mlp_dim

    @property
    def interleaved_experts(self) -> bool:
        """Whether layers with experts and layers with an MLP take turns."""
        return self.moe is not None and self.moe.every > 1

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of the MLP."""
        if self.moe is None:
            return False
        return (layer + 1) % self.moe.every == 0 if self.moe.every > 1 else layer >= self.moe.dense_layers

    @property
    def dense_layers(self) -> int:
        """Layers with an MLP: of a mixture of experts the first ones, or those between layers with experts; else all."""
        return self.num_layers - self.moe_layers

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        if self.moe is None:
            return 0
        return self.num_layers // self.moe.every if self.moe.every > 1 else self.num_layers - self.moe.dense_layers

    @property
    def mtp_blocks(self) -> ModelConfig:
        """The blocks of the modules of multi-token prediction as the layers of a model, all of the kind of the last layer."""
        last = self.num_layers - 1
        alone: dict[str, Any] = {"num_layers": self.mtp_layers, "mtp_layers": 0, "full_attention_every": None, "full_attention_rope": True}
        if not self.windowed(last):
            alone |= {"sliding_window": None, "attention_chunk": None}
        if self.moe is not None:
            alone["moe"] = self.moe.model_copy(update={"dense_layers": 0, "every": 1}) if self.has_experts(last) else None
        return self.model_copy(update=alone)

    def without_experts(self, mlp_dim: int | None = None) -> ModelConfig:
        """Return the model whose layers have an MLP of this width: the dense layers, or (with their width) the shared experts."""
        return self.model_copy(update={"moe": None, "mlp_dim": mlp_dim or self.mlp_dim})

    @property
    def head_width(self) -> int:
        """Width of one query or key head, with the default resolved."""
        if self.latent_attention is not None:
            return self.latent_attention.nope_dim + self.latent_attention.rope_dim
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def value_width(self) -> int:
        """Width of one value head."""
        return self.head_width if self.latent_attention is None else self.latent_attention.value_dim

    @property
    def layer_period(self) -> int:
        """Number of layers after which the kinds of layers (with the window or chunks and without; with experts and without) repeat."""
        return math.lcm(self.full_attention_every or 1, 1 if self.moe is None else self.moe.every)

    @property
    def local_span(self) -> int | None:
        """Most tokens that a token attends to in layers with the sliding window or with chunks; None: no such layers."""
        return self.attention_chunk if self.sliding_window is None else self.sliding_window

    def windowed(self, layer: int) -> bool:
        """Whether a layer has the sliding window or chunks."""
        return self.local_span is not None and (self.full_attention_every is None or (layer + 1) % self.full_attention_every != 0)

    @property
    def full_layers(self) -> int:
        """Number of layers without the sliding window and without chunks."""
        return sum(not self.windowed(layer) for layer in range(self.num_layers))

    @property
    def rotary_dims(self) -> int:
        """Rotated dims of a head."""
        return int(self.head_width * self.rotary_fraction) if self.latent_attention is None else self.latent_attention.rope_dim

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table, padding included."""
        return self.pad_vocab_to or self.vocab_size
