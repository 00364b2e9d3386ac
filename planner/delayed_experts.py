"""Weight gradients of layers with experts in the first turns of several layers of the backward pass, which are not in the loop over layers.

Where tokens are exchanged by all_to_all without a capacity, and in 8 bits, the gradients of two turns are computed in the second half of
the third one: what they are computed from is there at once. Elsewhere they are computed early, and wait for their reductions until the end
of the third turn. Read from the heaps of compiled steps of Llama 4 Scout (in float8, and over fsdp=64 x tensor=4) and of gpt-oss (GPU
backend, jax 0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from ridgeline.configs.remat import POLICIES
from ridgeline.planner.activations import offloads_inputs
from ridgeline.planner.experts import TILE, exchange_method
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.parameters import attention_matmul_parameters
from ridgeline.planner.recompute import recomputed, waiting
from ridgeline.planner.turn import Turn

UNROLLED = 2
"""Layers that XLA unrolls a loop by."""
TURNS = 3
"""Turns at the start of the backward pass that are not in the loop, which XLA unrolls by two, of an even number of them."""


LONG_GATHER = 2**28
"""Bytes that a device receives in an exchange from which weight gradients are delayed over it beside the recomputation of the MLP.

Bounds from heaps: so with 268 MB (Mixtral, expert=2) and more, not with 134 MB (Qwen3 30B and V2 Lite, expert=2).
"""


SHORT_ATTENTION = 155 * 10**10
"""FLOPs of a layer's projections of attention up to which they hide less than the kernels that XLA counts with a constant.

