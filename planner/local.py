"""What one device holds and computes: a config on a mesh, cut to the sizes of one device.

Legend: R rows of a microbatch per device, T sequence, D embed width, F MLP width, N query heads, K key/value heads, H head width,
V vocabulary rows, L layers; f, t, d devices on the axes fsdp, tensor, data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ridgeline.configs.schema import Config, ModelConfig
from ridgeline.planner.parameters import attention_matmul_parameters, count_parameters, mlp_matmul_parameters

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
CUDNN_MAX_HEAD_DIM = 128
"""As models/attention/cudnn.py (a test holds the two together)."""


@dataclass(frozen=True)
class LocalSizes:
    """Sizes of one device; bytes where the name says so, numbers otherwise."""

    config: Config
    data: int
    fsdp: int
    tensor: int

    @classmethod
    def of(cls, config: Config, sizes: Mapping[str, int]) -> LocalSizes:
        """Cut a config by the sizes of the mesh axes (absent axes count 1). The caller has checked that everything divides."""
        return cls(config, sizes.get("data", 1), sizes.get("fsdp", 1), sizes.get("tensor", 1))

    @property
    def model(self) -> ModelConfig:
        """The architecture."""
        return self.config.model

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.tensor

    @cached_property
    def rows(self) -> int:
        """Rows of one microbatch on one device (R)."""
        return self.config.data.batch_size // self.config.trainer.accumulation // (self.data * self.fsdp)

    @cached_property
    def tokens(self) -> int:
        """Tokens of one microbatch that pass through one device's matmuls (R*T)."""
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
        """The residual stream with its whole sequence, R*T*D."""
        return self.tokens * self.model.embed_dim * self.compute_itemsize

    @cached_property
    def cut_stream_bytes(self) -> int:
        """The residual stream as it lies between blocks, cut along the sequence over tensor."""
        return self.stream_bytes // self.tensor

    @cached_property
    def query_bytes(self) -> int:
        """Queries (or attention results), R*T*N*H/t."""
        return self.tokens * self.model.num_heads * self.model.head_width * self.compute_itemsize // self.tensor

    @cached_property
    def key_bytes(self) -> int:
        """Keys (or values), R*T*K*H/t."""
        return self.tokens * self.model.kv_heads * self.model.head_width * self.compute_itemsize // self.tensor

    @cached_property
    def hidden_bytes(self) -> int:
        """One hidden activation of the MLP, R*T*F/t."""
        return self.tokens * self.model.mlp_dim * self.compute_itemsize // self.tensor

    @cached_property
    def softmax_bytes(self) -> int:
        """Log-sum-exp of every attention row, float32 R*T*N/t."""
        return self.tokens * self.model.num_heads * 4 // self.tensor

    @cached_property
    def layer_weights(self) -> int:
        """Matrix elements of one layer, whole model."""
        return attention_matmul_parameters(self.model) + mlp_matmul_parameters(self.model)

    @cached_property
    def mlp_matrix(self) -> int:
        """Elements of one MLP matrix, D*F/t: gathered over fsdp, cut over tensor."""
        return self.model.embed_dim * self.model.mlp_dim // self.tensor

    @cached_property
    def query_matrix(self) -> int:
        """Elements of the query (or output) projection, D*N*H/t."""
        return self.model.embed_dim * self.model.num_heads * self.model.head_width // self.tensor

    @cached_property
    def gathered_layer_weights(self) -> int:
        """Matrix elements of one layer on one device while the layer runs."""
        return self.layer_weights // self.tensor

    @cached_property
    def table(self) -> int:
        """Elements of one vocabulary table, V*D/t: gathered over fsdp, cut over tensor."""
        return self.model.padded_vocab_size * self.model.embed_dim // self.tensor

    @cached_property
    def layer_matrices(self) -> int:
        """Elements of all layers' matrices that one device keeps."""
        return self.model.num_layers * self.layer_weights // (self.fsdp * self.tensor)

    @cached_property
    def tables(self) -> int:
        """Elements of embedding and unembedding that one device keeps."""
        return (1 if self.model.tie_embeddings else 2) * self.table // self.fsdp

    @cached_property
    def vectors(self) -> int:
        """Elements of norms, biases and learned positions that one device keeps (positions are cut over fsdp; the rest counts as whole)."""
        count = count_parameters(self.model)
        matrices = self.model.num_layers * self.layer_weights
        return count.attention + count.mlp + count.norms - matrices + count.positions // self.fsdp

    @cached_property
    def parameters(self) -> int:
        """Parameters that one device keeps."""
        return self.layer_matrices + self.tables + self.vectors

    @cached_property
    def loss_chunk_tokens(self) -> int:
        """Tokens of one device that have logits at a time (models/loss.py)."""
        length, per_row = self.config.data.seq_len, max(1, self.config.compute.loss_chunk // self.rows)
        chunks = math.ceil(length / per_row)
        return self.rows * math.ceil(length / chunks)


def attention_backend(config: Config, *, gpu: bool = True) -> str:
    """Name the attention backend that `auto` becomes on NVIDIA GPUs (or elsewhere): the rule of models/attention."""
    name = config.compute.attention.backend
    if name != "auto":
        return name
    width = config.model.head_width
    packed_odd = config.data.document_masking and config.data.seq_len % 2
    fits = gpu and config.precision.compute in ("bfloat16", "float16") and width % 8 == 0 and width <= CUDNN_MAX_HEAD_DIM and not packed_odd
    return "cudnn" if fits else "chunked"
