"""Points in layers with experts that follow each other in the backward pass (models/backward_order.py) where memory can peak.

A layer waits for the weight gradients of the layer two before it, of experts for those of the layer before it
(models/deferred_gradients.py), from turn to turn, and is computed again only when its gradient is there: so little is left to XLA's
scheduler. In turns of two layers it gathers the weights of a turn in the turn before; the second layer needs most then: the weight
gradients of the layer before are there, what those of its attention are computed from, and the weights of the next turn. In longer turns
the weights of the next layer are gathered, and no others (`LocalSizes.gathers_within_turn`). ("Before" and "after" are in the order of the
backward pass.) Read from the heaps of compiled steps of gpt-oss and Llama 4 Scout (GPU backend, jax 0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from ridgeline.planner import expert_layers, narrow_experts
from ridgeline.planner.activations import offloads_inputs
from ridgeline.planner.experts_peak import MUCH_PER_TOKEN, Point
from ridgeline.planner.live_buffers import LiveBuffers
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import FROM_BLOCK_INPUTS, recomputed


def applies(live: LiveBuffers) -> bool:
    """Return whether layers are such layers, with 16-bit or 8-bit matmuls."""
    local, precision = live.local, live.local.config.precision
    return live.turn.in_order and local.model.moe is not None and (precision.matmul == "compute" or precision.eight_bit)


def points(live: LiveBuffers, mask: int, at_end: tuple[int, int], next_layer: int, *, at_start: bool) -> list[Point]:
    """Return the points of a layer.

    In its experts (`_in_experts`, `_in_narrow_experts`), and at its end, where its weight gradients and those of the layer before are being
    reduced, and weights of the next turn gathered.

    mask: of packed documents. at_end: streams and unsharded gradients at the end of the layer. next_layer: gathered weights, which
    `LayerPeak.backward` adds.
    """
    local = live.local
    weights = -next_layer
    narrow = local.config.precision.eight_bit
    ahead, one_layer = _ahead(live) - next_layer, live.defers and local.ties_weight_gradients
    pending = 0 if one_layer and not at_start else _pending(live)
    waiting = at_end[1] + (0 if one_layer else _pending(live))
    return [
        *(_in_narrow_experts(live, weights, pending, mask) if narrow else _in_experts(live, weights, ahead, pending, mask)),
        ("its end", local.hidden_bytes, at_end[0], ahead, waiting, mask),
    ]


def _ahead(live: LiveBuffers) -> int:
    """Return the size of the weights that are gathered at the end of a layer with experts.

    Of the next turn, or of the next layer, which has no experts where layers without them come between (heap of Llama 4 Maverick, `full`).
    """
    local, moe = live.local, live.local.model.moe
    if not live.turn.gathers_own:
        return local.model.layer_period * live.gathered_layer()
    if moe is not None and moe.every > 1 and local.config.compute.remat.policy in FROM_BLOCK_INPUTS:
        return min(kind.gathered_layer_weights for _, kind in local.kinds) * local.matrix_itemsize
    return live.gathered_layer()


def gathers_tokens(local: LocalSizes) -> bool:
    """Return whether these layers gather their tokens over expert alone."""
    return local.expert > 1 and local.tensor == 1 and not local.sends_uncapped and not expert_layers.sends_capped(local)


def _gates(local: LocalSizes) -> int:
    return 2 if local.model.gated_mlp else 1


def _gradients(live: LiveBuffers) -> int:
    """Return the size of the weight gradients of a layer's experts before their reduction."""
    return (_gates(live.local) + 1) * live.local.mlp_matrix * live.local.gradient_itemsize if live.reduced else 0


def _pending(live: LiveBuffers) -> int:
    """Return the size of the gradients that wait beside those of the layer.

    Those of the layer before. Where these are deferred, one matrix less if the MLP is computed again: they are reduced one after the other.
    `LayerPeak` adds those of the layer before in the loop (`LiveBuffers.deferred_gradients`), and where weight gradients are tied to their
    layer no others wait there (heaps of gpt-oss and Scout with few tokens). Where layers without experts come between, these have reduced
    them (heaps of Llama 4 Maverick); with enough tokens a layer that is computed again has too, where no weights of the next turn are
    gathered (heaps of Scout; with inputs from host memory over context alone).
    """
    local, moe = live.local, live.local.model.moe
    offloads = _few(live) and expert_layers.capped(local) and local.config.compute.remat.offloads
    if live.defers and moe is not None and (moe.every > 1 or (offloads and not local.ties_weight_gradients)):
        return 0
    reduced = local.config.compute.remat.policy == "full" or (offloads_inputs(local) and local.context > 1)
    if live.turn.gathers_own and reduced and not _few(live):
        return 0
    gates, again = _gates(local), local.config.compute.remat.policy in FROM_BLOCK_INPUTS
    return _gradients(live) * gates // (gates + 1) if live.defers and again else _gradients(live)


