"""Sizes on one device: parameters, activations and tokens of a config that is sharded over a mesh.

Legend: R rows of a microbatch per device, T sequence, D embed width, F MLP width, N query heads, K key/value heads, H head width,
V vocabulary rows, L layers; f, t, d, c, s devices on the axes fsdp, tensor, data, context, pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ridgeline.configs.context import context_method
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.pipeline import of_stage, stored_by_stage
from ridgeline.configs.schema import Config
from ridgeline.planner.adapters import AdaptedMatrix, adapted_matrices, base_scales
from ridgeline.planner.experts import BLOCK, TILE, buffer_rows, exchange_method, padded_rows, peer_slots
from ridgeline.planner.parameters import (
    all_mlp_matmul_parameters,
    attention_matmul_parameters,
    count_parameters,
    expert_parameters,
    latent_parameters,
    latent_width,
    mlp_matmul_parameters,
    moe_matmul_parameters,
    mtp_projection_parameters,
)
from ridgeline.planner.pipeline import Schedule
from ridgeline.planner.recompute import FUSED_MAX_HEAD_DIM, beside_attention, defers_reductions, gathers_within_turn, saves_first

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True)
class LocalSizes:
    """Sizes on one device: bytes where the name ends in `_bytes`, else numbers of elements."""

    config: Config
    data: int
    fsdp: int
    tensor: int
    context: int = 1
    expert: int = 1
    """Devices on the axis expert, which `fsdp` includes: outside of the experts it is a further fsdp axis."""
    pipeline: int = 1
    """Stages. The layers of `config` are those of one stage; the rest of the model is sharded over stages as over fsdp."""
    moved: int = 0
    """1 where each step moves the layers to their stages; 0 where each stage stores its own."""

    @classmethod
    def of(cls, config: Config, sizes: Mapping[str, int]) -> LocalSizes:
        """Shard a config over mesh axes of these sizes (missing axes: 1). The caller has checked that all dims divide."""
        expert = sizes.get("expert", 1)
        data, fsdp, tensor, context, stages = (sizes.get(axis, 1) for axis in ("data", "fsdp", "tensor", "context", "pipeline"))
        moved = int(stages > 1 and not stored_by_stage(config, sizes))
        return cls(of_stage(config, sizes), data, fsdp * expert, tensor, context, expert, stages, moved)

    @property
    def model(self) -> ModelConfig:
        """The architecture."""
        return self.config.model

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.tensor * self.context * self.pipeline

    @cached_property
    def length(self) -> int:
        """Tokens of a row on one device: T/c."""
        return self.config.data.seq_len // self.context

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
        """Tokens of one microbatch in the matmuls of one device (R*T/c)."""
        return self.rows * self.length

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
        """Bytes of queries: R*T*N*H/t."""
        return self.tokens * self.model.num_heads * self.model.head_width * self.compute_itemsize // self.tensor

    @cached_property
    def context_bytes(self) -> int:
        """Bytes of attention results: R*T*N*V/t."""
        return self.query_bytes * self.model.value_width // self.model.head_width

    @cached_property
    def key_bytes(self) -> int:
        """Bytes of keys: R*T*K*H/t."""
        return self.tokens * self.model.kv_heads * self.model.head_width * self.compute_itemsize // self.tensor

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of values: R*T*K*V/t."""
        return self.key_bytes * self.model.value_width // self.model.head_width

    @cached_property
    def latent_bytes(self) -> int:
        """Bytes of the latents of a layer, gathered over the sequence; 0 without latent attention."""
        return self.tokens * latent_width(self.model) * self.compute_itemsize

    @property
    def uniform_dense(self) -> bool:
        """Whether all layers are of one kind, without experts, adapters and latent attention."""
        return self.model.moe is None and self.model.layer_period == 1 and not self.adapted and not self.latent_bytes

    @property
    def saves_first(self) -> bool:
        """Whether the backward pass begins when all that the loop over layers saved is in its stacks (planner/recompute.py)."""
        return saves_first(self.model, self.config.compute, tensor=self.tensor, pipeline=self.pipeline)

    @cached_property
    def up_bytes(self) -> int:
        """Bytes of keys without rotated dims and values together, as they are projected from a latent; 0 without latent attention."""
        latent = self.model.latent_attention
        if latent is None:
            return 0
        width = self.model.num_heads * (latent.nope_dim + latent.value_dim)
        return self.tokens * width * self.compute_itemsize // self.tensor

    @cached_property
    def hidden_bytes(self) -> int:
        """Bytes of one hidden activation of the MLP: R*T*F/t; of experts, routed and shared: their rows times their width, over t."""
        return self.hidden_rows * self.model.expert_width * self.compute_itemsize // self.tensor

    @cached_property
    def expert_rows(self) -> int:
        """Rows of the buffer of the routed experts; 0 without experts."""
        moe = self.model.moe
        if moe is None:
            return 0
        factor = self.config.compute.experts.capacity_factor
        return buffer_rows(self.tokens, moe, self.expert, factor, self.tensor)

    @cached_property
    def hidden_rows(self) -> int:
        """Rows of a hidden activation: of the MLP one per token, of experts those of the buffer and of the shared experts."""
        moe = self.model.moe
        return self.tokens if moe is None else self.expert_rows + moe.shared_experts * self.tokens

    @property
    def pads_hidden(self) -> bool:
        """Whether hidden activations of experts are padded to whole tiles, for the kernels of grouped matmuls (models/moe)."""
        moe, capacity = self.model.moe, self.config.compute.experts.capacity_factor
        return moe is not None and capacity is None and self.model.expert_width // self.tensor % TILE > 0

    @property
    def padded_hidden_bytes(self) -> int:
        """Bytes of a hidden activation in whole tiles."""
        width = self.model.expert_width // self.tensor
        return self.hidden_bytes * padded_rows(width, 1, TILE) // width if self.pads_hidden else self.hidden_bytes

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of the residual stream in the rows of the routed experts; 0 without experts."""
        return self.expert_rows * self.model.embed_dim * self.compute_itemsize

    @cached_property
    def ties_weight_gradients(self) -> bool:
        """Whether the weight gradients of experts are computed within their layer: where what they are computed from has more elements than
        they have bytes (models/moe/experts.py, tie_weight_gradients)."""
        if self.model.moe is None or self.adapted:
            return False
        width = self.model.expert_width // self.tensor
        matrix = self.model.moe.experts // self.expert * self.model.embed_dim * width
        return self.expert_rows * (self.model.embed_dim + width) > matrix * self.gradient_itemsize

    @property
    def weight_gradients_first(self) -> bool:
        """Whether the weight gradients of gate and up are computed before the gradients of the experts' rows (models/moe/experts.py,
        _widen_backward): where rows are wider than hidden activations; in 8 bits only where no tokens are exchanged."""
        moves = self.tensor > 1 or self.expert > 1
        wide = self.model.embed_dim > self.model.expert_width // self.tensor
        return self.ties_weight_gradients and wide and not (self.config.precision.eight_bit and moves)

    @property
    def defers_reductions(self) -> bool:
        """Whether gradients are reduced in the next layer of the backward pass (planner/recompute.py)."""
        sizes = {"data": self.data, "fsdp": self.fsdp, "context": self.context, "pipeline": self.pipeline}
        return defers_reductions(self.model, self.config.compute, sizes, frozen=bool(self.adapted))

    @property
    def beside_attention(self) -> bool:
        """Whether weights of experts are gathered, and their gradients reduced, while attention runs (planner/recompute.py)."""
        sizes = {axis: getattr(self, axis) for axis in ("data", "fsdp", "context", "tensor", "expert", "pipeline")}
        return beside_attention(self.model, self.config.compute, sizes, frozen=bool(self.adapted))

    @property
    def gathers_within_turn(self) -> bool:
        """Whether a turn of the loop over layers gathers its own weights, and none of the next turn (planner/recompute.py)."""
        return gathers_within_turn(self.model, self.config.compute)

    @cached_property
    def slots(self) -> int:
        """Tokens that the routed experts of a device may process: its own, and with mesh.expert those of other devices."""
        moe, expert, experts = self.model.moe, int(self.expert), self.config.compute.experts
        slots = tokens = int(self.tokens) // int(self.tensor)
        if moe is not None and exchange_method(moe, experts, {"expert": expert}) == "all_to_all":
            slots = peer_slots(tokens, moe.experts, moe.experts_per_token, expert, experts.capacity_factor)
        return expert * int(self.tensor) * slots

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of these tokens where they come from several devices; 0 without mesh.expert."""
        if self.model.moe is None or self.expert == 1:
            return 0
        return self.slots * self.model.embed_dim * self.compute_itemsize

    @cached_property
    def sends_uncapped(self) -> bool:
        """Whether tokens go to their experts by all_to_all without a capacity."""
        experts = self.config.compute.experts
        return experts.capacity_factor is None and exchange_method(self.model.moe, experts, {"expert": self.expert}) == "all_to_all"

    @cached_property
    def busy_rows(self) -> int:
        """Rows of that buffer that hold tokens, or pad them to whole blocks, at balanced loads; the kernel skips the others."""
        moe = self.model.moe
        if moe is None or self.config.compute.experts.capacity_factor is not None:
            return self.expert_rows
        padding = moe.experts // self.expert * BLOCK // 2
        return min(self.expert_rows, self.tokens * moe.experts_per_token + padding)

    @cached_property
    def softmax_bytes(self) -> int:
        """Bytes of the log-sum-exp of every attention row, float32: R*T*N/t."""
        return self.tokens * self.model.num_heads * 4 // self.tensor

    @cached_property
    def layer_weights(self) -> int:
        """Matrix elements of one layer (with experts, where there are any), unsharded."""
        model = self.model
        mlp = mlp_matmul_parameters(model) if model.moe is None else moe_matmul_parameters(model, active=False)
        return attention_matmul_parameters(model) + mlp

    @cached_property
    def mlp_matrix(self) -> int:
        """Elements of one MLP matrix, gathered over fsdp and sharded over tensor: D*F/t; of experts: of all experts together."""
        moe = self.model.moe
        experts = 1 if moe is None else moe.experts // self.expert + moe.shared_experts
        return experts * self.model.embed_dim * self.model.expert_width // self.tensor

    @cached_property
    def kinds(self) -> list[tuple[int, LocalSizes]]:
        """Number of layers of each kind, and the sizes of a model of these layers alone: layers with experts and those between them."""
        moe = self.model.moe
        if moe is None or not self.model.interleaved_experts:
            return [(self.model.num_layers, self)]
        alone = self.model.model_copy(update={"moe": moe.model_copy(update={"every": 1})}), self.model.without_experts()
        sizes = [replace(self, config=self.config.model_copy(update={"model": model})) for model in alone]
        return list(zip((self.model.moe_layers, self.model.dense_layers), sizes, strict=True))

    @cached_property
    def first_dense(self) -> tuple[int, LocalSizes]:
        """Number of the layers before those with experts, and the sizes of a model of such layers alone; (0, these sizes) without any."""
        model = self.model
        if model.moe is None or not model.moe.dense_layers:
            return 0, self
        return model.moe.dense_layers, replace(self, config=self.config.model_copy(update={"model": model.without_experts()}))

    @cached_property
    def layer_kinds(self) -> list[tuple[int, LocalSizes]]:
        """As `kinds`, with the dense layers before those with experts apart."""
        dense, of_dense = self.first_dense
        return [(self.model.num_layers - dense, self), (dense, of_dense)] if dense else self.kinds

    @cached_property
    def mlp_matrices(self) -> int:
        """Elements of one MLP matrix of every layer, or of its experts (`mlp_matrix`), gathered over fsdp."""
        return sum(layers * kind.mlp_matrix for layers, kind in self.kinds)

    @cached_property
    def all_turned_matrices(self) -> int:
        """Elements of `turned_matrices` of all layers."""
        return sum(layers * kind.turned_matrices for layers, kind in self.kinds)

    @cached_property
    def period_weights(self) -> int:
        """Matrix elements of the layers of a period that are trained, gathered over fsdp and sharded over tensor and expert."""
        moe, period = self.model.moe, self.model.layer_period
        if moe is None or not self.model.interleaved_experts or self.adapted:
            return period * self.gathered_trained_weights
        (_, experts), (_, dense) = self.kinds
        return period // moe.every * experts.gathered_trained_weights + (period - period // moe.every) * dense.gathered_trained_weights

    @cached_property
    def out_matrix(self) -> int:
        """Elements of attention's output projection, gathered over fsdp and sharded over tensor: D*N*V/t."""
        return self.model.embed_dim * self.model.num_heads * self.model.value_width // self.tensor

    @cached_property
    def turned_matrices(self) -> int:
        """Elements of a layer's matrices that fsdp shards along their last dim, gathered: MLP down (not of experts) and attention out."""
        return self.out_matrix + (self.mlp_matrix if self.model.moe is None else 0)

    @cached_property
    def gathered_layer_weights(self) -> int:
        """Matrix elements of one layer, gathered over fsdp and sharded over tensor and expert."""
        elsewhere = 0 if self.model.moe is None else (1 - 1 / self.expert) * self.model.moe.experts * expert_parameters(self.model)
        whole = latent_parameters(self.model)  # not sharded over tensor
        return (self.layer_weights - round(elsewhere) - whole) // self.tensor + whole

    @cached_property
    def table(self) -> int:
        """Elements of one vocabulary table, gathered over fsdp and sharded over tensor: V*D/t."""
        return self.model.padded_vocab_size * self.model.embed_dim // self.tensor

    @cached_property
    def layer_matrices(self) -> int:
        """Elements of all layers' matrices, sharded over fsdp and tensor."""
        whole = self.model.num_layers * latent_parameters(self.model)  # not sharded over tensor
        return ((self._all_layer_weights - whole) // self.tensor + whole) // self.fsdp

    @cached_property
    def _all_layer_weights(self) -> int:
        model = self.model
        return model.num_layers * attention_matmul_parameters(model) + all_mlp_matmul_parameters(model, active=False)

    @cached_property
    def tables(self) -> int:
        """Elements of embedding and unembedding, sharded over fsdp and tensor."""
        return (1 if self.model.tie_embeddings else 2) * self.table // (self.fsdp * self.pipeline)

    @property
    def heads(self) -> int:
        """Hidden states per token in the loss: that of the model, and one of each module of multi-token prediction."""
        return 1 + self.model.mtp_layers

    @cached_property
    def modules(self) -> LocalSizes | None:
        """Sizes of a model of the blocks of the modules of multi-token prediction alone; None: there are none."""
        model = self.config.model
        return replace(self, config=self.config.model_copy(update={"model": model.mtp_blocks})) if model.mtp_layers else None

    @cached_property
    def mtp_matrices(self) -> int:
        """Elements of the matrices of these modules, sharded over fsdp, and but for the projections over tensor."""
        return 0 if self.modules is None else self.modules.layer_matrices + mtp_projection_parameters(self.model) // self.fsdp

    @cached_property
    def mtp_parameters(self) -> int:
        """Parameters of these modules on one device: the matrices, and vectors, which count as replicated."""
        if self.modules is None:
            return 0
        vectors = count_parameters(self.model).mtp - self.modules._all_layer_weights - mtp_projection_parameters(self.model)
        return self.mtp_matrices + vectors

    @cached_property
    def vectors(self) -> int:
        """Elements of norms, biases and learned positions (positions are sharded over fsdp; the rest counts as replicated)."""
        count = count_parameters(self.model)
        return count.attention + count.mlp + count.norms - self._all_layer_weights + count.positions // (self.fsdp * self.pipeline)

    @cached_property
    def parameters(self) -> int:
        """Parameters on one device."""
        return self.layer_matrices + self.tables + self.vectors + self.mtp_parameters

    @cached_property
    def adapted(self) -> list[AdaptedMatrix]:
        """The matrices with an adapter; [] without adapters, where all parameters are trained."""
        return adapted_matrices(self.config)

    @cached_property
    def trained(self) -> int:
        """Trained parameters on one device: those of the adapters, or all."""
        if not self.adapted:
            return self.parameters
        return sum(matrix.layers * matrix.local_parameters(self.fsdp, self.tensor, self.expert) for matrix in self.adapted)

    @cached_property
    def gathered_trained_weights(self) -> int:
        """Matrix elements of one layer that are trained, gathered over fsdp and sharded over tensor and expert."""
        if not self.adapted:
            return self.gathered_layer_weights
        return sum(matrix.layers * matrix.local_parameters(1, self.tensor, self.expert) for matrix in self.adapted) // self.model.num_layers

    @property
    def weight_itemsize(self) -> int:
        """Bytes of a stored parameter that is no adapter's: frozen ones are in the compute dtype."""
        return self.compute_itemsize if self.adapted else self.parameter_itemsize

    @property
    def int8_base(self) -> bool:
        """Whether the frozen matrices of the layers are stored in 8 bits (lora.base)."""
        return bool(self.adapted) and self.config.lora.base == "int8"

    @property
    def matrix_itemsize(self) -> int:
        """Bytes of an element of the layers' matrices in a gather: of the compute dtype, or 1 where they are stored in 8 bits or quantized
        before they are gathered."""
        return 1 if self.int8_base or self.config.precision.gathers_8_bit else self.compute_itemsize

    @cached_property
    def loss_chunk_tokens(self) -> int:
        """Tokens of one device in a chunk of logits (models/loss.py)."""
        length = self.length // self.pipeline  # each stage has the loss of a part of the tokens
        rows = self.rows * self.heads
        chunks = math.ceil(length / max(1, self.config.compute.loss_chunk // rows))
        return rows * math.ceil(length / chunks)

    @cached_property
    def schedule(self) -> Schedule:
        """The ticks of a step."""
        return Schedule(self.pipeline, self.config.trainer.accumulation, self.config.mesh.pipeline_chunks)

    @property
    def context_method(self) -> str | None:
        """How attention goes over context: ring, all_to_all, or None where rows are not sharded."""
        return context_method(self.config, {"context": self.context, "tensor": self.tensor})

    @property
    def ring(self) -> bool:
        """Whether attention is a ring over context."""
        return self.context_method == "ring"

    def attention_backend(self, *, gpu: bool = True) -> str:
        """Return the attention backend on this mesh, with `auto` resolved."""
        return attention_backend(self.config, gpu=gpu, ring=self.ring)


def attention_backend(config: Config, *, gpu: bool = True, ring: bool = False) -> str:
    """Return the attention backend, with `auto` resolved for NVIDIA GPUs (or, gpu=False, other devices) as in models/attention.

    ring: of a ring over context, which cuDNN has no kernel for.
    """
    name = config.compute.attention.backend
    if name != "auto":
        return name
    width = config.model.head_width
    if config.model.attention_softcap is not None or not (
        gpu and config.precision.compute in ("bfloat16", "float16") and width <= FUSED_MAX_HEAD_DIM
    ):
        return "chunked"
    span = config.model.attention_chunk
    packed = config.data.document_masking or (span is not None and span < config.data.seq_len)  # chunks are computed as documents
    fused = width % 8 == 0 and not packed and not ring and not config.model.attention_sinks
    return "cudnn" if fused else "pallas"


def muon_layers(layers: int, devices: int) -> int:
    """Return of how many layers each of these devices orthogonalizes the matrices."""
    return -(-layers // devices)


def parameter_bytes(local: LocalSizes) -> int:
    """Return the bytes of all parameters on one device."""
    if not local.adapted:
        return local.parameters * local.parameter_itemsize
    size = local.parameters * local.weight_itemsize + local.trained * local.parameter_itemsize
    if local.int8_base:
        model = local.model
        routers = 0 if model.moe is None else model.moe_layers * model.embed_dim * model.moe.experts // (local.tensor * local.fsdp)
        size -= (local.layer_matrices - routers) * (local.weight_itemsize - 1)
        size += 4 * base_scales(model, local.tensor, local.expert)
    return size
