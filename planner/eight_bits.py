"""Activations that are live in the backward pass of a layer where 8-bit matmuls read them in one byte per element.

Over `tensor` GPUs quantize before they gather: arrays of the whole sequence are float8, in the compute dtype are those that are sharded
along the sequence, and hidden activations. Without tensor this module has the layers of devices that read float8 arrays in any layout; what
is transposed for others is in planner/layer_peak.py. Read from the heaps of compiled steps (GPU backend, jax 0.10.2, fp8 and fp8_delayed).
Sizes are bytes of one device.
"""

from __future__ import annotations

from ridgeline.planner.hardware import GpuProgram
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import Recomputed

READ_TWICE = 2**16
"""Tokens up to which the gradient of the final norm's input is not written before it is quantized, but computed again from its inputs.

Heaps of Llama 3.1 8B, 3.2 1B, Qwen2.5 7B and Mistral Nemo 12B: not written at 65,536 tokens of any width, written from 98,304.
"""


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

    Where the scales are those of this step, two kernels quantize when the largest magnitudes of all devices are there: first the gradient
    of gate. Then gate is gone, and the other gradient is computed from up and the gradient of the input of down, as it is quantized: the
    three, both gradients in two layouts and the input of down in float8 are live (heaps of Llama 2 7B, `full`, Qwen2.5 32B and Qwen3 8B,
    offload). The inputs of attention and MLP are quantized for their weight gradients later, in place of attention's update. With norms of
    queries and keys the inputs of these are there.
    """
    hidden = (3 + len({"gate", "up"} & again.weights)) * local.hidden_bytes + 3 * one_byte(local, local.hidden_bytes)
    attention = local.query_bytes + local.context_bytes + one_byte(local, local.context_bytes) + 2 * local.key_bytes
    if quantizes_in_two(local, again):
        hidden -= local.hidden_bytes
        attention += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    return hidden, 3 * one_byte(local, local.stream_bytes) + attention + local.stream_bytes * again.attention_update


def quantizes_in_two(local: LocalSizes, again: Recomputed) -> bool:
    """Return whether gate and up, computed again, are read by two kernels that quantize their gradients (`in_mlp`).

    Not looked at where a norm follows the MLP.
    """
    return local.config.precision.matmul == "fp8" and {"gate", "up"} <= again.weights and not again.mlp_update


def in_forward_pass_again(local: LocalSizes) -> tuple[int, int]:
    """Return the sizes of hidden activations and of all others when the MLP's result has been computed again, for the norm after it.

    Hidden: gate, up, their product, also in float8. Of the whole sequence the inputs of attention and MLP, gathered in the compute dtype,
    and the result in two layouts; where attention's update is kept, in the layer that comes first, for which the MLP runs in the loss: the
    MLP's input and result, the final hidden states and their gradient. Of attention as in `in_mlp`, with norms of queries and keys also the
    inputs of these; sharded: attention's update. (Heaps of OLMo 2 7B over tensor=4 and 8.)
    """
    attention = local.query_bytes + local.context_bytes + one_byte(local, local.context_bytes) + 2 * local.key_bytes
    attention += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    hidden = (3 if local.model.gated_mlp else 2) * local.hidden_bytes + one_byte(local, local.hidden_bytes)
    return hidden, 4 * local.stream_bytes + attention + local.cut_stream_bytes


def in_mlp_any_layout(local: LocalSizes, again: Recomputed, *, waits: bool) -> tuple[int, int]:
    """As `in_mlp`, for devices that read float8 arrays in any layout (hidden activations: `mlp_in_any_layout`).

    Others: the gathered inputs of attention and MLP, which are quantized after the gather, and the gradient of the MLP's update in float8.
    Where attention is recomputed, of it what `in_mlp` has; where not, most is live a kernel later, with the gradient of the MLP's input by
    up (counted here as half a stream, since half a hidden activation is gone). With norms of queries and keys the inputs of these are there
    too; where a norm follows the MLP, the input of down has been quantized for its result, and attention's update is left (heap of OLMo 2
    7B on B200s).

    waits: the layer is recomputed when the gradient of its result is there. Kept gate and up are then cut out of the stacks before the
    kernel that reads them, in which the input of down is one result more; attention is recomputed after it.
    """
    kept = {"gate", "up"} - again.weights
    if kept and waits:
        return 6 * local.hidden_bytes, 2 * local.stream_bytes
    hidden = max((3 + len({"gate", "up"} & again.weights)) * local.hidden_bytes, 4 * local.hidden_bytes)
    if not again.attention_update:
        return hidden, 3 * local.stream_bytes
    attention = local.query_bytes + local.context_bytes + one_byte(local, local.context_bytes) + 2 * local.key_bytes
    attention += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    if again.mlp_update:
        hidden += one_byte(local, local.hidden_bytes)
        attention += local.cut_stream_bytes
    return hidden, 2 * local.stream_bytes + one_byte(local, local.stream_bytes) + attention


def in_attention(local: LocalSizes) -> tuple[int, int]:
    """Return the sizes of hidden activations and of all others when the gradients of attention's input by queries, keys and values are
    summed.

    Those three gradients and their sum are not yet scattered; the input and the gradient of the update are float8, as are the inputs of the
    MLP's weight gradients.
    """
    return 3 * one_byte(local, local.hidden_bytes), 4 * local.stream_bytes + 2 * one_byte(local, local.stream_bytes)


def gradients_after_attention(local: LocalSizes, again: Recomputed, program: GpuProgram) -> bool:
    """Return whether the weight gradients of a layer come after its attention's backward pass.

    So it is with bfloat16 gradients where the MLP is computed again (heaps of OLMo 2 7B, Llama 3.1 8B and Qwen3 8B; with float32 gradients
    those of the MLP come before). It shows over many devices, where gathered streams are large beside the rest.
    """
    from_host = local.config.compute.remat.offloads
    return applies(local) and "up" in again.weights and not from_host and local.gradient_itemsize == 2 and program.transposes_float8


def after_attention(local: LocalSizes) -> tuple[int, int]:
    """Return the sizes of hidden activations and of all others when the gradients of attention's input are summed, and all weight gradients
    of the layer are still to come.

    Float8: the inputs of the MLP's weight gradients and the gradients of both updates. In the compute dtype two of the three gradients,
    with their sum, and the inputs of attention and MLP, which are not transposed yet. Of attention the gradients of queries and keys before
    they are quantized, that of values, the result, and in float8 the operands of weight gradients. Sharded: attention's update.
    Gradients of biases and of norms of queries and keys come after the sum too, in place of kernels that wait before it: attention's input
    has been transposed, in float8, and that of the next layer is gathered. The inputs of such norms are there too.
    """
    heads = local.query_bytes + local.context_bytes + local.key_bytes + local.value_bytes
    heads += one_byte(local, heads) + (local.query_bytes + local.key_bytes if local.model.qk_norm else 0)
    streams = 5 * local.stream_bytes + 2 * one_byte(local, local.stream_bytes)
    if local.model.qk_norm or local.model.attention_bias:
        streams += one_byte(local, local.stream_bytes)
    return 3 * one_byte(local, local.hidden_bytes), streams + heads + local.cut_stream_bytes


def in_any_layout(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether matmuls read float8 arrays as they are, in layers of one kind, without experts, that are not over tensor."""
    return local.uniform_dense and local.tensor == 1 and local.config.precision.eight_bit and not program.transposes_float8


