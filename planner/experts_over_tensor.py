"""Layers with experts over tensor where several layers' weight gradients are computed together.

XLA's scheduler knows no time of the kernels of experts, and counts each with a constant (planner/constant_costs.py): they hide little, and
it lacks kernels to put behind the exchanges of tokens. It works from the end: the weight gradients of the layers before the loop come as
late as they hide something, behind the exchanges of the next layer. What they are computed from is live until then. Where all kernels are
counted with constants so are matmuls with a capacity; where matmuls have measured times this is only so where tokens are exchanged over
expert and then over tensor. Read from heaps of Mixtral and Qwen3 on A100s, GB200s, H100s and a B200 (jax 0.10.2). Where
a step does not fit into the device's memory, the scheduler does not do this. Sizes are bytes of one device.
"""

from __future__ import annotations

from ridgeline.planner import delayed_experts, eight_bits
from ridgeline.planner.activations import NODE_DEVICES
from ridgeline.planner.hardware import GpuProgram
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import recomputed

NORMS_FACTOR = 3
"""With norms of queries and keys and one microbatch, attention's matmuls are long from a third of `SHORT_ATTENTION`'s FLOPs on.

Bounds from heaps of Qwen3 30B over tensor=2 x expert=4: three layers with 0.31e12 FLOPs (16,384 tokens), two with 0.62e12 (32,768).
"""


def applies(local: LocalSizes) -> bool:
    """Return whether alike layers with experts run over tensor; block-scaled matmuls and 8-bit ones with all_to_all were not looked at."""
    model, precision = local.model, local.config.precision
    alike = model.moe is not None and model.layer_period == 1 and not local.adapted and not local.latent_bytes
    plain = local.pipeline * local.context == 1 and precision.block_scaled is None
    return alike and plain and local.tensor > 1 and not (precision.eight_bit and local.sends_uncapped)