Bounds from heaps: so with 1.37e12 (Mixtral over tensor=2, 32,768 tokens) and, with any number of tokens, less; not with 1.74e12 (gpt-oss
over tensor=2, 65,536 tokens). In turns of four layers twice as much: so with 2.06e12 (Llama 4 Scout over tensor=8), not derived.
"""


def delays_turns(local: LocalSizes) -> bool:
    """Return whether the gradients of two turns and a half are pending together; not where those of a turn are reduced within it.

    So with all_to_all, and where MLPs wait for gradients and tokens are gathered for half as long as `LONG_GATHER` or longer: with 283 MB
    (gpt-oss, expert=4); with 165 MB (expert=8) those of a turn and a half (`pending_turns`); not with 47 MB (expert=2). In 8 bits so with
    any exchange (heap of Llama 4 Scout with a capacity, tensor=2, expert=2).
    """
    sums_twice = local.data * local.context > 1
    narrow = local.model.moe is not None and local.config.precision.eight_bit
    waits = waiting(local.config, local.tensor, local.expert) == "mlp" and 2 * _gathered_uncapped(local) > LONG_GATHER
    return (local.sends_uncapped or narrow or waits) and local.fsdp > 1 and not sums_twice and not local.adapted


def delays_in_loop(local: LocalSizes) -> bool:
    """Return whether a turn and a half are pending in the loop over layers, where each turn reduces its gradients.

    Nothing is delayed beyond an iteration of the loop, which runs two turns (heaps of gpt-oss over context and tensor).
    """
    sums_twice = local.data * local.context > 1
    return local.sends_uncapped and local.fsdp > 1 and sums_twice and not local.adapted


def reduces_late(local: LocalSizes) -> bool:
    """Return whether the weight gradients of these turns wait for their reductions; not where those of a turn are reduced within it."""
    trained = local.model.moe is not None and not local.adapted
    return trained and local.fsdp > 1 and not local.sends_uncapped and local.data * local.context == 1


def sends_capped(local: LocalSizes) -> bool:
    """Return whether tokens go to their experts by all_to_all with a capacity: weight gradients cover these exchanges, also those of single
    layers before the loop, and are not delayed."""
    experts = local.config.compute.experts
    return exchange_method(local.model.moe, experts, {"expert": local.expert}) == "all_to_all" and experts.capacity_factor is not None


def covered_early(local: LocalSizes) -> bool:
    """Return whether the weight gradients of single layers before the loop are plain matmuls that are computed within their layer.

    So where they `sends_capped`; with latent attention over tensor with any exchange, beside the loops over attention's chunks (heaps of
    DeepSeek V2 Lite with a capacity on A100s and H100s, `none`).
    """
    latent = local.config.compute.experts.capacity_factor is not None and local.latent_bytes > 0 and local.tensor > 1
    return latent or sends_capped(local)


def delays_beside_gathers(local: LocalSizes) -> bool:
    """Return whether the weight gradients of the first layers are delayed although MLPs wait for gradients: where experts have no capacity,
    and what a device gathers of tokens takes long (`LONG_GATHER`). With a capacity they are not; over tensor it was not looked at."""
    return _gathered_uncapped(local) >= LONG_GATHER


def _gathered_uncapped(local: LocalSizes) -> int:
    """Return the bytes of tokens that a device gathers over expert without a capacity; 0 over tensor."""
    uncapped = local.config.compute.experts.capacity_factor is None and local.tensor == 1
    return local.slot_bytes * (local.expert - 1) // local.expert if uncapped else 0


def in_first_layers(local: LocalSizes, operands: int, *, at_once: bool) -> int:
    """Return the bytes that are live in a layer before the loop that is not over tensor, with operands of earlier weight gradients; 0 where
    it is as with any other experts.

    Where tokens are gathered over expert, in the second and in the third layer those of one layer wait, and of the current one its own are
    there, the parts of the rows' gradients by gate and by up, and their sum in slots (heaps of Mixtral and Qwen3 30B, with `full`, `dots`,
    `attention-only` and values in host memory). Where each device has all experts and latent attention is computed again, those of two
    layers wait in the third one (heaps of DeepSeek V2 Lite).

    operands: bytes of the operands of the weight gradients of one layer. at_once: the layers compute their attention again together.
    """
    experts, rows = local.config.compute.experts, 2 * local.row_bytes
    if at_once:
        return _beside_attention(local)
    if experts.capacity_factor is not None:
        return 0
    if exchange_method(local.model.moe, experts, {"expert": local.expert}) == "gather":
        return 2 * (operands + rows) + rows + local.slot_bytes
    again = POLICIES[local.config.compute.remat.policy].recomputes_block
    return 3 * (operands + rows) + rows if local.expert == 1 and local.latent_bytes and again else 0


def fetches_within_layers(local: LocalSizes) -> bool:
    """Return whether values within blocks come from host memory.

    The weight gradients of the first layers of the backward pass are not delayed then, unless the first router's gradient is reduced early
    with the unembedding's: without it that reduction is covered by these weight gradients, which the copies keep behind it (heaps of
    DeepSeek V2 Lite, and of Qwen3 30B with one microbatch and in a loop of microbatches).
    """
    return local.config.compute.remat.offloads and not offloads_inputs(local)


def fetched_early(local: LocalSizes) -> int:
    """Return the bytes of the next layer's gate and up that come from host memory while a layer's experts run. With shared experts, whose
    values are copied before, they come later."""
    moe, remat = local.model.moe, local.config.compute.remat
    shared = moe is None or moe.shared_experts > 0
    return 0 if shared or not fetches_within_layers(local) else len({"mlp_gate", "mlp_up"}.intersection(remat.names)) * local.hidden_bytes


def short_attention(local: LocalSizes, factor: int = 1) -> bool:
    """Return whether a layer's projections of attention, measured matmuls, are short: over tensor the weight gradients of experts, which
    are ready, hide the exchanges at the end of the layers before the loop then, all of them together, and not each those of the next layer.

    factor: by which the FLOPs are multiplied before they are compared.
    """
    flops = 2 * factor * local.tokens * attention_matmul_parameters(local.model) // local.tensor
    return flops <= SHORT_ATTENTION * max(UNROLLED, local.model.layer_period) // UNROLLED


def pending_layers(layers: int) -> int:
    """Return the layers whose weight gradients are pending then, the current one included, for turns of so many."""
    return 2 * layers + layers // 2


def pending_in_loop(layers: int) -> int:
    """As `pending_layers`, in the loop where `delays_in_loop`."""
    return layers + layers // 2


def operands(local: LocalSizes, *, cut: bool = False) -> int:
    """Return the bytes that the weight gradients of one layer are computed from. cut: kept values are cut out of the stacks of all layers.

    The inputs of attention and MLP, and the gradients of their results; in the rows of the experts the inputs, and the gradients of the
    results; of the hidden activations the gradients of gate and up and the input of down (with biases these gradients also padded, and gate
    and up, where they are computed again, in place of that input). With norms of queries and keys, their inputs and gradients.

    Float8: one byte each but for the inputs of attention and MLP; gate and up of shared experts have their gradients in both layouts; the
    gradient of the norm before the MLP needs its input in float32 and the gradient of its result; queries are there before their norm too.
    """
    moe = local.model.moe
    assert moe is not None
    gates = 2 if local.model.gated_mlp else 1
    hidden = (gates + 1) * local.hidden_bytes
    normed = 2 * (local.query_bytes + local.key_bytes) if local.model.qk_norm else 0
    attention = local.query_bytes + 2 * local.key_bytes + local.context_bytes
    if not local.config.precision.eight_bit:
        again = gates if cut else len({"gate", "up"} & recomputed(local.model, local.config.compute.remat).weights)
        padded = local.model.expert_width // local.tensor % TILE > 0
        with_biases = (gates + again - 1) * local.hidden_bytes if local.model.mlp_bias and padded else 0
        return hidden + with_biases + 2 * local.row_bytes + 4 * local.stream_bytes + attention + normed
    shared = moe.shared_experts * local.tokens * local.model.expert_width * local.compute_itemsize // local.tensor
    narrow = hidden + gates * shared + 2 * local.row_bytes + 2 * local.stream_bytes + 2 * attention
    of_norm = (4 // local.compute_itemsize + 1) * local.cut_stream_bytes
    return narrow // local.compute_itemsize + 2 * local.stream_bytes + of_norm + normed + local.query_bytes


def pending_turns(local: LocalSizes, layers: int) -> int:
    """Return the layers whose weight gradients are pending where `delays_turns`, the current one included, for turns of so many."""
    long = local.sends_uncapped or local.config.precision.eight_bit or delays_beside_gathers(local)
    return pending_layers(layers) if long else pending_in_loop(layers)


def pending_operands(local: LocalSizes, layers: int, padded: int) -> int:
    """Return the bytes that the pending weight gradients of so many layers before the loop are computed from.

    Where tokens are gathered, those of attention are computed before the next layer (heap of gpt-oss, expert=4). Shorter gathers end
    while biases have their gradients (expert=8).

    padded: gradients of gate and up in whole tiles, for those of biases.
    """
    if local.sends_uncapped or local.config.precision.eight_bit:
        return layers * operands(local)
    of_attention = (layers - 1) * (attention(local) + 4 * local.stream_bytes)
    return layers * operands(local) - of_attention + (0 if delays_beside_gathers(local) else padded)


def attention(local: LocalSizes) -> int:
    """Return the bytes of a layer's queries, keys, values and results, of normed queries and keys also the inputs of the norms."""
    normed = local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    return local.query_bytes + 2 * local.key_bytes + local.context_bytes + normed


