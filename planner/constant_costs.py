"""Layers over tensor, or data alone, where XLA's scheduler counts with constants, not measured times (`GpuProgram.measured_matmuls`).

A collective lasts 5,000 units, a loop fusion or a call of a library 1,000, every other fusion 1, Triton's matmuls too
(ApproximateLatencyEstimator, xla/service/latency_hiding_scheduler.cc). Matmuls thus hide nothing. The scheduler works from the end of a
layer: first it puts all that is ready behind the gather of the next attention's input, until five counted kernels are there, and these are
the weight gradients of the whole layer. What they are computed from is live until then. Read from heaps of A100s and GB200s (jax 0.10.2).
Sizes are bytes of one device.
"""

from __future__ import annotations

from math import ceil

from ridgeline.configs.remat import offloads_inputs
from ridgeline.planner.hardware import GpuProgram
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.overlap import WIDEST_TENSOR
from ridgeline.planner.recompute import in_scan, recomputed

TILE = 128
"""Rows and columns of a matmul's result that XLA gives to one core (xla/backends/gpu/transforms/splitk_rewriter.cc)."""


def applies(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether alike layers in a loop gather their inputs, computed again, over tensor under this scheduler."""
    config, model = local.config, local.model
    plain = local.pipeline * local.context == 1 and in_scan(model, config.compute)
    again = config.compute.remat.policy in ("full", "names", "dots") or _from_host(local)
    gathers = local.tensor > 1 and config.compute.tensor_overlap == "gather" and again
    return not program.measured_matmuls and local.uniform_dense and plain and gathers


def gradients_after_attention(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether nothing but the block's input is kept: all weight gradients of a layer come after attention's backward pass."""
    return applies(local, program) and (local.config.compute.remat.policy == "full" or _from_host(local))


def gradients_after_ordered_attention(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether the pending weight gradients of a layer come after attention's backward pass in the next layer of an ordered turn.

    So where no matmul of keys is split: with the sums of a split one there are enough counted kernels before attention. (Heaps of Gemma 2
    on A100: 9B over tensor=4 with 7, 8 and 21 turns, not 2B over tensor=2, which splits. For 27B over tensor=2 with 6 turns it is too much:
    6 % of the step.)
    """
    plain = local.tensor > 1 and local.config.compute.tensor_overlap == "gather" and local.config.precision.matmul == "compute"
    alone = local.config.compute.remat.policy == "full" and local.config.trainer.accumulation == 1
    in_float32 = not program.adds_bfloat16  # one kernel sums the gradients of attention's input
    whole = not _is_split(local, program, local.key_bytes)
    return not program.measured_matmuls and in_float32 and plain and alone and whole


def _is_split(local: LocalSizes, program: GpuProgram, size: int) -> bool:
    """Return whether XLA splits the matmul of the gradient of a weight with results of this size: its tiles are fewer than the cores."""
    return _parts(local, program, size) > 1


def _parts(local: LocalSizes, program: GpuProgram, size: int) -> int:
    """Return into how many parts XLA splits the matmul of the gradient of a weight with results of this size: a power of two."""
    width = size // (local.tokens * local.compute_itemsize)
    tiles = ceil(width / TILE) * ceil(local.model.embed_dim / TILE)
    return 1 << (ceil(program.cores / tiles) - 1).bit_length()


def gathers_nothing(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether alike layers over data alone, recomputed with nothing to gather, run under this scheduler.

    The MLP's weight gradients come after attention's backward pass then.
    """
    config, model = local.config, local.model
    over_data = local.data > 1 and local.fsdp * local.tensor * local.context * local.expert * local.pipeline == 1
    plain = config.precision.matmul == "compute" and config.compute.remat.policy == "full" and model.norm_position == "pre"
    alone = over_data and local.uniform_dense and in_scan(model, config.compute)
    return not program.measured_matmuls and plain and alone and config.trainer.accumulation == 1


def recomputes_late(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether, where `gathers_nothing`, the first layers are computed again only when their gradients are near.

    By measured times the sum of the loss over devices is hidden behind the attention of the last two layers, computed again. Here five
    counted kernels hide it; so few are there only with cuDNN's attention, without biases and norms of queries and keys (Llama 2 7B, 3.1 8B
    and 3.2 3B; Qwen2.5 7B, Qwen3 4B, and Llama 3.2 3B with the Pallas kernels begin as by measured times; on GB200 and A100).
    """
    few = local.attention_backend() == "cudnn" and not local.model.attention_bias and not local.model.qk_norm
    return gathers_nothing(local, program) and few


def in_attention(local: LocalSizes, program: GpuProgram, *, at_start: bool) -> list[tuple[int, int]]:
    """Return the sizes of hidden activations and of all others at points in attention's backward pass, where `gathers_nothing`.

    Of the MLP gate and up with their gradients; the inputs of attention and MLP, the gradients of the layer's and of attention's result,
    queries, keys, values and the result, then also the gradients of these, while before the loop the input of down is in place of gate
    and up. At the start the second layer needs most: of the first the gradients of gate and up and the MLP's input wait. Where bfloat16 is
    added in float32, also attention's update and a rounded gradient; in the loop the three gradients of attention's input are summed at
    once. `LayerPeak.backward` adds one stream in float32. (Heaps of Llama 2 7B and Llama 3.2 3B for GB200, Llama 3.1 8B for A100.)
    """
    gates, hidden, stream = 2 if local.model.gated_mlp else 1, local.hidden_bytes, local.stream_bytes
    heads = local.query_bytes + local.key_bytes + local.value_bytes
    normed = local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    streams = (4 + at_start + (0 if program.adds_bfloat16 else 2)) * stream + normed - 4 * local.tokens * local.model.embed_dim
    others = streams + 2 * (heads + local.context_bytes)
    if at_start:
        return [(3 * gates * hidden, others - heads), ((2 * gates + 1) * hidden, others)]
    summed = [] if program.adds_bfloat16 else [(2 * gates * hidden, others + 3 * stream - heads - local.context_bytes)]
    return [(2 * gates * hidden, others), *summed]


def at_end_of_attention(local: LocalSizes, program: GpuProgram, *, at_start: bool) -> tuple[int, int]:
    """Return the sizes of hidden activations and of all others when attention's backward pass has summed the gradients of its input.

    Of the MLP gate and up with their gradients. Of the whole sequence: the gradients of attention's input by queries, keys and values with
    their sum, those of both results, the MLP's input, and attention's transposed; as it is too where a split matmul reads it.
    `LayerPeak.backward` adds one stream in float32.
    """
    gathered = not at_start and gathers_before_sum(local)
    streams, sharded = 8 + reads_gathered(local, program) + gathered, _sharded(local, program) - 2 + gathered
    return _hidden(local), streams * local.stream_bytes + _heads(local) + sharded * local.cut_stream_bytes


def gathers_before_sum(local: LocalSizes) -> bool:
    """Return whether the next attention's input is gathered before attention's backward pass has summed the gradients of its input.

    So it is where the next layer's input comes from host memory, and not out of a stack, and a third collective may be in flight beside the
    gather of weights and the scatter of this sum. The gradients of the layer before are reduced by then, as they would be a fourth.
    """
    return _from_host(local) and local.tensor <= WIDEST_TENSOR


def reads_gathered(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether split matmuls read attention's input as it was gathered: where each row is a part of the sum."""
    parts = [_parts(local, program, size) for size in (local.key_bytes, local.query_bytes)]
    return any(count > 1 and local.rows in (1, count) for count in parts)


def _hidden(local: LocalSizes) -> int:
    """Return the size of gate and up and their gradients, without a gate of up and its gradient; the input of down is there instead of
    gate and up where a norm of the MLP's result needed it."""
    gates = 2 if local.model.gated_mlp else 1
    return (gates + (1 if _norm_after(local) else gates)) * local.hidden_bytes


def _heads(local: LocalSizes) -> int:
    """Return the size of attention's result and the gradients of queries, keys and values; with norms of queries and keys also the inputs
    of these, and the halves of their results' gradients."""
    normed = 2 * (local.query_bytes + local.key_bytes) if local.model.qk_norm else 0
    return local.context_bytes + local.query_bytes + 2 * local.key_bytes + normed


def _sharded(local: LocalSizes, program: GpuProgram) -> int:
    """Return the number of streams between blocks: the gradient, and where norms follow, the one that they are added to; rounded ones where
    bfloat16 is added in float32."""
    return 1 + _norm_after(local) + (0 if program.adds_bfloat16 else 2)


def _from_host(local: LocalSizes) -> bool:
    """Return whether the inputs of blocks are kept in host memory."""
    remat = local.config.compute.remat
    return offloads_inputs(remat.policy, remat.names)


def _norm_after(local: LocalSizes) -> bool:
    """Return whether a norm follows the MLP, so that its result is computed again."""
    return recomputed(local.model, local.config.compute.remat).mlp_update
