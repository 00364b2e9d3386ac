"""How tokens come to their experts, and the sizes of the experts' buffers on one device: how many rows the grouped matmuls have.

Each device sorts the assignments of tokens to its experts. The matmul kernel for GPUs pads the rows of each expert to whole blocks
(models/moe/grouped_matmul.py uses the same numbers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ridgeline.configs.model_schema import ModelConfig, MoEConfig
from ridgeline.configs.schema import ExpertsConfig, PrecisionConfig

BLOCK = 128
"""Rows of a block of the kernel for GPUs, for any number of experts: the rows of each expert are padded to whole blocks.

With n rows per expert, blocks of b rows multiply n + b/2 on average. On an H200 (benchmarks/gpu_experts.py: 4,096 rows per expert, 2,048 x
768) blocks of 64 rows reach 0.72 of the rate of blocks of 128 where rows are multiplied with matrices, and the same rate for the gradients
of the matrices: 0.79 of it together. So 128 rows are faster where (n + 64) * 0.79 < n + 32: from n = 91. With fewer rows, reading a matrix
takes as long as multiplying a block with it (3.1 MB at 4.8 TB/s: 0.66 us; 128 rows at 600 TFLOP/s: 0.67 us). The price is memory: buffers
have n + 127 rows per expert, not n + 63: 1.5 % more with n = 4,096, 11 % with 512, 20 % with 256, and 33 % with 128.
"""
TILE = 64
"""Widths of the kernel for GPUs are padded to multiples of it."""


def padded_rows(assignments: int, experts: int, block: int) -> int:
    """Return the rows that are enough for any loads of the experts: A + E * (block - 1), in whole blocks."""
    return (assignments + experts * (block - 1)) // block * block


def filled_share(experts: int, per_token: int, groups: int) -> float:
    """Return the assignments of a device with equal loads, as a share of the most that it has room for without a capacity.

    The experts are sharded over `groups` devices, which share their tokens. A device has room for per_token assignments of each token, or
    for one to each of its experts if these are fewer.
    """
    local = experts // groups
    return per_token * local / (experts * min(per_token, local))


def capacity(tokens: int, experts: int, per_token: int, factor: float) -> int:
    """Return the most tokens of a device that an expert processes with compute.experts.capacity_factor.

    Args:
      tokens: of the device's microbatch, with sequence parallelism those of its part of the sequence.
      experts: of the layer.
      per_token: experts per token.
      factor: compute.experts.capacity_factor.
    """
    return min(tokens, math.ceil(factor * tokens * per_token / experts))


def peer_slots(tokens: int, experts: int, per_token: int, expert: int, factor: float | None) -> int:
    """Return the slots for the tokens of one device on another: enough for all that it may send.

    Args:
      tokens: of the device.
      experts: of the layer.
      per_token: experts per token.
      expert: size of the mesh axis.
      factor: compute.experts.capacity_factor; None: all tokens of a device may choose experts of one other.
    """
    return tokens if factor is None else min(tokens, experts // expert * capacity(tokens, experts, per_token, factor))


def exchange_method(moe: MoEConfig | None, compute: ExpertsConfig, sizes: Mapping[str, int]) -> str | None:
    """Return how tokens come to their experts, gather or all_to_all, with `auto` resolved for a mesh of these axis sizes; None where each
    device has all experts.

    auto: all_to_all where a token goes to fewer devices than there are. Without a capacity these are at most experts_per_token; with one,
    each device has room for capacity_factor * experts_per_token / mesh.expert of the tokens of another.
    """
    expert = sizes.get("expert", 1)
    if moe is None or expert == 1:
        return None
    if compute.exchange != "auto":
        return compute.exchange
    return "all_to_all" if moe.experts_per_token * (compute.capacity_factor or 1.0) < expert else "gather"


def peers_per_token(moe: MoEConfig, expert: int) -> float:
    """Return the mean number of devices of `expert` that a token goes to when it chooses experts evenly."""
    elsewhere = math.prod(1 - moe.experts / expert / (moe.experts - chosen) for chosen in range(moe.experts_per_token))
    return expert * (1 - max(0.0, elsewhere))


def buffer_rows(tokens: int, moe: MoEConfig, expert: int, factor: float | None, tensor: int = 1) -> int:
    """Return the rows of the buffer of the experts of a GPU.

    Args:
      tokens: tokens of the device.
      moe: the experts.
      expert: size of the mesh axis; a device processes tokens of all its devices. Without a capacity factor, all of them may choose its
        experts.
      factor: compute.experts.capacity_factor.
      tensor: size of the mesh axis, whose devices drop tokens of their parts of the sequence.
    """
    experts = moe.experts // expert
    if factor is not None:
        return experts * expert * tensor * capacity(tokens // tensor, moe.experts, moe.experts_per_token, factor)
    most = tokens * expert * min(moe.experts_per_token, experts)
    return padded_rows(most, experts, BLOCK)


def activates_in_place(model: ModelConfig, precision: PrecisionConfig) -> bool:
    """Return whether GPUs compute the gradients of experts' hidden values by a kernel of this project (models/activation.py).

    Not with biases, which XLA adds in the same kernel, nor in 8 bits, where it scales the results in it; erfc, which gelu needs, has no
    Triton kernel.
    """
    plain = model.moe is not None and not model.mlp_bias and model.activation != "gelu"
    return plain and precision.compute == "bfloat16" and not precision.eight_bit
