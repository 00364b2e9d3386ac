"""Activations that are live in the backward pass of layers with block-scaled matmuls (mxfp8; nvfp4, whose backward pass is in mxfp8 too).

The kernel that computes the gradients of gate and up also reduces their blocks along the rows, and writes none of its results into its
inputs as the kernels of other matmuls do. Operands of weight gradients are quantized in blocks along the tokens, those of the MLP's three
weight gradients late. Read from the heaps of compiled steps (GPU backend, jax 0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from ridgeline.configs.remat import POLICIES
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import Recomputed, recomputed

BLOCK = 32
"""Elements of a block of the backward pass."""
CONSTANTS = 6
"""Arrays of constants, 4 bytes per block: what rounds a scale to a power of two, written once before the loop over layers."""
SUMMED_TOKENS = 65536
"""From this many tokens on a device, the gradients of an MLP's input by gate and by up are summed in memory: the kernel that sums them also
computes the gradient of the norm's weights, which is not delayed then."""


def applies(local: LocalSizes) -> bool:
    """Return whether the layers' matmuls are block-scaled and the backward pass recomputes gate and up.

    There is no mesh.tensor, mesh.context or expert with such matmuls.
    """
    remat = local.config.compute.remat
    alike = local.model.layer_period == 1 and not local.adapted
    again = recomputed(local.model, remat)
    computed = {"gate", "up"} & again.weights and POLICIES[remat.policy].recomputes_block
    return alike and local.config.precision.block_scaled is not None and bool(computed)


def scales(local: LocalSizes, size: int) -> int:
    """Return the size of 4 bytes for each block of an array that has this size in the compute dtype."""
    return 4 * size // local.compute_itemsize // BLOCK


def constants(local: LocalSizes) -> int:
    """Return the size of the constants for the scales of hidden activations and of residual streams: none with nvfp4."""
    if local.config.precision.block_scaled != "mxfp8":
        return 0
    return CONSTANTS * scales(local, local.hidden_bytes + local.stream_bytes)


def in_mlp(local: LocalSizes, again: Recomputed, *, at_start: bool) -> tuple[int, int]:
    """Return the sizes of hidden activations and of all others when the gradients of gate and up have been computed.

    Hidden: gate, up and the gradient of down's input, then the gradients of gate and up with the largest value of each block, and what
    the input of down is computed from. Others: the gradient of the stream, the input of the MLP's norm, and in one byte the input of the
    MLP and the gradient of its result; attention's, where its update is recomputed, else what the loop cuts out of the stacks: the input
    of the block, keys and values. nvfp4: results are float32 at first, and the kernel before writes what it needs of gate and up into new
    arrays: in the loop the last result is as large as two, at the start the gradients are written when one array less is there.
    """
    gates = 2 if local.model.gated_mlp else 1
    kept = gates - len({"gate", "up"} & again.weights)
    kept += at_start and local.config.precision.block_scaled == "nvfp4"
    hidden = (2 * (gates + 1) - kept) * local.hidden_bytes + gates * scales(local, local.hidden_bytes)
    streams = 2 * local.stream_bytes + 2 * local.stream_bytes // local.compute_itemsize
    if again.attention_update:
        attention = local.query_bytes + 2 * local.key_bytes + local.context_bytes + local.context_bytes // local.compute_itemsize
        return hidden, streams + attention
    return hidden, streams + (0 if at_start else local.stream_bytes + 2 * local.key_bytes)


def before_weight_gradients(local: LocalSizes, again: Recomputed) -> int:
    """Return the size of what the weight gradients of a layer are computed from, where the scheduler delays them.

    Of the MLP's: hidden activations as in `in_mlp` after its kernel. In one byte: the inputs of MLP and attention, the gradients of both
    results and of values, and attention's result, which is quantized late where attention's update is not recomputed, as is the input then.
    In the compute dtype: the gradients of queries and keys.
    """
    gates, narrow = 2 if local.model.gated_mlp else 1, local.compute_itemsize
    scaled = gates + (local.config.precision.block_scaled == "nvfp4")  # also the input of down
    hidden = (gates + 2) * local.hidden_bytes + scaled * scales(local, local.hidden_bytes)
    attention = local.query_bytes + local.key_bytes + local.key_bytes // narrow
    one_byte = 3 * local.stream_bytes
    if again.attention_update:
        one_byte += local.stream_bytes + local.context_bytes
    else:
        attention += local.context_bytes
    # Else the gradient of the norm is delayed too: its input, and its results' gradients by gate and by up.
    normed = 0 if local.tokens >= SUMMED_TOKENS else (1 + gates) * local.stream_bytes
    return hidden + attention + one_byte // narrow + normed
