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
FORWARD_BLOCK = 16
"""Elements of a block of nvfp4's forward pass."""
FORWARD_CONSTANTS = 2
"""As `CONSTANTS`, per block of nvfp4's forward pass."""
CONSTANTS = 6
"""Arrays of constants, 4 bytes per block: what rounds a scale to a power of two, written once before the loop over layers."""
SUMMED_TOKENS = 65536
"""From this many tokens on a device, the gradients of an MLP's input by gate and by up are summed in memory: the kernel that sums them also
computes the gradient of the norm's weights, which is not delayed then."""


def applies(local: LocalSizes) -> bool:
    """Return whether the layers, all of one kind, have block-scaled matmuls and the backward pass runs blocks again.

    There is no mesh.tensor, mesh.context or expert with such matmuls.
    """
    recomputes = POLICIES[local.config.compute.remat.policy].recomputes_block
    return local.config.precision.block_scaled is not None and local.model.layer_period == 1 and not local.adapted and recomputes


def scales(local: LocalSizes, size: int) -> int:
    """Return the size of 4 bytes for each block of an array that has this size in the compute dtype."""
    return 4 * size // local.compute_itemsize // BLOCK


def scaled(local: LocalSizes, size: int) -> int:
    """Return the size in 8 bits, with a scale of a byte for each block, of an array that has this size in the compute dtype."""
    elements = size // local.compute_itemsize
    return elements + elements // BLOCK


def constants(local: LocalSizes) -> int:
    """Return the size of the constants for the scales of hidden activations and of residual streams.

    With nvfp4 they are of the smaller blocks of the forward pass, for what the backward pass multiplies again: the input of down only where
    a norm needs its result.
    """
    if local.config.precision.block_scaled is None:
        return 0
    if local.config.precision.block_scaled == "mxfp8":
        return CONSTANTS * scales(local, local.hidden_bytes + local.stream_bytes)
    if not applies(local) and not in_order(local):
        return 0
    again = recomputed(local.model, local.config.compute.remat)
    return FORWARD_CONSTANTS * scales(local, local.stream_bytes + local.hidden_bytes * again.mlp_update) * BLOCK // FORWARD_BLOCK


def in_mlp(local: LocalSizes, again: Recomputed, *, at_start: bool) -> tuple[int, int]:
    """Return the sizes of hidden activations and of all others when the gradients of gate and up have been computed.

    Hidden: gate, up and the gradient of down's input, the gradients of gate and up with the largest value of each block, and what the input
    of down is computed from. Kept gate and up are read from the stacks, and their gradients are there in one byte too. nvfp4: results are
    float32, from which the kernel before writes what is needed of gate and up: in the loop the last result is as large as two arrays. Where
    a norm needs the result of down again, the input of down is there before, and is no result of the kernel: one of gate and up is float32.

    Others: the gradient of the stream, the input of the MLP's norm, and in one byte the input of the MLP and the gradient of its result;
    attention's, where its update is recomputed, else what the loop cuts out of the stacks: the input of the block, keys and values; the
    inputs of norms of queries and keys.

    Norms after attention and MLP: attention's update is in place of the input of the MLP's norm, and the MLP's update is there. The first
    gradient of the stream is float32 where it is written (SUMMED_TOKENS), else computed from that of the loss. Without a norm before
    attention its input is also there in one byte.
    """
    gates = 2 if local.model.gated_mlp else 1
    kept = gates - len({"gate", "up"} & again.weights)
    nvfp4, after = local.config.precision.block_scaled == "nvfp4", again.mlp_update
    if at_start and nvfp4 and not after:
        kept = max(1, kept)
    hidden = (2 * (gates + 1) - kept + (nvfp4 and after)) * local.hidden_bytes + (gates + after) * scales(local, local.hidden_bytes)
    streams = 2 * local.stream_bytes + 2 * local.stream_bytes // local.compute_itemsize
    first = (1 if local.tokens >= SUMMED_TOKENS else -1) if at_start else 0  # that of the loss is not counted here
    streams += (1 + first) * local.stream_bytes * after
    if again.attention_update:
        attention = local.query_bytes + 2 * local.key_bytes + local.context_bytes + local.context_bytes // local.compute_itemsize
        attention += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
        attention += local.stream_bytes // local.compute_itemsize if local.model.norm_position == "post" else 0
        return hidden, streams + attention
    return hidden, streams + (0 if at_start else local.stream_bytes + 2 * local.key_bytes)


def in_order(local: LocalSizes) -> bool:
    """As `applies`, for turns of dense layers of several kinds, whose backward passes follow each other (planner/turn.py)."""
    recomputes = POLICIES[local.config.compute.remat.policy].recomputes_block
    several = local.model.layer_period > 1 and local.model.moe is None and local.config.compute.scan_layers
    return local.config.precision.block_scaled is not None and several and not local.adapted and recomputes


def before_weight_gradients(local: LocalSizes, again: Recomputed) -> int:
    """Return the size of what the weight gradients of a layer are computed from, where the scheduler delays them.

    Of the MLP's: hidden activations as in `in_mlp` after its kernel. Where gate and up are kept, neither of them; where attention's update
    is recomputed beside that, the gradients of one of two layers are quantized early. In one byte: the input of the MLP, the gradients of
    both results and of values. Where attention's update is recomputed, so are the input and the result of attention; else the result is
    not quantized yet, and the input is read from the stack. In the compute dtype: the gradients of queries and keys.

    Gradients of the weights of norms after attention and MLP are delayed too: both updates, and the gradients of their norms' results. So
    are those of norms of queries and keys: their inputs; from SUMMED_TOKENS on, the gradients of these are quantized early.
    """
    gates, narrow = 2 if local.model.gated_mlp else 1, local.compute_itemsize
    # also the input of down
    scaled = gates + (local.config.precision.block_scaled == "nvfp4")
    hidden = (gates + 2 - again.mlp_update) * local.hidden_bytes
    if not {"gate", "up"} & again.weights:
        early = (narrow - 1) * gates * local.hidden_bytes // (2 * narrow) if again.attention_update else 0
        hidden = (gates + 1) * local.hidden_bytes - early
    hidden += scaled * scales(local, local.hidden_bytes)
    attention = local.query_bytes + local.key_bytes + local.key_bytes // narrow
    one_byte = 3 * local.stream_bytes
    if again.attention_update:
        one_byte += local.stream_bytes + local.context_bytes
    else:
        attention += local.context_bytes
    # Else the gradient of the norm is delayed too: its input, and its results' gradients by gate and by up.
    normed = 0 if local.tokens >= SUMMED_TOKENS or local.model.norm_position == "post" else (1 + gates) * local.stream_bytes
    normed += 4 * local.stream_bytes * again.mlp_update
    heads = local.query_bytes + local.key_bytes
    if local.model.qk_norm:
        normed += heads + (heads // narrow if local.tokens >= SUMMED_TOKENS else 0)
    return hidden + attention + one_byte // narrow + normed
