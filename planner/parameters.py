"""Exact parameter counts of every architecture a ModelConfig can express, per component.

Notation: V vocabulary rows (padding included), D width, F MLP width, L layers, N query heads, K key/value heads, H head dim, T positions.
A tied unembedding is the embedding table and counts once. Tests compare the counts with the models and with published totals.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ridgeline.configs.model_schema import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters per component, over all layers."""

    embedding: int
    """V*D, padded rows included."""
    positions: int
    """T*D of a learned position table."""
    attention: int
    """Query, key, value and output projections with their biases, query/key norms, and sinks."""
    mlp: int
    """Gate, up and down projections with their biases, of all experts; and routers."""
    norms: int
    """The norms of each layer and the final one."""
    unembedding: int
    """D*V when not tied."""
    vocab_padding: int
    """How many of embedding + unembedding belong to padded rows."""
    inactive: int = 0
    """How many of mlp and mtp belong to experts that do not process a given token."""
    mtp: int = 0
    """The modules of multi-token prediction, without embedding and unembedding, which they share with the model."""

    @property
    def total(self) -> int:
        """All parameters a checkpoint holds."""
        return self.embedding + self.positions + self.attention + self.mlp + self.norms + self.unembedding + self.mtp

    @property
    def active(self) -> int:
        """Parameters that process one token: all but the experts it does not choose."""
        return self.total - self.inactive

    @property
    def non_embedding(self) -> int:
        """Without the embedding and position tables and an untied unembedding (N of Kaplan et al., arXiv 2001.08361)."""
        return self.attention + self.mlp + self.norms + self.mtp

    def components(self) -> dict[str, int]:
        """Return component name -> count, in model order; they sum to `total`."""
        values = dataclasses.asdict(self)
        del values["vocab_padding"], values["inactive"]
        return values if self.mtp else {name: value for name, value in values.items() if name != "mtp"}


