"""Activations that are live in the backward pass of a layer over `tensor`, where 8-bit matmuls read them in one byte per element.

GPUs quantize before they gather over tensor: arrays of the whole sequence are float8, in the compute dtype are those that are sharded along
the sequence, and hidden activations. Read from the heaps of compiled steps (GPU backend, jax 0.10.2, fp8 and fp8_delayed). Sizes are
bytes of one device.
"""

from __future__ import annotations

from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import Recomputed


def applies(local: LocalSizes) -> bool:
    """Return whether layers, all of one kind and without experts, have 8-bit matmuls and a sequence that is sharded over tensor."""
    alike = local.model.moe is None and local.model.layer_period == 1 and not local.adapted
    return alike and local.tensor > 1 and local.config.precision.eight_bit


def one_byte(local: LocalSizes, size: int) -> int:
    """Return the size of an array in float8 that has this size in the compute dtype."""
    return size // local.compute_itemsize


def in_mlp(local: LocalSizes, again: Recomputed) -> tuple[int, int]:
    """Return the sizes of hidden activations and of all others when the gradients of gate and up have been computed.

    Hidden: those two, their input, gate and up where they are recomputed, and in float8 the inputs of three weight gradients. Others:
    gathered in float8, the inputs of attention and MLP and the gradient of the MLP's update; queries, the result of attention in both
    dtypes, keys and values; where it is recomputed, attention's update before its reduction. The stream between blocks has its own term.
    """
    hidden = (3 + len({"gate", "up"} & again.weights)) * local.hidden_bytes + 3 * one_byte(local, local.hidden_bytes)
    attention = local.query_bytes + local.context_bytes + one_byte(local, local.context_bytes) + 2 * local.key_bytes
    return hidden, 3 * one_byte(local, local.stream_bytes) + attention + local.stream_bytes * again.attention_update


def in_attention(local: LocalSizes) -> tuple[int, int]:
    """Return the sizes of hidden activations and of all others when the gradients of attention's input by queries, keys and values are
    summed.

    Those three gradients and their sum are not yet scattered; the input and the gradient of the update are float8, as are the inputs of the
    MLP's weight gradients.
    """
    return 3 * one_byte(local, local.hidden_bytes), 4 * local.stream_bytes + 2 * one_byte(local, local.stream_bytes)


def while_copied(local: LocalSizes, again: Recomputed) -> int:
    """Return what is live beside `in_mlp` in the layer that comes first, while XLA copies a stack: 0 where attention's update is kept, as
    the copy is made after the MLP then.

    The loss's gradient of the hidden states, both gathered inputs in the compute dtype, in place of one of them in float8, and two streams
    between blocks.
    """
    if not again.attention_update:
        return 0
    return 3 * local.stream_bytes - one_byte(local, local.stream_bytes) + 2 * local.cut_stream_bytes


def after_mlp(local: LocalSizes, *, waits: bool) -> int:
    """Return what is live after the MLP in the layer that comes first, where XLA copies a stack there.

    It does so where a norm follows the MLP: the MLP is computed again in the loss. Float8: the inputs of the MLP's weight gradients, the
    gradient of its update and the input of attention. In the compute dtype of the whole sequence: the loss's gradient of the hidden states,
    that of the MLP's input before its reduction, both updates before theirs, both gathered inputs. Attention's as in `in_mlp`, and four
    streams between blocks.

    waits: it does so too where the MLP is recomputed only when the gradient of its result is there. Both updates are reduced before that,
    and the gradient of the MLP's input is not there yet.
    """
    narrow = one_byte(local, 3 * local.hidden_bytes + 2 * local.stream_bytes + local.context_bytes)
    attention = local.query_bytes + local.context_bytes + 2 * local.key_bytes
    return narrow + (3 if waits else 6) * local.stream_bytes + attention + 4 * local.cut_stream_bytes


def of_experts(local: LocalSizes) -> bool:
    """Return whether layers, one in a turn, have experts with a capacity in 8 bits: batched matmuls, whose results cuBLASLt gives in
    float32 and other kernels round. Without a capacity a kernel of this project rounds them."""
    model, capacity = local.model, local.config.compute.experts.capacity_factor
    alike = model.moe is not None and model.layer_period == 1 and not local.adapted and model.latent_attention is None
    return alike and capacity is not None and local.config.precision.eight_bit


def in_experts(local: LocalSizes, again: Recomputed) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the sizes of hidden activations and of all others at two points in the experts of a layer.

    First when the gradient of a hidden activation has been computed: it and one of gate and up are float32, as those are that are computed
    again; in the compute dtype are the product of the other, and three results of the kernel that reads all. Then when the gradients of the
    rows by gate and by up are there, float32: quantized are the gradients of gate and up, for their weight gradients, and in the compute
    dtype the input of down. One kernel rounds and sums them for the tokens where it reads each row few times, else another rounds them
    first (`rounds_rows`). At both points the rows are there in float8, their inputs and the gradients of their results.
    """
    hidden, rows = local.hidden_bytes, 2 * one_byte(local, local.row_bytes)
    wide, gates = 4 // local.compute_itemsize, 2 if local.model.gated_mlp else 1
    at_gradient = (4 + wide + wide * (len({"gate", "up"} & again.weights) - 1)) * hidden
    rounded = local.row_bytes if rounds_rows(local) else local.slots * local.model.embed_dim * local.compute_itemsize
    in_rows = gates * wide * local.row_bytes + rounded
    beside = rows + beside_experts(local)
    return (at_gradient, beside), (hidden + gates * one_byte(local, hidden), in_rows + beside)


def rounds_rows(local: LocalSizes) -> bool:
    """Return whether a kernel of its own rounds results of experts in float32 before they are summed for the tokens.

    XLA fuses both where less is read and written then: each token reads a row for each of its experts. Reading float32 costs 4 bytes a
    read; the other way costs 6 bytes a row (read float32, write 16 bits), and 2 bytes a read.
    """
    moe = local.model.moe
    assert moe is not None
    reads = local.slots * min(moe.experts_per_token, moe.experts // local.expert)
    return reads >= 3 * local.expert_rows


def beside_experts(local: LocalSizes) -> int:
    """Return the size of what attention's backward pass needs, and of streams, while the experts run.

    Queries, keys, values, with norms of queries and keys also their inputs, and the result in both dtypes; the gradient of the layer's
    result and attention's update, sharded over tensor; the input of attention, in float8, over tensor in the compute dtype where it has
    been gathered.
    """
    attention = local.query_bytes + 2 * local.key_bytes + local.context_bytes + one_byte(local, local.context_bytes)
    attention += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    gathered = local.stream_bytes if local.tensor > 1 else one_byte(local, local.stream_bytes)
    return attention + 2 * local.cut_stream_bytes + gathered


def pending_experts(local: LocalSizes) -> int:
    """Return the size of what the delayed weight gradients of a layer are computed from, and of its norm's input in float32.

    Float8: the rows' inputs and the gradients of their results, gradients of gate and up, the input of down; of attention its input, the
    gradient of its update, its result, and the gradients of queries, keys and values.
    """
    gates = 2 if local.model.gated_mlp else 1
    narrow = 2 * local.row_bytes + (gates + 1) * local.hidden_bytes + 2 * local.stream_bytes
    narrow += local.context_bytes + local.query_bytes + 2 * local.key_bytes
    return one_byte(local, narrow) + 4 // local.compute_itemsize * local.cut_stream_bytes
