"""Points where memory can peak in dense layers that follow each other in the backward pass (models/backward_order.py), or are alike.

Each matmul computes its weight gradients before the gradient of its input is used (models/matmul), a layer is computed again only when the
gradient of its result is there, and it waits for the reduced weight gradients of the layer two before it. So nothing is left to XLA's
scheduler but the gradients of norms, which wait for the end of the next layer: the inputs of two layers' norms are live, and the unreduced
weight gradients of the layer before. ("Before" and "next" are in the order of the backward pass.) Not over `tensor`, where matmuls have no
such order. Read from the heaps of compiled steps of Gemma 2 and 3 and OLMo 3 (GPU backend, jax 0.10.2). Sizes are bytes of one device.
Alike layers over context have no order but that of their matmuls (`_of_alike`).
"""

from __future__ import annotations

from ridgeline.planner import block_scaled
from ridgeline.planner.activations import offloads_inputs
from ridgeline.planner.experts_peak import Point
from ridgeline.planner.live_buffers import LiveBuffers
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import recomputed

STREAMS = {"pre": 7.0, "post": 6.0, "both": 9.0}
"""Residual streams in the MLP of a layer, by model.norm_position: inputs of block, attention and MLP, attention's update, gradients of the
layer's result and of the MLP's; for a norm before the MLP its input, of two layers, and the gradient of its result in the layer before; for
a norm only after it the result of down. (`pre` has no heap: it is `both` without the norms' results and their gradients.)"""
TRANSPOSED = {"pre": 9.0, "post": 6.5, "both": 11.0}
"""The same with 8-bit matmuls whose operands are transposed first: these have one byte per element, the inputs of attention and MLP and,
twice, the gradient of the MLP's result. For a norm after the MLP the result of down, of two layers."""
ANY_LAYOUT = {"pre": 4.5, "post": 3.5, "both": 6.5}
"""The same with 8-bit matmuls that read any layout: three operands; what norms are computed from is quantized at once."""
BLOCK_SCALED = {"pre": 8.0, "post": 6.5, "both": 10.0}
"""The same with block-scaled matmuls."""
LATE = {"pre": 2, "post": 3, "both": 2}
"""Streams more with scales of earlier steps: the largest magnitudes of gradients are found late, since only the next step needs them."""


def points(live: LiveBuffers, mask: int, matrices: int, workspace: int, *, at_start: bool) -> list[Point]:
    """Return the points in a layer's MLP, before the weight gradients of down, and in its attention; none: layers have no such order.

    mask: of packed documents. matrices: gathered weights. workspace: of attention.
    """
    if live.alike_gradients_first:
        return _of_alike(live, mask, matrices, workspace)
    if not (live.turn.gradients_first and live.turn.recomputes and live.turn.in_order):
        return []
    local, precision, program = live.local, live.local.config.precision, live.program
    late = precision.matmul == "fp8_delayed"
    gradients = local.mlp_matrix * local.gradient_itemsize
    gradients += local.gathered_trained_weights * local.gradient_itemsize if live.reduced else 0
    kinds = STREAMS
    if precision.eight_bit:
        kinds = TRANSPOSED if program.transposes_float8 else ANY_LAYOUT
    elif precision.block_scaled is not None:
        kinds = BLOCK_SCALED
    streams = kinds[local.model.norm_position] + (LATE[local.model.norm_position] if late else 0)
    streams += at_start and precision.eight_bit  # the gradient of the final hidden states
    # `LayerPeak.backward` adds one stream in float32, and an input of the block that comes from host memory
    rest = int(streams * local.stream_bytes) - 4 * local.tokens * local.model.embed_dim - local.cut_stream_bytes * offloads_inputs(local)
    return [
        ("its MLP", _hidden(local), rest + _heads(local, late=late), matrices, gradients, mask),
        ("its attention", 0, 6 * local.stream_bytes + 5 * local.query_bytes, 0, gradients, workspace),
    ]


def _of_alike(live: LiveBuffers, mask: int, matrices: int, workspace: int) -> list[Point]:
    """Return the points in a layer of alike ones over context: in its MLP, when the weight gradient of down is there, and in its attention.

    Gate and up, the input of down and its gradient. Streams: inputs of attention and MLP, attention's update, and the gradient of the
    layer's result (heaps of Llama 3, Mistral Nemo 12B and Qwen3).
    """
    local = live.local
    arrays = (2 if local.model.gated_mlp else 1) + 2
    heads = local.query_bytes + local.key_bytes + local.value_bytes + local.context_bytes
    heads += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    # `LayerPeak.backward` adds one stream in float32, and the input of the block where it comes from host memory
    rest = 4 * local.stream_bytes - 4 * local.tokens * local.model.embed_dim
    down = local.mlp_matrix * local.gradient_itemsize
    return [
        ("its MLP", arrays * local.hidden_bytes, rest + heads, matrices, down, mask),
        ("its attention", 0, 4 * local.stream_bytes, 0, 0, workspace),
    ]


def _hidden(local: LocalSizes) -> int:
    """Return the size of hidden activations in a layer's MLP.

    Gate and up, cut out of the stacks where they are kept, the input of down and its gradient; gelu's result is an array of its own. In 8
    bits gelu's result is read with the input of down in one byte; without it, and with scales of earlier steps, the gradient of gate.
    Block-scaled: gradients of gate and up in place of the input of down; kept ones are read from the stacks, and their gradients are there
    in one byte too. nvfp4: one of gate and up is in float32.
    """
    precision, gates = local.config.precision, 2 if local.model.gated_mlp else 1
    gelu = local.model.activation == "gelu_tanh"
    if precision.block_scaled is not None:
        kept = gates - len({"gate", "up"} & recomputed(local.model, local.config.compute.remat).weights)
        arrays = 2 * gates + 1 - kept + gelu + (precision.block_scaled == "nvfp4" and not kept)
        return arrays * local.hidden_bytes + (gates + 1) * block_scaled.scales(local, local.hidden_bytes)
    count = gates + 2.0 + gelu
    if precision.eight_bit:
        count += 1 if precision.matmul == "fp8_delayed" or not gelu else 1 / local.compute_itemsize
    return int(count * local.hidden_bytes)


def _heads(local: LocalSizes, *, late: bool) -> int:
    """Return the size of what is there of attention in a layer's MLP: queries, keys, values and the result; with norms of queries and keys
    their inputs too, and of the layer before these inputs and the gradients of the norms' results.

    late: of the layer before also the result and the gradients of queries, keys and values, whose largest magnitudes are found late.
    """
    query, key = local.query_bytes, local.key_bytes
    heads = query + key + local.value_bytes + local.context_bytes
    heads += 3 * (query + key) if local.model.qk_norm else 0
    return heads + (local.context_bytes + local.value_bytes + (0 if local.model.qk_norm else query + key) if late else 0)
