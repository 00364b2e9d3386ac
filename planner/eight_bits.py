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