def _few(live: LiveBuffers) -> bool:
    """Return whether a layer has few tokens for the weights it gathers."""
    return live.gathered_layer() > MUCH_PER_TOKEN * live.local.tokens


def _in_experts(live: LiveBuffers, weights: int, ahead: int, pending: int, mask: int) -> list[Point]:
    """Return the points in experts with 16-bit matmuls.

    When the gradients of the rows by gate and by up are there, and are summed into slots, with the inputs of the rows and the gradients of
    their results (where the weight gradients of gate and up come first, as of alike layers: `ExpertsPeak._after_weight_gradients`); hidden
    activations whose width is padded are there once more, also those that are computed again. Where values within blocks come from host
    memory, their copies hide the gathers for the next turn, whose weights are there too, and with constants in place of measured times
    values of the next layer (heaps of gpt-oss over expert=4 on H100s and expert=8 on A100s).
    Where tokens are gathered for experts with a capacity, before their rows are there (`_before_rows`). And where values come from host
    memory and weight gradients are not tied: the weight gradients of the layer before are computed only now.

    weights: gathered ones of later layers; `ahead`: at the end of a turn. pending: `_pending`.
    """
    local, moe = live.local, live.local.model.moe
    gates, matrix = _gates(local), local.mlp_matrix * local.matrix_itemsize
    hidden = max((gates + 1) * local.hidden_bytes, 2 * gates * local.padded_hidden_bytes * local.pads_hidden)
    shared = moe is not None and moe.shared_experts > 0
    beside = 3 if not shared else 4 if local.weight_gradients_first else 6
    streams = 2 * expert_layers.attention(local) + beside * local.stream_bytes + 5 * local.cut_stream_bytes
    streams -= 4 * local.tokens * local.model.embed_dim // local.tensor  # `backward` adds one stream in float32
    summed = max(local.slot_bytes or local.stream_bytes, matrix)
    fetches = expert_layers.fetches_within_layers(local)
    early = 0 if live.program.measured_matmuls else expert_layers.fetched_early(local)
    at_sum, computed = hidden + 4 * local.row_bytes + summed, 0
    if local.weight_gradients_first:  # as of alike layers (experts_peak.py)
        one, slots = local.hidden_bytes, local.slot_bytes or local.stream_bytes
        of_sum = 3 * local.padded_hidden_bytes if local.pads_hidden else one + max(one, slots)
        at_sum = max(hidden + 2 * local.row_bytes, of_sum + 3 * local.row_bytes)
        computed = gates * local.mlp_matrix * local.gradient_itemsize
    early_inputs = offloads_inputs(local) and local.context == 1 and (_few(live) or not expert_layers.capped(local))
    from_host = fetches or early_inputs
    found = [("its MLP", at_sum + early, streams, ahead if from_host else weights, pending + computed, mask)]
    if expert_layers.capped(local) and local.expert > 1 and not expert_layers.sends_capped(local):
        found.append(("its MLP", _before_rows(local), streams, weights, pending, mask))
    if fetches and not local.ties_weight_gradients:
        operands = 2 * (gates + 1) * local.hidden_bytes + 5 * local.row_bytes
        found.append(("its MLP", operands, streams, ahead, pending * gates // (gates + 1), mask))
    return found


def _before_rows(local: LocalSizes) -> int:
    """Return what is live in a layer that gathers tokens for experts with a capacity, when the gradients of its results have been gathered
    and are selected for the experts' rows.

    The tokens and these gradients of the whole group, over tensor each gathered over expert first; in the rows of the experts what is
    selected, and gate and up. It is most where a group has many more tokens than its experts take (heap of Scout, tensor=4 x expert=16).
    """
    return expert_layers.gathered_twice(local) + local.row_bytes + _gates(local) * local.hidden_bytes


def _in_narrow_experts(live: LiveBuffers, weights: int, pending: int, mask: int) -> list[Point]:
    """Return the points in experts with 8-bit matmuls (narrow_experts.in_order), with the matrices of gate and up; with a capacity also the
    tokens' slots (heap of Scout over tensor and expert)."""
    local = live.local
    again = recomputed(local.model, local.config.compute.remat)
    weights += _gates(local) * local.mlp_matrix * local.matrix_itemsize
    pending = pending if local.ties_weight_gradients else 0
    slots = local.slot_bytes if expert_layers.capped(local) else 0
    return [
        ("its MLP", hidden, others + slots, weights, pending, mask)
        for hidden, others in narrow_experts.in_order(local, again, measured=live.program.measured_matmuls)
    ]
