"""Layers with experts over tensor where XLA's scheduler counts kernels with constants (planner/constant_costs.py).

Kernels of experts hide little by constants, so the scheduler lacks kernels to put behind the exchanges of tokens. It works from the end:
the weight gradients of a layer before the loop come as late as they hide something, behind the exchanges of the next layer. Operands of
both layers' weight gradients are live then. Read from heaps of Mixtral and Qwen3 30B on A100s and GB200s (jax 0.10.2). Where a step does
not fit into the device's memory, the scheduler does not do this. Sizes are bytes of one device.
"""

from __future__ import annotations

from ridgeline.planner.hardware import GpuProgram
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import recomputed

PENDING = 2
"""Layers whose operands of weight gradients are live together."""


def applies(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether alike layers with experts run over tensor under this scheduler, with gathered tokens and no 8-bit matmuls."""
    model, precision = local.model, local.config.precision
    alike = model.moe is not None and model.layer_period == 1 and not local.adapted and not local.latent_bytes
    plain = local.pipeline * local.context == 1 and precision.matmul == "compute" and not local.sends_uncapped
    return not program.measured_matmuls and alike and plain and local.tensor > 1


def hidden_activations(local: LocalSizes) -> int:
    """Return how many hidden activations the weight gradients of a layer are computed from.

    The gradients of gate and up and the input of down; with a capacity weight gradients are plain matmuls, and the kernel of down's
    computes its input from gate and up.
    """
    gates = 2 if local.model.gated_mlp else 1
    return gates + 1 if local.config.compute.experts.capacity_factor is None else 2 * gates


def recomputes_experts(local: LocalSizes) -> bool:
    """Return whether gate and up are computed again."""
    return {"gate", "up"} & recomputed(local.model, local.config.compute.remat).weights != set()


def delays_two(local: LocalSizes) -> bool:
    """Return whether operands of two layers' weight gradients are live together before the loop.

    In models with norms of queries and keys sums of these norms' gradients hide exchanges too: so it is there only where gate and up are
    computed again and tokens are exchanged over expert, after tensor.
    """
    return not local.model.qk_norm or (recomputes_experts(local) and local.expert > 1)


def stacks_are_there(local: LocalSizes) -> bool:
    """Return whether the weight gradients of the layer before these two are in the stacks of gradients.

    The two are the second and third layer then, else the first two: with norms of queries and keys, and where experts are computed again
    but attention's update is kept.
    """
    return not local.model.qk_norm and not _keeps_update(local)


def _keeps_update(local: LocalSizes) -> bool:
    """Return whether experts are computed again, from a kept update of attention."""
    return recomputes_experts(local) and not recomputed(local.model, local.config.compute.remat).attention_update


def beside_experts(local: LocalSizes) -> int:
    """Return what is live in the loop when the gradients of a layer's rows are summed, beside hidden activations, rows and slots.

    The input of attention, without expert also these sums; queries, keys, values and attention's result, with norms of queries and keys
    also their inputs; where attention's update is kept, the final hidden states and the gradient of theirs. `LayerPeak.backward` adds one
    stream in float32.
    """
    heads = local.context_bytes + local.query_bytes + 2 * local.key_bytes
    heads += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    streams = (1 if local.expert > 1 else 2) * local.stream_bytes + 2 * local.cut_stream_bytes
    return heads + streams + (local.stream_bytes + 2 * local.cut_stream_bytes if _keeps_update(local) else 0)


def in_experts(local: LocalSizes) -> int:
    """Return what is live when the gradients of the second layer's rows are summed for its tokens.

    In the rows of the experts the inputs and the gradients of the results of both layers, and the parts by gate and by up. Of attention
    its inputs, the gradient of the first layer's update, queries or their gradients, keys, values and results; streams between blocks.
    Where these are the first two layers, the final hidden states and the gradient of theirs are there too.
    """
    model = local.model
    rows = (2 * PENDING + (2 if model.gated_mlp else 1)) * local.row_bytes + local.slot_bytes
    heads = PENDING * (local.context_bytes + local.query_bytes + 2 * local.key_bytes)
    heads += 3 * (local.query_bytes + local.key_bytes) if model.qk_norm else 0
    streams = 3 * local.stream_bytes + 4 * local.cut_stream_bytes
    streams += 0 if stacks_are_there(local) else local.stream_bytes + 2 * local.cut_stream_bytes
    return PENDING * hidden_activations(local) * local.hidden_bytes + rows + heads + streams


def after_attention(local: LocalSizes) -> int:
    """Return what is live when the gradients of the second layer's attention input by queries, keys and values are summed.

    The rows of both layers' weight gradients; the three gradients and their sum, both layers' inputs of attention and gradients of its
    updates, the gradient of the MLP's input, the third layer's input of attention and its update, which are computed again by then.
    """
    heads = (PENDING + 1) * (local.context_bytes + local.query_bytes + 2 * local.key_bytes)
    heads += 3 * (local.query_bytes + local.key_bytes) if local.model.qk_norm else 0
    rows = PENDING * (hidden_activations(local) * local.hidden_bytes + 2 * local.row_bytes)
    return rows + heads + 10 * local.stream_bytes + 8 * local.cut_stream_bytes
