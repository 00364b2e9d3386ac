"""Time of attention on one device: of fused kernels, of XLA's kernels over blocks of scores, and of those over whole rows.

Legend: R rows per device, T sequence, N/K query/key heads per device, H head width, V width of values, b tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.flops import mean_keys_per_layer
from ridgeline.planner.hardware import Hardware
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.work import Work

FORWARD_SHARE = 0.235
"""Forward share of the time of fused attention. Measured in steps on an H200 with cuDNN 9.19: 0.235 at head width 128 and 4,096 tokens,
0.22 at 64 and 1,024. The backward pass has kernels beside that of its matmuls: dot products of results, sums over heads, a cast."""
PALLAS_SHARE = 0.57
"""Rate of flash attention in Triton over that of cuDNN: FlashAttention-3, which is close to cuDNN, is 1.5 to 2 times as fast as
FlashAttention-2 on an H100 (arXiv 2407.08608, abstract and section 4.1). Not measured here; with documents shorter than the row it is
faster than this."""
SCORE_PASSES = 14
"""Passes over the float32 scores in device memory, forward and backward, of attention over whole rows without fused kernels (XLA's
fusions), and of blocks on a CPU, which keeps them in its caches."""
FORWARD_MATMULS, BACKWARD_MATMULS = 2, 4
"""Matmuls of the size of the scores that the calibrated rate counts (planner.calibration_file.AttentionPoint)."""
KERNEL_MATMULS = {"cudnn": 5, "pallas": 7}
"""Backend -> matmuls in its backward kernels, which compute the scores again; those of Pallas are two, and both do."""


@dataclass(frozen=True)
class PassTimes:
    """Time of a part of one layer, or of all layers, in each pass."""

    forward: Work
    backward: Work


def attention_times(local: LocalSizes, device: Hardware, calibration: Calibration, dtype: str) -> PassTimes:
    """Return the time of scores, softmax and values of one layer, the mean over layers with and without a window.

    dtype: arithmetic of the matmuls, as in the hardware catalog.
    """
    backend = local.attention_backend(gpu=device.tensor_cores)
    software, model, length = calibration.software, local.model, local.config.data.seq_len
    if backend == "chunked" and device.tensor_cores and not software.own_attention:
        return _in_blocks(local, device, calibration, dtype)
    keys = mean_keys_per_layer(model, length)
    pairs = keys * (model.num_heads / local.tensor) * local.tokens
    flops = (FORWARD_MATMULS + BACKWARD_MATMULS) * pairs * (model.head_width + model.value_width)
    if backend in ("cudnn", "pallas") or software.own_attention:
        own = "cudnn" if software.own_attention else backend
        work = Work(flops / fused_flops_per_s(device, calibration, dtype, length, model.head_width, own))
    else:
        seen = keys if backend == "chunked" else length
        rate = calibration.matmul_flops_per_s(device, dtype, length, length, model.head_width)
        scores = local.tokens * seen * model.num_heads / local.tensor * 4
        moved = SCORE_PASSES * scores / calibration.memory_bytes_per_s(device)
        work = Work(flops * seen / keys / rate / software.in_step_share(dtype, device), moved)
    return PassTimes(work * FORWARD_SHARE, work * (1 - FORWARD_SHARE))


def fused_flops_per_s(device: Hardware, calibration: Calibration, dtype: str, seq_len: int, head_dim: int, backend: str) -> float:
    """Return the rate of a backend's fused kernels inside a step, forward plus backward, in FLOPs as planner.flops counts them."""
    software = calibration.software
    share = PALLAS_SHARE if backend == "pallas" else software.attention_share(device)
    return calibration.attention_flops_per_s(device, dtype, seq_len, head_dim) * share * software.in_step_share(dtype, device)


def counted_flops(flops: float, backend: str, *, backward: bool) -> float:
    """Return the FLOPs that a fused kernel counts for at that rate (`fused_flops_per_s`), so that it takes its share of the time.

    flops: of all its matmuls, those that it repeats included.
    """
    both = FORWARD_MATMULS + BACKWARD_MATMULS
    if not backward:
        return FORWARD_SHARE * both / FORWARD_MATMULS * flops
    return (1 - FORWARD_SHARE) * both / KERNEL_MATMULS[backend] * flops


def block_pairs(model: ModelConfig, seq_len: int, block: int) -> float:
    """Return the pairs of a block of queries and a block of keys that are computed for a row, the mean over the layers."""
    blocks = -(-seq_len // block)
    whole, span = blocks * (blocks + 1) // 2, model.local_span
    if span is None:
        return float(whole)
    windowed = sum(i + 1 - max(0, i * block - span + 1) // block for i in range(blocks))
    return (model.full_layers * whole + (model.num_layers - model.full_layers) * windowed) / model.num_layers


def _in_blocks(local: LocalSizes, device: Hardware, calibration: Calibration, dtype: str) -> PassTimes:
    """Return the time of attention in blocks (models/attention/chunked.py) by the kernels that XLA compiles for one pair of blocks.

    Scores S [R, N, b, b], queries and results [R, N, b, H], keys and values [R, K, b, H]. Sums are float32 in device memory: each pair
    reads and writes those of its results, and in the backward pass those of the three gradients. Each matmul takes its FLOPs or its
    memory traffic, whichever is longer. Read from the compiled steps of Gemma 2 and 3 for an H200 (jaxlib 0.10.2).
    """
    model, length = local.model, local.config.data.seq_len
    block = min(local.config.compute.attention.chunk, length)
    rows, heads, kv_heads = local.tokens / length, model.num_heads / local.tensor, max(1.0, model.kv_heads / local.tensor)
    pairs = rows * block_pairs(model, length, block)
    scores, width, width_v = heads * block * block, model.head_width, model.value_width
    q, out, k, v = heads * block * width, heads * block * width_v, kv_heads * block * width, kv_heads * block * width_v
    of_queries, of_keys = (max(1, round(rows * each)) for each in (heads * block, kv_heads * width))  # matmuls of a batch fill a device
    group = round(heads / kv_heads * block)
    bandwidth = calibration.memory_bytes_per_s(device)

    def passes(moved: float) -> Work:
        return Work(0.0, pairs * moved / bandwidth)

    def matmul(inner: int, shape: tuple[int, int, int], moved: float) -> Work:
        """Return the time of a matmul of all pairs: 2 FLOPs per score and element of `inner`, or `moved` bytes per row and pair."""
        rate = calibration.matmul_flops_per_s(device, dtype, *shape) * calibration.software.in_step_share(dtype, device)
        compute, memory = Work(pairs * 2 * scores * inner / rate), passes(moved)
        return compute if compute.seconds > memory.seconds else memory

    read_scores = matmul(width, (of_queries, block, width), 2 * q + 2 * k + 4 * scores)
    forward = passes(4 * (k + v) + 4 * scores + 6 * scores + 12 * out)  # blocks cut out; largest score; weights; sum of results
    forward += read_scores + matmul(width_v, (of_queries, width_v, block), 2 * scores + 2 * v + 4 * out)
    backward = passes(4 * (q + out) + 12 * scores + 12 * q)  # blocks cut out; gradient of the scores; sum of the queries' gradient
    backward += read_scores + matmul(width_v, (of_queries, block, width_v), 2 * out + 2 * v + 4 * scores)
    backward += matmul(width, (of_queries, width, block), 2 * scores + 2 * k + 4 * q)
    backward += matmul(width_v, (of_keys, block, group), 2 * out + 2 * scores + 8 * v)
    backward += matmul(width, (of_keys, block, group), 2 * q + 2 * scores + 8 * k)
    return PassTimes(forward, backward)