def separate_activation(local: LocalSizes, again: Recomputed, program: GpuProgram) -> int:
    """Return the size of the activation of gate where it is an array of its own beside gate, up and their gradients.

    With scales of earlier steps one kernel computes the gradients of gate and up and the input of down, and quantizes the last two.
    """
    gated = local.model.gated_mlp and "gate" in again.weights
    own = gated and not program.repeats_activation and local.config.precision.matmul == "fp8_delayed"
    return local.hidden_bytes if own else 0


def mlp_in_any_layout(local: LocalSizes, again: Recomputed, *, at_start: bool) -> tuple[int, int]:
    """Return the sizes of hidden activations and of all others in the MLP of such a layer, less a stream in float32, which is counted with
    the block.

    Hidden: one kernel reads gate, up and the gradient of the input of down, and writes the activation of gate and the gradient of gate,
    whose largest magnitude it finds. The next ones quantize this gradient and, from the other three, the input of down and the gradient of
    up, with one result each. Gate and up are read from the stacks where they are kept there; then most is live in the second of these.
    Others: the gradient of the layer's result, also in float8, and the input of the MLP's norm; where gate or up is recomputed the MLP's
    input in float8; where attention is, its input and, in both dtypes, its result, queries, keys and values.
    Final hidden states and the gradient of their normed values are free after the layer that comes first: one kernel computes the gradients
    of the final norm and of its scale, which is two kernels where it has to transpose. Where the gradient of the result is not written
    (few tokens; or scales of earlier steps, which wait for no largest magnitude) they are there in that layer. Also there is what was kept
    of it, which is not in the stacks yet; and the gradient of gate is quantized first.
    """
    hidden, stream = local.hidden_bytes, local.stream_bytes
    small, narrow = one_byte(local, hidden), one_byte(local, stream)
    from_host = local.config.compute.remat.offloads
    gates = {"gate", "up"} & again.weights
    kept = set() if from_host else {"gate", "up"} - again.weights
    in_kernels = [(5 - len(kept)) * hidden, (4 * hidden - small * at_start) if kept else 0]
    others = 2 * stream + narrow + (narrow if gates else 0)
    if again.attention_update:
        others += local.query_bytes + local.context_bytes + local.key_bytes + local.value_bytes + narrow
        others += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
        others += 0 if kept else one_byte(local, local.context_bytes)
    if between_norms(local, again):
        if local.config.precision.matmul == "fp8_delayed":
            return _mlp_between_norms(local, at_start=at_start)
        # the activation of gate is there already, and the input of down has been quantized, for the result that the norm needs
        many = local.tokens > READ_TWICE
        others += (2 * stream if many else 0) + (stream if at_start else 0)
        return 5 * hidden + small, others - 4 * local.tokens * local.model.embed_dim
    if at_start:
        projections = (("query", local.query_bytes), ("key", local.key_bytes), ("value", local.value_bytes))
        delayed = local.config.precision.matmul == "fp8_delayed"
        others += stream if delayed or local.tokens <= READ_TWICE else 0
        others += sum(size for name, size in projections if name not in again.weights and not from_host)
        others += 0 if again.weights else 2 * stream
    return max(in_kernels), others - 4 * local.tokens * local.model.embed_dim


