"""Layers with experts: conditions and sizes that several points of the plan share.

Read from heaps of compiled steps of Mixtral, Qwen3 30B and 235B, DeepSeek V2 Lite and V3, gpt-oss and Llama 4 Scout (GPU backend, jax
0.10.2). Sizes are bytes of one device.
"""

from __future__ import annotations

from ridgeline.planner.activations import offloads_inputs
from ridgeline.planner.experts import exchange_method
from ridgeline.planner.hardware import GpuProgram
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.recompute import recomputed


def capped(local: LocalSizes) -> bool:
    """Return whether experts have a capacity: their matmuls are those of XLA."""
    return local.config.compute.experts.capacity_factor is not None


def sends_capped(local: LocalSizes) -> bool:
    """Return whether tokens go to their experts by all_to_all with a capacity: weight gradients cover these exchanges."""
    experts = local.config.compute.experts
    return capped(local) and exchange_method(local.model.moe, experts, {"expert": local.expert}) == "all_to_all"


def sends_over_fsdp(local: LocalSizes) -> bool:
    """Return whether trained experts get their tokens by all_to_all without a capacity, and their gradients are reduced over fsdp alone."""
    return local.sends_uncapped and local.fsdp > 1 and local.data * local.context == 1 and not local.adapted


def fetches_within_layers(local: LocalSizes) -> bool:
    """Return whether values within blocks come from host memory."""
    return local.config.compute.remat.offloads and not offloads_inputs(local)


def fetched_early(local: LocalSizes) -> int:
    """Return the bytes of the next layer's gate and up that come from host memory while a layer's experts run. With shared experts, whose
    values are copied before, they come later."""
    moe, remat = local.model.moe, local.config.compute.remat
    shared = moe is None or moe.shared_experts > 0
    return 0 if shared or not fetches_within_layers(local) else len({"mlp_gate", "mlp_up"}.intersection(remat.names)) * local.hidden_bytes


def recomputes_experts(local: LocalSizes) -> bool:
    """Return whether gate and up are computed again."""
    return {"gate", "up"} & recomputed(local.model, local.config.compute.remat).weights != set()


def attention(local: LocalSizes) -> int:
    """Return the bytes of a layer's queries, keys, values and results, of normed queries and keys also the inputs of the norms."""
    normed = local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    return local.query_bytes + 2 * local.key_bytes + local.context_bytes + normed


def over_tensor(local: LocalSizes) -> bool:
    """Return whether alike layers with experts run over tensor; block-scaled matmuls and 8-bit ones with all_to_all were not looked at."""
    model, precision = local.model, local.config.precision
    alike = model.moe is not None and model.layer_period == 1 and not local.adapted and not local.latent_bytes
    plain = local.pipeline == 1 and precision.block_scaled is None
    return alike and plain and local.tensor > 1 and not (precision.eight_bit and local.sends_uncapped)


def late_over_tensor(local: LocalSizes, program: GpuProgram) -> bool:
    """Return whether the weight gradients of a layer over tensor come when the gradients of its rows are summed, in the loop too.

    So where kernels are counted with constants (planner/constant_costs.py): those of experts hide little.
    """
    plain = not local.config.precision.eight_bit and not local.sends_uncapped
    return over_tensor(local) and not program.measured_matmuls and plain


def gathered_twice(local: LocalSizes) -> int:
    """Return the bytes of the tokens of a whole group and of the gradients of their results, over tensor each gathered over expert first.

    Where experts have a capacity it is most if a group has many more tokens than its experts take (heap of DeepSeek V2 Lite, tensor=2 x
    expert=16).
    """
    return 2 * (local.slot_bytes + (local.slot_bytes // local.tensor if local.tensor > 1 else 0))


def beside_experts(local: LocalSizes, program: GpuProgram) -> int:
    """Return what is live when the gradients of one layer's rows are summed, beside hidden activations, rows and slots.

    The input of attention, without expert also these sums; queries, keys, values and attention's result, with norms of queries and keys
    also their inputs; where attention's update is kept and kernels are counted with constants, the final hidden states and the gradient of
    theirs; where it is kept and kernels are measured, attention's values are still in the stacks of all layers (heaps of Mixtral and Qwen3
    30B). `LayerPeak.backward` adds one stream in float32.
    """
    keeps_update = recomputes_experts(local) and not recomputed(local.model, local.config.compute.remat).attention_update
    streams = (1 if local.expert > 1 else 2) * local.stream_bytes + 2 * local.cut_stream_bytes
    if keeps_update and program.measured_matmuls:
        return streams
    heads = local.context_bytes + local.query_bytes + 2 * local.key_bytes
    heads += local.query_bytes + local.key_bytes if local.model.qk_norm else 0
    return heads + streams + (local.stream_bytes + 2 * local.cut_stream_bytes if keeps_update else 0)
