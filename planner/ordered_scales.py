"""Layers of ordered turns over tensor whose 8-bit matmuls have scales of earlier steps (fp8_delayed), where float8 arrays are transposed.

The largest magnitudes of this step are for the next one: the kernels that find them come after the weight gradients, and what they read
waits with the operands. Read from the heaps of compiled steps (GPU backend, jax 0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from ridgeline.planner.hardware import GpuProgram
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import in_order, recomputed

NORMS = {"pre": 2, "post": 2, "both": 4}
"""Norms of residual streams in a layer, by model.norm_position."""

ONE_HIDES_SCATTER = 3072
"""Width of hidden activations on a device from which one weight gradient of the MLP takes longer than a scatter of the stream over tensor.

A matmul's time over the scatter's is in proportion to it. Bounds from heaps: not with 2,304 (Gemma 2 2B), so with 3,584 (Gemma 2 9B).
"""

SUMMED_AT_ONCE = 4096
"""Rows that XLA sums in one kernel; of more it sums parts first (xla/service/gpu/reduction_utils.cc: ReductionDimensionRaceFreeBound)."""


def applies(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether layers are of this kind, compute their MLP's result again, for the norm after it, and have hidden activations that are
    as wide as the stream.

    So Gemma over tensor=4. Of others the weight gradients hide other collectives: in the first layers of Gemma 2 2B over tensor=2 that of
    the gradient of the MLP's input, in those of OLMo 3 7B over tensor=2 that of the MLP's result, of which no rule is known.
    """
    config = local.config
    ordered = in_order(local.model, config.compute, frozen=bool(local.adapted)) and local.tensor > 1
    again = recomputed(local.model, config.compute.remat)
    whole = again.mlp_update and again.attention_update and {"gate", "up"} <= again.weights
    whole = whole and local.hidden_bytes == local.stream_bytes
    return ordered and whole and config.precision.matmul == "fp8_delayed" and program.transposes_float8


def transposes_apart(local: LocalSizes) -> bool:
    """Return whether kernels of their own bring hidden activations into the order of rows; they find no largest magnitude beside it.

    A gather over tensor puts the parts of the sequence first, before several rows. Results of matmuls take that layout where they have the
    shape of the input, as here (not so in the heap of Gemma 2 2B over tensor=2).
    """
    return local.rows > 1


def before_weight_gradients(local: LocalSizes) -> int:
    """Return the size of what waits of a layer until its weight gradients are computed.

    In one byte all operands, the gathered inputs of attention and MLP also in the compute dtype, for their largest magnitudes, as are the
    gradients of queries, keys and values. Where the gradients of gate and up have kernels that transpose (`transposes_apart`), up, the
    result of the activation, the gradient of the input of down and that of gate wait for their magnitudes too; else one kernel finds them
    at once. Of the norms: products that are summed over the tokens
    for the gradients of their weights, float32, where that is one sum (SUMMED_AT_ONCE); else the inputs of two, and the gradients of their
    results.
    """
    gates, narrow = 2 if local.model.gated_mlp else 1, local.compute_itemsize
    heads = local.query_bytes + local.key_bytes + local.value_bytes
    operands = (gates + 1) * local.hidden_bytes + 4 * local.stream_bytes + heads
    size = operands // narrow + 2 * local.stream_bytes + heads + _of_norms(local)
    size += 2 * (local.query_bytes + local.key_bytes) if local.model.qk_norm else 0
    if transposes_apart(local):
        return size + (gates + 2) * local.hidden_bytes + local.context_bytes // narrow
    return size + local.context_bytes


def _of_norms(local: LocalSizes) -> int:
    """Return the size of what waits for the gradients of the weights of a layer's norms."""
    if local.tokens // local.tensor > SUMMED_AT_ONCE:
        return 4 * local.cut_stream_bytes
    return NORMS[local.model.norm_position] * 4 * local.tokens * local.model.embed_dim // local.tensor


def in_mlp_of_rows(local: LocalSizes) -> tuple[int, int]:
    """Return the sizes of hidden activations and of all others, less a stream in float32, in the MLP of a layer with several rows, before
    the weight gradients of the layer before begin.

    The scheduler works from the end: of these, one hides the scatter of the gradient of the MLP's input, two where one is too short
    (ONE_HIDES_SCATTER), and the others the gather before it. With two the peak is at this scatter, when the MLP's other gradients are
    there: up, the result of the activation, the gradients of that and of gate, in one byte the operands of weight gradients. Else it is
    before the gather, when the MLP's result, computed again, is not yet scattered: gate, up and the result of the activation, in one byte
    the input of down. Gathered: the inputs of attention and MLP; the result, or the sum, a part of it and in one byte the gradient of the
    result; queries, keys, values and attention's result, with norms of queries and keys also the inputs of these. Sharded: the inputs of
    this block and the next, the inputs and results of the norms after attention, and around the MLP.
    """
    gates, narrow = 2 if local.model.gated_mlp else 1, local.compute_itemsize
    heads = local.query_bytes + local.key_bytes + local.value_bytes + local.context_bytes
    heads += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    # `backward` adds one stream in float32, which is two sharded ones
    others = 2 * local.stream_bytes + heads + 4 * local.cut_stream_bytes
    if local.hidden_bytes >= ONE_HIDES_SCATTER * local.tokens * narrow:
        return (gates + 1) * local.hidden_bytes + local.hidden_bytes // narrow, others + local.stream_bytes
    of_input = (gates + 2) * local.hidden_bytes + (gates + 1) * local.hidden_bytes // narrow
    return of_input, others + 2 * local.stream_bytes + local.stream_bytes // narrow


def in_mlp(local: LocalSizes, of_mlp: int) -> tuple[int, int]:
    """Return the sizes of hidden activations and of all others in the MLP of a layer with one row, when the gradient of the input of down
    is there. Gathered: the inputs of attention and MLP in both dtypes, in one byte transposed, and in one byte the gradient of the MLP's
    result. Where one kernel sums the tokens, what the final norm has for the gradient of its weights is there too.

    of_mlp: hidden activations there.
    """
    heads = local.query_bytes + local.context_bytes + 2 * local.key_bytes
    streams = 2 * local.stream_bytes + 3 * local.stream_bytes // local.compute_itemsize + 4 * local.cut_stream_bytes
    if local.tokens // local.tensor <= SUMMED_AT_ONCE:
        streams += 4 * local.tokens * local.model.embed_dim // local.tensor
    return of_mlp, streams + heads