def between_norms(local: LocalSizes, again: Recomputed) -> bool:
    """Return whether norms only follow attention and MLP and all is computed again.

    Then final hidden states and the gradient of their normed values are there in all layers where the gradient of the final norm's scale
    has kernels of its own (many tokens); there the gradient of the first layer's result is float32 (heaps of OLMo 2 1B on GB200s).
    """
    return again.mlp_update and again.attention_update and local.model.norm_position == "post"


def _mlp_between_norms(local: LocalSizes, *, at_start: bool) -> tuple[int, int]:
    """As `mlp_in_any_layout`, with scales of earlier steps, where norms only follow attention and MLP and all is computed again.

    The activation of gate is written by the kernel that quantizes the input of down for the result that the norm needs; it is read again
    beside gate, up and the gradient of the input of down. The kernel that writes the gradient of gate quantizes that of up too. Others:
    both updates, and the gradient of the layer's result; the inputs of attention and MLP in float8, and attention's result in both dtypes;
    queries, keys and values, with norms of queries and keys also their inputs. In the layer that comes first the input of down and the
    gradient of the MLP's update are there too, in float8: their matmul is a weight gradient that nothing waits for. Final hidden states and
    the gradient of their normed values are there in that layer, and where the gradient of the final norm's scale has kernels of its own
    (many tokens) in all; there the gradient of the first layer's result is float32. (Heaps of OLMo 2 1B and 7B on GB200s.)
    """
    hidden, stream, model = local.hidden_bytes, local.stream_bytes, local.model
    many = local.tokens > READ_TWICE
    in_kernel = 5 * hidden + one_byte(local, hidden)
    heads = local.query_bytes + local.key_bytes + local.value_bytes + local.context_bytes + one_byte(local, local.context_bytes)
    heads += local.query_bytes + local.key_bytes if model.qk_norm else 0
    others = 2 * stream + 2 * one_byte(local, stream) + heads + (2 * stream if at_start or many else 0)
    if not at_start:
        return in_kernel, others + stream - 4 * local.tokens * model.embed_dim
    first = 4 * local.tokens * model.embed_dim if many else 0
    down = one_byte(local, hidden) + one_byte(local, stream)
    return in_kernel + down, others + first - 4 * local.tokens * model.embed_dim


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


