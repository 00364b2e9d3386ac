"""Sizes on one device: parameters, activations and tokens of a config that is sharded over a mesh.

Legend: R rows of a microbatch per device, T sequence, D embed width, F MLP width, N query heads, K key/value heads, H head width,
V vocabulary rows, L layers; f, t, d devices on the axes fsdp, tensor, data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ridgeline.configs.schema import Config, ModelConfig
from ridgeline.planner.parameters import attention_matmul_parameters, count_parameters, mlp_matmul_parameters

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
CUDNN_MAX_HEAD_DIM = 128
"""Same as in models/attention/cudnn.py (a test compares the two)."""


@dataclass(frozen=True)
class LocalSizes:
    """Sizes on one device: bytes where the name ends in `_bytes`, else numbers of elements."""

    config: Config
    data: int
    fsdp: int
    tensor: int

    @classmethod
    def of(cls, config: Config, sizes: Mapping[str, int]) -> LocalSizes:
        """Shard a config over mesh axes of these sizes (missing axes: 1). The caller has checked that all dims divide."""
        return cls(config, sizes.get("data", 1), sizes.get("fsdp", 1), sizes.get("tensor", 1))

    @property
    def model(self) -> ModelConfig:
        """The architecture."""
        return self.config.model

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.tensor

    @property
    def of_state(self) -> LocalSizes:
        """Sizes of gradients, optimizer state and its update, which mesh.zero_stage=2 also shards over data."""
        return replace(self, data=1, fsdp=self.fsdp * self.data) if self.config.mesh.zero_stage else self

    @cached_property
    def rows(self) -> int:
        """Rows of one microbatch on one device (R)."""
        return self.config.data.batch_size // self.config.trainer.accumulation // (self.data * self.fsdp)

    @cached_property
    def tokens(self) -> int:
        """Tokens of one microbatch in the matmuls of one device (R*T)."""
        return self.rows * self.config.data.seq_len

    @cached_property
    def compute_itemsize(self) -> int:
        """Bytes of an activation element."""
        return ITEMSIZE[self.config.precision.compute]

    @cached_property
    def gradient_itemsize(self) -> int:
        """Bytes of a gradient element."""
        return ITEMSIZE[self.config.precision.gradients]

    @cached_property
    def parameter_itemsize(self) -> int:
        """Bytes of a master parameter."""
        return ITEMSIZE[self.config.precision.params]

    @cached_property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream, gathered over the sequence: R*T*D."""
        return self.tokens * self.model.embed_dim * self.compute_itemsize

    @cached_property
    def cut_stream_bytes(self) -> int:
        """Bytes of the residual stream between blocks, sharded along the sequence over tensor: R*T*D/t."""
        return self.stream_bytes // self.tensor

    @cached_property
    def query_bytes(self) -> int:
        """Bytes of queries (or attention results): R*T*N*H/t."""
        return self.tokens * self.model.num_heads * self.model.head_width * self.compute_itemsize // self.tensor

    @cached_property
    def key_bytes(self) -> int:
        """Bytes of keys (or values): R*T*K*H/t."""
        return self.tokens * self.model.kv_heads * self.model.head_width * self.compute_itemsize // self.tensor

    @cached_property
    def hidden_bytes(self) -> int:
        """Bytes of one hidden activation of the MLP: R*T*F/t."""
        return self.tokens * self.model.mlp_dim * self.compute_itemsize // self.tensor

    @cached_property
    def softmax_bytes(self) -> int:
        """Bytes of the log-sum-exp of every attention row, float32: R*T*N/t."""
        return self.tokens * self.model.num_heads * 4 // self.tensor

    @cached_property
    def layer_weights(self) -> int:
        """Matrix elements of one layer, unsharded."""
        return attention_matmul_parameters(self.model) + mlp_matmul_parameters(self.model)

    @cached_property
    def mlp_matrix(self) -> int:
        """Elements of one MLP matrix, gathered over fsdp and sharded over tensor: D*F/t."""
        return self.model.embed_dim * self.model.mlp_dim // self.tensor

    @cached_property
    def query_matrix(self) -> int:
        """Elements of the query (or output) projection, gathered over fsdp and sharded over tensor: D*N*H/t."""
        return self.model.embed_dim * self.model.num_heads * self.model.head_width // self.tensor

    @cached_property
    def gathered_layer_weights(self) -> int:
        """Matrix elements of one layer, gathered over fsdp and sharded over tensor."""
        return self.layer_weights // self.tensor

    @cached_property
    def table(self) -> int:
        """Elements of one vocabulary table, gathered over fsdp and sharded over tensor: V*D/t."""
        return self.model.padded_vocab_size * self.model.embed_dim // self.tensor

    @cached_property
    def layer_matrices(self) -> int:
        """Elements of all layers' matrices, sharded over fsdp and tensor."""
        return self.model.num_layers * self.layer_weights // (self.fsdp * self.tensor)

    @cached_property
    def tables(self) -> int:
        """Elements of embedding and unembedding, sharded over fsdp and tensor."""
        return (1 if self.model.tie_embeddings else 2) * self.table // self.fsdp

    @cached_property
    def vectors(self) -> int:
        """Elements of norms, biases and learned positions (positions are sharded over fsdp; the rest counts as replicated)."""
        count = count_parameters(self.model)
        matrices = self.model.num_layers * self.layer_weights
        return count.attention + count.mlp + count.norms - matrices + count.positions // self.fsdp

    @cached_property
    def parameters(self) -> int:
        """Parameters on one device."""
        return self.layer_matrices + self.tables + self.vectors

    @cached_property
    def loss_chunk_tokens(self) -> int:
        """Tokens of one device in a chunk of logits (models/loss.py)."""
        length, per_row = self.config.data.seq_len, max(1, self.config.compute.loss_chunk // self.rows)
        chunks = math.ceil(length / per_row)
        return self.rows * math.ceil(length / chunks)


def attention_backend(config: Config, *, gpu: bool = True) -> str:
    """Return the attention backend, with `auto` resolved for NVIDIA GPUs (or, gpu=False, other devices) as in models/attention."""
    name = config.compute.attention.backend
    if name != "auto":
        return name
    width = config.model.head_width
    packed_odd = config.data.document_masking and config.data.seq_len % 2
    fits = gpu and config.precision.compute in ("bfloat16", "float16") and width % 8 == 0 and width <= CUDNN_MAX_HEAD_DIM and not packed_odd
    return "cudnn" if fits else "chunked"
