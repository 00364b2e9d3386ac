"""Exact parameter counts of every architecture a ModelConfig can express, per component.

Notation: V vocabulary rows (padding included), D width, F MLP width, L layers, N query heads, K key/value heads, H head dim, T positions.
A tied unembedding is the embedding table and counts once. Tests compare the counts with the models and with published totals.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ridgeline.configs.schema import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters per component, over all layers."""

    embedding: int
    """V*D, padded rows included."""
    positions: int
    """T*D of a learned position table."""
    attention: int
    """Query, key, value and output projections with their biases, and query/key norms."""
    mlp: int
    """Gate, up and down projections with their biases."""
    norms: int
    """The two norms of each layer and the final one."""
    unembedding: int
    """D*V when not tied."""
    vocab_padding: int
    """How many of embedding + unembedding belong to padded rows."""

    @property
    def total(self) -> int:
        """All parameters a checkpoint holds."""
        return self.embedding + self.positions + self.attention + self.mlp + self.norms + self.unembedding

    @property
    def non_embedding(self) -> int:
        """Without the embedding and position tables and an untied unembedding (N of Kaplan et al., arXiv 2001.08361)."""
        return self.attention + self.mlp + self.norms

    def components(self) -> dict[str, int]:
        """Return component name -> count, in model order; they sum to `total`."""
        values = dataclasses.asdict(self)
        del values["vocab_padding"]
        return values


def attention_matmul_parameters(model: ModelConfig) -> int:
    """Return the weights of one layer's attention projections: 2*D*N*H + 2*D*K*H."""
    return 2 * model.embed_dim * model.head_width * (model.num_heads + model.kv_heads)


def mlp_matmul_parameters(model: ModelConfig) -> int:
    """Return the weights of one layer's MLP: 3*D*F gated, 2*D*F otherwise."""
    return (3 if model.gated_mlp else 2) * model.embed_dim * model.mlp_dim


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the parameters of a model."""
    d, f, layers, h = model.embed_dim, model.mlp_dim, model.num_layers, model.head_width
    n, k, v = model.num_heads, model.kv_heads, model.padded_vocab_size
    attention = attention_matmul_parameters(model)
    attention += (n + 2 * k) * h if model.attention_bias else 0
    attention += d if model.output_bias else 0
    attention += 2 * h if model.qk_norm else 0
    mlp = mlp_matmul_parameters(model)
    mlp += ((2 if model.gated_mlp else 1) * f + d) if model.mlp_bias else 0
    norm = (2 if model.norm == "layernorm" else 1) * d  # layernorm: scale and bias
    tables = 1 if model.tie_embeddings else 2
    return ParameterCount(
        embedding=v * d,
        positions=model.max_seq_len * d if model.position == "learned" else 0,
        attention=layers * attention,
        mlp=layers * mlp,
        norms=(2 * layers + 1) * norm,
        unembedding=0 if model.tie_embeddings else d * v,
        vocab_padding=tables * (v - model.vocab_size) * d,
    )
