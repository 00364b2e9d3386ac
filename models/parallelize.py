"""How a model is computed: for a config, which techniques for speed and memory apply, and where.

The modules (decoder.py, block.py, attention/layer.py, mlp.py) define the architecture. Everything that changes how fast they run or how
much memory they need, and not what they compute, is decided here and handed to them as one `Execution`.

Legend: B batch, T sequence, D embed width, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ridgeline.configs.errors import UserError
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.remat import zeroes_embedding_early
from ridgeline.configs.schema import ComputeConfig, PrecisionConfig
from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.models.activation import ExpertActivation
from ridgeline.models.attention.dispatch import SelfAttention
from ridgeline.models.matmul import CollectiveMatmul, Matmul, platform_of
from ridgeline.models.matmul.block_scaled import check_mesh as check_block_scaled_mesh
from ridgeline.models.matmul.fp8 import check_mesh as check_fp8_mesh
from ridgeline.models.moe.exchange import Exchange
from ridgeline.models.moe.experts import Experts
from ridgeline.models.moe.grouped_matmul import Ragged, choose_kernel
from ridgeline.models.remat import Remat
from ridgeline.planner.experts import activates_in_place, exchange_method
from ridgeline.planner.recompute import (
    beside_attention,
    defers_reductions,
    gradients_first,
    in_order,
    in_scan,
    saves_first,
    waits_for_gradient,
)
from ridgeline.sharding.partition import Partitioner

Result = TypeVar("Result")


@dataclass(frozen=True)
class Execution:
    """The techniques of one model. Hashable: a static attribute of the modules."""

    partitioner: Partitioner
    """Where parameters and activations live: modules name logical axes (sharding/rules.py)."""
    matmul: Matmul
    """Every matmul of a layer with a parameter."""
    remat: Remat
    attention: SelfAttention
    scan_layers: bool
    scan_unroll: int
    experts: Experts | None = None
    """The routed experts of a layer; None: the model has none."""
    in_order: bool = False
    """Slots give the backward passes of the layers of a turn their order (models/backward_order.py)."""
    across_turns: bool = False
    """So do the last layer of a turn and the first of the next one."""
    saves_first: bool = False
    """The backward pass of the loop over layers begins when all that it saved is there (models/backward_order.py)."""
    defers: bool = False
    """Gradients of layers with experts are reduced in the next layer of the backward pass (models/deferred_gradients.py)."""
    beside_attention: bool = False
    """Weights of experts are gathered, and their gradients reduced, while attention runs (models/beside_attention.py)."""
    splits_turns: bool = False
    """The layers of a turn of the loop have arrays of their own, made before it (models/decoder.py: scan_layers)."""

    @property
    def after_attention(self) -> Matmul:
        """The matmul that follows attention.

        Where experts' collectives run beside attention its weight gradient comes before attention's backward pass: XLA would take it
        to hide their reductions, and begin these only after that (DeepSeek V2 over expert=8 on B200s: 24 % of a simulated step). Not over
        tensor.
        """
        own = self.beside_attention and not _shards_matmuls(self.partitioner)
        return replace(self.matmul, gradients_first=True) if own else self.matmul

    def for_layers(self, count: int) -> Execution:
        """Return the techniques for so many layers in a row.

        One or two dense layers of a stage follow each other without a loop: XLA unrolls a loop of two turns, and mixes their backward
        passes (Llama 3.2 1B, eight stages, full: 46.1 GB, in order 37.1).
        """
        if self.partitioner.mesh.shape["pipeline"] == 1 or count > 2 or self.experts is not None or self.matmul.frozen:
            return self
        return replace(self, scan_layers=False, in_order=True, remat=replace(self.remat, waits="block"))

    def after_norm(self, norm: Callable[[Any], Any], matmuls: Callable[[Any], Result], x_BTD: Any) -> Result:
        """Return matmuls(norm(x)), where x is the residual stream, or arrays [B, T, ...] with its sharding.

        Sequence parallelism: where the residual stream is sharded along the sequence, the norm runs on the shards and its result is
        all-gathered once and saved for the backward pass. Otherwise the norm is recomputed with the matmuls and only x is saved.
        """

        def normed(x_BTD: Any) -> Any:
            return jax.tree.map(self.matmul.gather_input, norm(x_BTD))

        if self.matmul.gathers_input:
            return self.remat.wrap_matmuls(matmuls)(normed(x_BTD))
        return self.remat.wrap_matmuls(lambda x_BTD: matmuls(normed(x_BTD)))(x_BTD)

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        segment_ids_BT: jax.Array | None,
        sinks_N: jax.Array | None = None,
        *,
        windowed: bool = True,
    ) -> jax.Array:
        """Return causal self-attention [B, T, N, H] with the configured backend; recomputed if the remat policy does.

        windowed: with the sliding window of the model, if it has one. Chunks are in the segment ids (attention/masks.py: chunk_segments).
        """
        attention = self.attention if windowed else self.attention.without_window()
        return self.remat.wrap_attention(lambda q, k, v, sinks: attention(q, k, v, segment_ids_BT, sinks))(q_BTNH, k_BTKH, v_BTKH, sinks_N)


def _shards_matmuls(partitioner: Partitioner) -> bool:
    """Return whether matrices of a layer are sharded over more than fsdp: over tensor, or as a run's own mesh.rules say."""
    return any(partitioner.axis_size(axis) > 1 for axis in ("heads", "kv_heads", "head_dim", "mlp"))