def exchanges_nothing(local: LocalSizes) -> bool:
    """Return whether such layers exchange no tokens, are not over tensor, and have weight gradients of experts within their layer."""
    return of_experts(local) and local.ties_weight_gradients and local.expert * local.tensor * local.context * local.data == 1


def computes_down_first(local: LocalSizes) -> bool:
    """Return whether the weight gradient of down comes before the gradients of the rows by gate and by up: where no tokens are exchanged,
    and what it is computed from is more than twice as large (heaps of Qwen3 30B)."""
    operands = local.hidden_bytes + one_byte(local, local.row_bytes)
    return exchanges_nothing(local) and operands > 2 * local.mlp_matrix * local.gradient_itemsize


def of_attention_before(local: LocalSizes, *, waits: bool) -> int:
    """Return the size of what the weight gradients of the attention of the layer before are computed from, in layers before the loop.

    In float8 queries, their gradients, attention's result and the streams; where the layer waits for its gradient also queries before their
    norm and the input of the MLP's norm, in float32 (else these are counted with what is computed again early).
    """
    wide = local.query_bytes + 4 // local.compute_itemsize * local.stream_bytes
    return one_byte(local, 3 * local.query_bytes + 2 * local.stream_bytes) + (wide if waits else 0)


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


def gathers_rows(local: LocalSizes) -> bool:
    """Return whether layers, one in a turn, have experts without a capacity in 8 bits over tensor, for which tokens are gathered."""
    model, capacity = local.model, local.config.compute.experts.capacity_factor
    alike = model.moe is not None and model.layer_period == 1 and not local.adapted and model.latent_attention is None
    return alike and capacity is None and local.tensor > 1 and not local.sends_uncapped and local.config.precision.eight_bit


def in_gathered_rows(local: LocalSizes, again: Recomputed) -> list[tuple[int, int]]:
    """Return the sizes of hidden activations and of all others at two points in the experts of such a layer.

    First one kernel reads gate, up and the gradient of the input of down, and writes in float8 the gradients of the first two in both
    layouts and the input of down. Then only these are left, and the parts of the rows' gradients by gate and by up are summed for the
    tokens. The rows are there in float8, their inputs and the gradients of their results (heaps of Qwen3 235B for H200s and B200s).
    """
    gates = 2 if local.model.gated_mlp else 1
    narrow = one_byte(local, (2 * gates + 1) * local.hidden_bytes)
    rows, beside = 2 * one_byte(local, local.row_bytes), beside_experts(local)
    summed = gates * local.row_bytes + (local.slot_bytes or local.stream_bytes)
    in_kernel = (1 + len({"gate", "up"} & again.weights)) * local.hidden_bytes
    return [(in_kernel + narrow, rows + beside), (narrow, rows + beside + summed)]