def late(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether, in the loop too, the weight gradients of such a layer come when the gradients of its rows are summed."""
    plain = not local.config.precision.eight_bit and not local.sends_uncapped
    return applies(local) and not program.measured_matmuls and plain


def capped(local: LocalSizes) -> bool:
    """Return whether experts have a capacity: their matmuls are those of XLA."""
    return local.config.compute.experts.capacity_factor is not None


def hidden_activations(local: LocalSizes, program: GpuProgram) -> int:
    """Return how many hidden activations the weight gradients of a layer are computed from.

    The gradients of gate and up and the input of down; with a capacity weight gradients are plain matmuls, and where these have no measured
    times the kernel of down's computes its input from gate and up.
    """
    gates = 2 if local.model.gated_mlp else 1
    return 2 * gates if capped(local) and not program.measured_matmuls else gates + 1


def recomputes_experts(local: LocalSizes) -> bool:
    """Return whether gate and up are computed again."""
    return {"gate", "up"} & recomputed(local.model, local.config.compute.remat).weights != set()


def _keeps_update(local: LocalSizes) -> bool:
    """Return whether experts are computed again, from a kept update of attention."""
    return recomputes_experts(local) and not recomputed(local.model, local.config.compute.remat).attention_update


def _between_nodes(local: LocalSizes) -> bool:
    """Return whether tokens are exchanged between nodes."""
    return local.tensor * local.expert > NODE_DEVICES


def together(local: LocalSizes, program: GpuProgram) -> int:
    """Return how many layers' operands of weight gradients are live together before the loop.

    By constants two; in models with norms of queries and keys, whose sums of these norms' gradients hide exchanges too, only where tokens
    are exchanged over expert. By measured times, where experts are computed again after an exchange, three, as the kernels of experts hide
    nothing: the weight gradients are as late as they can be. Two where the first layer's come before the third layer's experts: after long
    matmuls of attention (`delayed_experts.short_attention`), and with a capacity, thus measured matmuls. With one microbatch also the
    reduction of the unembedding's gradient is then in flight: it is so where exchanges go between nodes, and with norms of queries and keys
    already after shorter matmuls (`NORMS_FACTOR`). With a capacity and norms of queries and keys one. (Heaps of Qwen3 30B and of Mixtral,
    not derived.)
    """
    if local.config.precision.eight_bit and not eight_bits.gathers_rows(local):
        return 1
    both, in_loop = local.expert > 1 and recomputes_experts(local), local.config.trainer.accumulation > 1
    if not program.measured_matmuls:
        again = local.expert > 1 and (recomputes_experts(local) or not local.config.precision.eight_bit)
        return 2 if again or not local.model.qk_norm else 1
    if not both or (capped(local) and local.model.qk_norm):
        return 1
    if local.config.precision.eight_bit:
        # also in a loop attention's matmuls are long from there on; this project's attention kernels hide more than cuDNN's
        short = delayed_experts.short_attention(local, NORMS_FACTOR) and local.attention_backend() == "cudnn"
        return 3 if local.model.qk_norm and short and not _between_nodes(local) and not _keeps_update(local) else 2
    long = not delayed_experts.short_attention(local, NORMS_FACTOR if local.model.qk_norm and not in_loop else 1)
    return 2 if capped(local) or long or (_between_nodes(local) and not in_loop) else 3


def first_is_computed(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether two layers are the second and third one, and the weight gradients of the first are there.

    Else they are the first two: where attention's update is kept, and by constants with norms of queries and keys.
    """
    second = together(local, program) == 2 and not _keeps_update(local)
    return second and (program.measured_matmuls or not local.model.qk_norm)


def in_experts(local: LocalSizes, program: GpuProgram) -> int:
    """Return what is live when the gradients of the last of these layers' rows are summed for its tokens.

    In the rows of the experts the inputs and the gradients of the results of all layers, and the parts by gate and by up. Of attention
    its inputs, the gradient of the first layer's update, queries or their gradients, keys, values and results; streams between blocks.
    Where these are not the second and third layer, the final hidden states and the gradient of theirs are there too. Of three layers
    without norms of queries and keys, within a node attention's weight gradients of the first two and of the final norm are computed
    before; between nodes most is live when gate and up are computed again: the exchange that follows is long enough for the first layer's
    weight gradients, which come before the gradients of the rows by gate and by up then. (Heaps of Mixtral, not of Qwen3 30B.)
    """
    model, layers = local.model, together(local, program)
    if local.config.precision.eight_bit:
        return eight_bits.in_pending_rows(local, layers)
    rows = (2 * layers + (2 if model.gated_mlp else 1)) * local.row_bytes + local.slot_bytes
    if layers == 3 and _between_nodes(local) and not model.qk_norm:
        rows = (2 * layers + 1) * local.row_bytes
    attention = layers if layers < 3 or model.qk_norm or _between_nodes(local) else 1
    heads = attention * (local.context_bytes + local.query_bytes + 2 * local.key_bytes)
    heads += (attention + 1) * (local.query_bytes + local.key_bytes) if model.qk_norm else 0
    streams = (attention + 1) * local.stream_bytes + 4 * local.cut_stream_bytes
    streams += 0 if first_is_computed(local, program) or attention < layers else local.stream_bytes + 2 * local.cut_stream_bytes
    return layers * hidden_activations(local, program) * local.hidden_bytes + rows + heads + streams


def after_attention(local: LocalSizes, program: GpuProgram) -> int:
    """Return what is live when the gradients of the second layer's attention input by queries, keys and values are summed.

    The rows of both layers' weight gradients; the three gradients and their sum, both layers' inputs of attention and gradients of its
    updates, the gradient of the MLP's input, the third layer's input of attention and its update, which are computed again by then.
    """
    heads = 3 * (local.context_bytes + local.query_bytes + 2 * local.key_bytes)
    heads += 3 * (local.query_bytes + local.key_bytes) if local.model.qk_norm else 0
    rows = 2 * (hidden_activations(local, program) * local.hidden_bytes + 2 * local.row_bytes)
    return rows + heads + 10 * local.stream_bytes + 8 * local.cut_stream_bytes


def beside_experts(local: LocalSizes) -> int:
    """Return what is live when the gradients of one layer's rows are summed, beside hidden activations, rows and slots.

    The input of attention, without expert also these sums; queries, keys, values and attention's result, with norms of queries and keys
    also their inputs; where attention's update is kept, the final hidden states and the gradient of theirs. `LayerPeak.backward` adds one
    stream in float32.
    """
    heads = local.context_bytes + local.query_bytes + 2 * local.key_bytes
    heads += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    streams = (1 if local.expert > 1 else 2) * local.stream_bytes + 2 * local.cut_stream_bytes
    return heads + streams + (local.stream_bytes + 2 * local.cut_stream_bytes if _keeps_update(local) else 0)


def one_layer(local: LocalSizes, program: GpuProgram) -> int:
    """Return what is live when the gradients of the rows of a layer before the loop are summed, and no operands of others are."""
    gates = 2 if local.model.gated_mlp else 1
    rows = (2 + gates) * local.row_bytes + local.slot_bytes
    heads = local.query_bytes + local.key_bytes if local.model.qk_norm else 0  # halves of the gradients of the layer before
    hidden = hidden_activations(local, program) * local.hidden_bytes
    return hidden + rows + heads + local.stream_bytes + 2 * local.cut_stream_bytes + beside_experts(local)