def next_attention(local: LocalSizes) -> int:
    """Return the bytes of the next layer's attention where single layers before the loop recompute it while tokens are exchanged by
    all_to_all with a capacity: the attention, its update, the input of the MLP, and that of its norm in float32."""
    if not sends_capped(local) or not POLICIES[local.config.compute.remat.policy].recomputes_block:
        return 0
    return attention(local) + 2 * local.stream_bytes + 4 * local.tokens * local.model.embed_dim // local.tensor


def recomputes_attention_early(local: LocalSizes) -> bool:
    """Return whether the layers before the loop compute their attention again when the backward pass begins: where it depends on no
    gradient, and its inputs are in device memory. Not over tensor, nor with latent attention, which were not looked at."""
    remat = local.config.compute.remat
    waits = waiting(local.config, local.tensor, local.expert) == "mlp" and not remat.offloads
    return waits and local.tensor == 1 and not local.latent_bytes


def early_attention(local: LocalSizes) -> int:
    """Return the bytes of the attention of three layers, of one of them the inputs alone, with seven streams.

    Of the current layer the inputs of attention and of the MLP, attention's update and the gradient of the result; of one layer the inputs
    of attention and of the MLP, of one that of attention. (Heap of Qwen3 30B on A100.)
    """
    return 2 * attention(local) + local.query_bytes + 2 * local.key_bytes + 7 * local.stream_bytes


def _beside_attention(local: LocalSizes) -> int:
    """Return the bytes that are live in the experts of the layer that comes first, beside the attention of three layers with values from
    host memory: of the next layer gate or up too, and its gathered tokens. (Heap of Qwen3 30B on A100.)"""
    rows = 3 * local.hidden_bytes + 4 * local.row_bytes + 2 * local.slot_bytes + fetched_early(local)
    return rows + early_attention(local) + attention(local) + 2 * local.stream_bytes


def late_operands(turn: Turn) -> int:
    """Return the bytes that pending weight gradients are computed from at the end of the second turn over tensor, with the attention of
    the third turn: its inputs, and its projected results before they are scattered.

    Where attention is short, or layers do not wait for their gradients, they begin one layer later.
    """
    local, layers = turn.local, turn.layers
    waits = waiting(local.config, local.tensor, local.expert) != "nothing"
    late = not (turn.program.measured_matmuls and waits) or short_attention(local)
    return (layers + late) * operands(local) + layers * (2 * local.stream_bytes + attention(local))


def in_first_turn(turn: Turn, saved_bytes: int) -> int:
    """Return the bytes that are live in the last layer of the first turn, with one microbatch, where the turns before the loop compute
    their attention again beside the loss: it depends on no gradient, and its inputs are in device memory; 0: it does.

    Of each layer of these turns the gathered input of attention, queries, keys, values and the result, the block's input and attention's
    update, sharded. The weight gradients of the turn begin after it; the gathered gradient of attention's update and that of the MLP's
    input are there. The weights of the other two turns are gathered, of which the plan counts one. One kind's stack of block inputs is
    copied, as the last turn's input is written into it while kernels still read it without. (Heaps of gpt-oss over fsdp=8 x tensor=2.)

    saved_bytes: of all layers.
    """
    local, layers = turn.local, turn.layers
    if turn.in_loop or waiting(local.config, local.tensor, local.expert) != "mlp" or local.config.compute.remat.offloads:
        return 0
    again = TURNS * layers * (local.stream_bytes + attention(local) + 2 * local.cut_stream_bytes)
    weights = layers * local.gathered_layer_weights * local.matrix_itemsize
    pending = layers * (operands(local) - attention(local) - 4 * local.stream_bytes)
    return pending + current(local) + again + 2 * local.stream_bytes + weights + saved_bytes // layers


def current(local: LocalSizes) -> int:
    """Return the bytes that are live beside these in the MLP of the current layer: the parts of the rows' gradients by gate and by up, and
    their sum in the slots of the tokens of other devices."""
    return (2 if local.model.gated_mlp else 1) * local.row_bytes + local.slot_bytes