def _experts(
    model: ModelConfig, compute: ComputeConfig, precision: PrecisionConfig, matmul: Matmul, platform: str, adapter_scale: float
) -> Experts | None:
    """Return the computation of routed experts on these devices; None for a model without experts."""
    if model.moe is None:
        return None
    count, per_token, factor = model.moe.experts, model.moe.experts_per_token, compute.experts.capacity_factor
    partitioner, gpu = matmul.partitioner, platform in ("gpu", "cuda")
    kernel = choose_kernel(platform, jnp.dtype(precision.compute), count, per_token, partitioner.mesh.shape["expert"], factor)
    if precision.eight_bit and platform != "cpu" and isinstance(kernel, Ragged):
        raise UserError(
            f"precision.matmul={precision.matmul}: 8-bit experts need NVIDIA GPUs and precision.compute=bfloat16; "
            "set precision.matmul=compute"
        )
    method = exchange_method(model.moe, compute.experts, partitioner.mesh.shape) or "gather"
    exchange = Exchange(partitioner, method, count, per_token, factor, ragged=gpu)
    in_place = gpu and activates_in_place(model, precision)
    activation = ExpertActivation(model.activation, model.mlp_clamp, model.moe.scale_input, in_place)
    return Experts(matmul, kernel, count, per_token, exchange, activation, factor, adapter_scale)


def parallelize(
    model: ModelConfig, compute: ComputeConfig, precision: PrecisionConfig, partitioner: Partitioner, lora: LoraConfig | None = None
) -> Execution:
    """Return the techniques of a config; with the adapters of `lora` the model's matrices are not trained.

    Raises UserError for a technique that the devices or the model do not support.
    """
    platform, compute_dtype = platform_of(partitioner), jnp.dtype(precision.compute)
    frozen = lora is not None and lora.rank is not None

    # 1. Sharding. FSDP, tensor and sequence parallelism follow from the partitioner's rules: the modules constrain activations at block
    #    boundaries, and `Matmul` all-gathers each parameter over fsdp where it is used.

    # 2. Quantized matmuls: float8 with a scale per tensor, or block-scaled formats.
    if precision.eight_bit:
        check_fp8_mesh(partitioner.mesh, precision.matmul)
    if precision.block_scaled is not None:
        check_block_scaled_mesh(partitioner, precision.block_scaled)

    # 3. Rematerialization of blocks, of attention, or of elementwise matmul inputs; what is kept is there before the backward pass begins.
    remat = Remat.resolve(compute.remat, platform, in_scan(model, compute))
    shape = partitioner.mesh.shape
    saved = saves_first(model, compute, tensor=shape["tensor"], pipeline=shape["pipeline"])

    # 4. Collective matmuls: overlap the communication over tensor with the matmuls around it.
    overlap = compute.tensor_overlap == "ring" and partitioner.mesh.shape["tensor"] > 1
    matmul = (CollectiveMatmul if overlap else Matmul)(
        partitioner,
        compute_dtype,
        jnp.dtype(precision.gradients),
        float8=precision.eight_bit,
        block_format=precision.block_scaled,
        save_gathered=remat.recomputes_blocks,
        zeroes_embedding_early=zeroes_embedding_early(
            compute.remat.policy, compute.remat.names, shape["context"], shape["tensor"], experts=model.moe is not None
        ),
        frozen=frozen,
        gradients_first=gradients_first(model, compute, shape, frozen=frozen) and not _shards_matmuls(partitioner),
        keeps_input=saved and not remat.recomputes_blocks,
    )

    # 5. Attention backend: a fused kernel where one supports the request, per device under shard_map where XLA cannot partition it.
    attention = SelfAttention.resolve(model, compute.attention, platform, compute_dtype, partitioner)

    # 6. Experts: tokens sorted by expert on each device, and a grouped matmul.
    experts = _experts(model, compute, precision, matmul, platform, lora.scale if lora is not None and frozen else 1.0)

    # 7. What is recomputed waits for gradients where XLA would compute attention twice, or mix the layers of a turn.
    gathered = matmul.gathers_input or exchange_method(model.moe, compute.experts, partitioner.mesh.shape) == "gather"
    remat = replace(remat, waits=waits_for_gradient(model, compute, lora or LoraConfig(), tensor=shape["tensor"], gathered=gathered))
    ordered = in_order(model, compute, frozen=frozen)
    # Dense layers over data alone have no collectives in the forward pass. XLA unrolls loops that have some, looks at that one last, and
    # then leaves computations of the unrolled backward pass with two callers: it aborts (jax 0.10.2, xla/service/gpu/transforms/
    # double_buffer_loop_unrolling.cc; Gemma 3 4B, data=8, `full` or fp8; OLMo 3 7B, mxfp8).
    across_turns = ordered and (experts is not None or any(shape[axis] > 1 for axis in ("fsdp", "context", "tensor")))

    # 8. Scan over layers: one compiled block, applied num_layers times. A stage would keep what a layer chose of the parameters of a turn.
    splits = shape["pipeline"] > 1 and not remat.recomputes_blocks
    order = {"in_order": ordered, "across_turns": across_turns, "saves_first": saved, "splits_turns": splits}

    # 9. Collectives of experts: reductions in the next layer, and where attention takes longest, all of them while it runs.
    defers = defers_reductions(model, compute, shape, frozen=frozen)
    beside = beside_attention(model, compute, shape, frozen=frozen)
    order |= {"defers": defers, "beside_attention": beside}
    return Execution(partitioner, matmul, remat, attention, compute.scan_layers, compute.scan_unroll, experts, **order)