def attention_weights(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each attention projection of a layer, unsharded.

    D*N*H of query and out, D*K*H of key and value; of latent attention see models/attention/latent.py.
    """
    width, heads, latent = model.embed_dim, model.num_heads, model.latent_attention
    query, out = heads * model.head_width, heads * model.value_width
    if latent is None:
        key = model.kv_heads * model.head_width
        return {"query": (width, query), "key": (width, key), "value": (width, key), "out": (out, width)}
    return {
        **({"query_down": (width, latent.q_rank)} if latent.q_rank else {}),
        "query": (latent.q_rank or width, query),
        "key_value_down": (width, latent.kv_rank + latent.rope_dim),
        "key_value": (latent.kv_rank, heads * (latent.nope_dim + latent.value_dim)),
        "out": (out, width),
    }


DOWN = ("query_down", "key_value_down")
"""Projections to a latent, whose parameters and results `tensor` does not shard; it shards their tokens."""


def attention_matmul_parameters(model: ModelConfig) -> int:
    """Return the weights of one layer's attention projections: 2*D*N*H + 2*D*K*H without latents."""
    return sum(inputs * outputs for inputs, outputs in attention_weights(model).values())


def latent_parameters(model: ModelConfig) -> int:
    """Return the weights of one layer's projections to latents."""
    return model.embed_dim * latent_width(model)


def latent_width(model: ModelConfig) -> int:
    """Return the width of a layer's latents together, the rotated dims of the keys included; 0 without latent attention."""
    return sum(outputs for name, (_, outputs) in attention_weights(model).items() if name in DOWN)


def mlp_matmul_parameters(model: ModelConfig) -> int:
    """Return the weights of one dense layer's MLP: 3*D*F gated, 2*D*F otherwise."""
    return (3 if model.gated_mlp else 2) * model.embed_dim * model.mlp_dim


def layer_norms(model: ModelConfig) -> int:
    """Return the norms of the residual stream in one layer: 2, or 4 with norms before and after attention and MLP."""
    return 4 if model.norm_position == "both" else 2


def head_norms(model: ModelConfig) -> int:
    """Return the scales of one layer's norms of queries and keys: 2*H, or (N + K)*H over all heads; or those of the norms of latents."""
    if model.latent_attention is not None:
        return latent_width(model) - model.latent_attention.rope_dim
    if not model.qk_norm or not model.qk_norm_scale:
        return 0
    return model.head_width * (model.num_heads + model.kv_heads if model.qk_norm_dims == "all_heads" else 2)


def expert_parameters(model: ModelConfig) -> int:
    """Return the weights of one routed expert."""
    return (3 if model.gated_mlp else 2) * model.embed_dim * model.expert_width


def moe_matmul_parameters(model: ModelConfig, *, active: bool) -> int:
    """Return the weights of one layer with experts: router, shared and routed experts (`active`: those of one token)."""
    moe = model.moe
    if moe is None:
        return 0
    routed = moe.experts_per_token if active else moe.experts
    return model.embed_dim * moe.experts + (moe.shared_experts + routed) * expert_parameters(model)


def mlp_bias_parameters(model: ModelConfig, width: int) -> int:
    """Return the biases of one MLP or expert of this hidden width: 2*F + D gated, F + D otherwise."""
    return ((2 if model.gated_mlp else 1) * width + model.embed_dim) if model.mlp_bias else 0


def _mlp_biases(model: ModelConfig, *, active: bool) -> int:
    """Return the biases of MLPs, experts and routers of all layers (`active`: those that process one token)."""
    moe, biases = model.moe, model.dense_layers * mlp_bias_parameters(model, model.mlp_dim)
    if moe is None:
        return biases
    routed = (moe.experts_per_token if active else moe.experts) * mlp_bias_parameters(model, model.expert_width)
    shared = mlp_bias_parameters(model, moe.shared_experts * model.expert_width) if moe.shared_experts else 0
    return biases + model.moe_layers * (routed + shared + (moe.choice_bias + moe.logit_bias) * moe.experts)


def all_mlp_matmul_parameters(model: ModelConfig, *, active: bool) -> int:
    """Return the weights of MLPs, experts and routers of all layers (`active`: those that process one token)."""
    return model.dense_layers * mlp_matmul_parameters(model) + model.moe_layers * moe_matmul_parameters(model, active=active)


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the parameters of a model."""
    d, layers, h = model.embed_dim, model.num_layers, model.head_width
    n, k, v = model.num_heads, model.kv_heads, model.padded_vocab_size
    attention = attention_matmul_parameters(model)
    attention += (n + 2 * k) * h if model.attention_bias else 0
    attention += d if model.output_bias else 0
    attention += head_norms(model)
    attention += n if model.attention_sinks else 0
    mlp, active = (all_mlp_matmul_parameters(model, active=active) + _mlp_biases(model, active=active) for active in (False, True))
    inactive = mlp - active
    norm = (2 if model.norm == "layernorm" else 1) * d  # layernorm: scale and bias
    tables = 1 if model.tie_embeddings else 2
    modules = count_parameters(model.mtp_blocks) if model.mtp_layers else None
    return ParameterCount(
        embedding=v * d,
        positions=model.max_seq_len * d if model.position == "learned" else 0,
        attention=layers * attention,
        mlp=mlp,
        norms=(layers * layer_norms(model) + 1) * norm,
        unembedding=0 if model.tie_embeddings else d * v,
        vocab_padding=tables * (v - model.vocab_size) * d,
        inactive=inactive + (0 if modules is None else modules.inactive),
        mtp=0 if modules is None else modules.attention + modules.mlp + modules.norms + mtp_rest_parameters(model),
    )


def mtp_projection_parameters(model: ModelConfig) -> int:
    """Return the weights of the projections of all modules of multi-token prediction, 2*D*D each."""
    return 2 * model.mtp_layers * model.embed_dim**2


def mtp_rest_parameters(model: ModelConfig) -> int:
    """Return what modules of multi-token prediction have beside the norms of `mtp_blocks` with one final norm: projections, and two further
    norms and a final one each."""
    norm = (2 if model.norm == "layernorm" else 1) * model.embed_dim
    return mtp_projection_parameters(model) + (3 * model.mtp_layers - 1) * norm


def matmul_weights(model: ModelConfig) -> dict[str, int]:
    """Return the weights of each matmul of a block, unsharded: those of attention, and D*F for gate, up, down.

    Of a mixture of experts: those of one expert.
    """
    mlp = model.embed_dim * model.expert_width  # of experts: of one
    weights = {name: inputs * outputs for name, (inputs, outputs) in attention_weights(model).items()} | {"up": mlp, "down": mlp}
    return weights | ({"gate": mlp} if model.gated_mlp else {})
