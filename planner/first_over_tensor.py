"""The layer over tensor that comes first in the backward pass, while XLA copies the stack of block inputs, where it counts with measured
times (`GpuProgram.measured_matmuls`; else planner/constant_costs.py) and whole blocks are recomputed.

XLA's scheduler works from the end of a layer. Behind a collective it puts kernels that are ready, first those that most collectives lead
to, and one in each place where the next kernel is not ready at once (kLessStall and kAsyncDepth, xla/service/latency_hiding_scheduler.cc).
These are the weight gradients, attention's before the MLP's; the copy, to which no collective leads, comes when none is left. Read from
heaps of Llama 2 and 3, Mistral Nemo, Qwen2.5, Qwen3 and GLM-4 (jax 0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from ridgeline.planner import constant_costs
from ridgeline.planner.activations import reduces_between_nodes
from ridgeline.planner.hardware import GpuProgram
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import in_scan, recomputed


def applies(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether alike layers in a loop gather their inputs over tensor under this scheduler, and `while_copied` knows the place of the
    copy: where blocks are recomputed from their inputs, or nothing of the MLP is."""
    config = local.config
    plain = local.pipeline * local.context == 1 and in_scan(local.model, config.compute) and config.precision.matmul == "compute"
    gathers = local.tensor > 1 and config.compute.tensor_overlap == "gather"
    known = config.compute.remat.policy == "full" or _copied_with_kept_mlp(local, program)
    return program.measured_matmuls and local.uniform_dense and plain and gathers and known


def _copied_with_kept_mlp(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether the MLP is kept, and the scatter of the gradient of its input is long enough that a stack is copied meanwhile.

    Not so over two devices, where small kernels hide it and stacks are copied before; nor where both gathered stacks are copied.
    """
    kept = local.config.compute.remat.policy in ("none", "attention-only")
    return kept and local.tensor > 2 and (local.fsdp > 1 or reduces_between_nodes(local, program))


def while_copied(local: LocalSizes, program: GpuProgram) -> int:
    """Return what is live in that layer while XLA copies the stack of block inputs, or later with the copy.

    The gradients of biases and of the norms of queries and keys are sums to which as many collectives lead as to attention's weight
    gradients, and take their places: these move to places before attention, and the copy is made while the gradient of the MLP's input is
    scattered (`_while_scattered`). Else it is made while the gradient of attention's update is gathered. Of the MLP then gate and up with
    their gradients are live; of the whole sequence the inputs of attention, transposed too, and of the MLP, and the gradients of both
    updates; queries, keys, values and the result of attention; the block's input and the gradient of its result.

    At the end of attention, gate and up or their gradients are left, as weight gradients hid attention; the gradients of its input by
    queries, keys and values are there, with their sum, and those of queries, keys and values instead of these.
    """
    model = local.model
    if local.config.compute.remat.policy != "full":
        return _with_kept_mlp(local)
    if model.attention_bias or model.qk_norm:
        return _while_scattered(local)
    hidden = 2 * local.hidden_bytes if model.gated_mlp else local.hidden_bytes
    reads = constant_costs.reads_gathered(local, program)
    heads = local.query_bytes + local.context_bytes + local.key_bytes + local.value_bytes + 2 * local.cut_stream_bytes
    return max(2 * hidden + 5 * local.stream_bytes, hidden + (7 + reads) * local.stream_bytes) + heads


def _while_scattered(local: LocalSizes) -> int:
    """Return what is live while the gradient of the MLP's input is scattered.

    Of the whole sequence the inputs of attention, transposed too, and of the MLP, and the gradients of the MLP's input and result. Where
    a norm follows the MLP, its result has been computed again, and of gate and up their product is left. Attention's as in `while_copied`,
    with norms of queries and keys also the inputs of these. Sharded: the block's input, attention's update added to it, the gradients of
    the block's result and of the norm's; where a norm follows attention also the update alone.
    """
    model = local.model
    gates = 2 if model.gated_mlp else 1
    after = recomputed(model, local.config.compute.remat).mlp_update
    heads = local.query_bytes + local.context_bytes + local.key_bytes + local.value_bytes
    heads += local.query_bytes + local.key_bytes if model.qk_norm else 0
    hidden = (gates + (1 if after else gates)) * local.hidden_bytes
    return hidden + 5 * local.stream_bytes + heads + (4 + after) * local.cut_stream_bytes


def _with_kept_mlp(local: LocalSizes) -> int:
    """Return what is live beside the stacks where the MLP is kept, while the gradient of the MLP's input is scattered.

    The gradients of gate and up and the input of down; of the whole sequence what `_while_scattered` has, but not attention's input in
    another layout; of attention queries, keys, values and the result. Without fsdp the last layer's values are in the stacks by then: the
    copy is made while the gradient of attention's update is gathered, and slices of the stacks are live: the MLP's input, queries, keys,
    values and the result; attention's input in two layouts before or after the copy, so that one of the two is counted.
    """
    model = local.model
    hidden = (3 if model.gated_mlp else 2) * local.hidden_bytes
    heads = local.query_bytes + local.context_bytes + local.key_bytes + local.value_bytes
    if local.fsdp == 1:
        return hidden + 4 * local.stream_bytes + heads + local.cut_stream_bytes
    heads += local.query_bytes + local.key_bytes if model.qk_norm else 0
    return hidden + 4 * local.stream_bytes + heads + 4 * local.cut_stream_bytes
