"""Layers with experts in 8 bits: those without a capacity whose tokens stay on their device or are sent, and what waits before the loop.

Kernels of this project multiply the rows, and XLA's scheduler knows no time of them: where weight gradients are not tied
(`LocalSizes.ties_weight_gradients`), those of the layers or turns before the loop come together, after the last of these. All their
operands are float8. (planner/eight_bits.py has those whose tokens are gathered over tensor.) Read from the heaps of compiled steps of
Qwen3 30B and 235B over fsdp, Mixtral over tensor=8 and expert=8, and gpt-oss over fsdp (GPU backend, jax 0.10.2). Sizes are bytes of one
device.
"""

from __future__ import annotations

from ridgeline.planner import eight_bits
from ridgeline.planner.activations import saved_arrays
from ridgeline.planner.expert_layers import fetched_early, fetches_within_layers
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import Recomputed


def applies(local: LocalSizes) -> bool:
    """Return whether layers are such layers. Latent attention was not looked at."""
    model = local.model
    alike = model.moe is not None and model.layer_period == 1 and not local.adapted and model.latent_attention is None
    uncapped = local.config.compute.experts.capacity_factor is None and local.config.precision.eight_bit
    return alike and uncapped and not eight_bits.gathers_rows(local)


def in_rows(local: LocalSizes, again: Recomputed) -> list[tuple[int, int]]:
    """Return the sizes of hidden activations and of all others at two points in the experts of a layer.

    First one kernel reads gate, up and the gradient of the input of down, and others write the gradients of the first two in both layouts
    and the input of down; where gate and up are computed again five arrays are there before they are float8 (heaps of Mixtral). Then the
    parts of the rows' gradients by gate and by up are summed for the tokens, and one layout is left.
    """
    gates, rows = _gates(local), 2 * eight_bits.one_byte(local, local.row_bytes)
    computed = len({"gate", "up"} & again.weights)
    narrow = eight_bits.one_byte(local, local.hidden_bytes)
    in_kernel = (1 + computed) * local.hidden_bytes + (2 * gates + 1) * narrow if computed < 2 else 5 * local.hidden_bytes
    beside = rows + eight_bits.beside_experts(local)
    return [(in_kernel, beside), ((gates + 1) * narrow, beside + _summed(local))]


def copied_stack(local: LocalSizes, backend: str) -> int:
    """Return the size of a stack of gate or up that is copied to another layout; 0: none is.

    Without a capacity the kernel of the weight gradient of down reads its input transposed, which is computed from them. Each layer of a
    turn of several has stacks of its own, and those of the last turn are not written into them yet (heap of gpt-oss over context).
    """
    narrow = local.model.moe is not None and local.config.precision.eight_bit and local.config.compute.experts.capacity_factor is None
    kept = narrow and any(count and size == local.hidden_bytes for count, size in saved_arrays(local, backend))
    period = local.model.layer_period
    last = period * _gates(local) * local.hidden_bytes if period > 1 else 0
    return local.model.num_layers // period * local.hidden_bytes + last if kept else 0


def in_order(local: LocalSizes, again: Recomputed, *, measured: bool) -> list[tuple[int, int]]:
    """Return the sizes of hidden activations and of all others at the two points of `in_rows`, in a layer that waits for the weight
    gradients of another.

    With clamped gate and up (model.mlp_clamp) the kernels at the first write more than is read by one: gate and up as they came, one
    clamped, the gradient of the input of down, and gradients of both, of which biases have theirs; where one of them comes from host memory
    four masks of one byte. Of the layer before what the weight gradients of its attention and norms are computed from, and where they are
    not tied also those of its experts; over tensor the inputs of its attention and MLP, with shared experts that of the MLP in float8 too.
    Of shared experts the input, and its gradients by gate and by up. With constants in place of measured times, values of the next layer
    have come from host memory. `backward` adds a stream in float32. (Heaps of gpt-oss and Scout.)
    """
    (in_kernel, beside), (narrow_ones, summed) = in_rows(local, again)
    narrow, wide = eight_bits.one_byte(local, local.hidden_bytes), 4 // local.compute_itemsize
    if local.model.mlp_clamp:
        in_kernel = 6 * local.hidden_bytes + (4 * narrow if fetches_within_layers(local) else 0)
    early = 0 if measured else fetched_early(local)
    operands = local.context_bytes + local.stream_bytes
    operands += 0 if local.ties_weight_gradients else (_gates(local) + 1) * local.hidden_bytes + 2 * local.row_bytes
    shared = local.model.moe is not None and local.model.moe.shared_experts > 0
    gathered = (3 if shared else 2) * local.stream_bytes if local.tensor > 1 else 0
    before = eight_bits.one_byte(local, operands) + (2 * wide + 1) * local.cut_stream_bytes + local.query_bytes + local.key_bytes + gathered
    before += wide * local.cut_stream_bytes + (3 * local.stream_bytes if shared else 0)
    return [(in_kernel + early, beside + before), (narrow_ones + early, summed + before)]


def _summed(local: LocalSizes) -> int:
    """Return the size of the parts of the rows' gradients, and of their sum in the slots of the tokens."""
    return _gates(local) * local.row_bytes + (local.slot_bytes or local.stream_bytes)


def _gates(local: LocalSizes) -> int:
    return 2 if local.model.gated_mlp else 1
