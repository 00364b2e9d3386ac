"""The collectives of a layer: attention, MLP, norms and biases, and what its backward pass communicates again."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.configs.remat import POLICIES
from ridgeline.planner.collectives.adapters import adapters
from ridgeline.planner.collectives.experts import experts
from ridgeline.planner.collectives.planned import PlannedCollective, StepSizes
from ridgeline.planner.collectives.sequence import sequence, sequence_recomputed
from ridgeline.planner.parameters import (
    attention_matmul_parameters,
    expert_parameters,
    head_norms,
    latent_parameters,
    layer_norms,
    mlp_matmul_parameters,
)
from ridgeline.planner.recompute import in_order, recomputed_by


def in_layer(step: StepSizes) -> list[PlannedCollective]:
    """Return the collectives inside the blocks, without recomputation."""
    gated, moe, model = 2 if step.model.gated_mlp else 1, step.model.moe, step.model
    up = attention_matmul_parameters(model) - latent_parameters(model)
    planned = step.parameters("attention parameters", "layer", up, step.layers) + _attention(step)
    if model.dense_layers:
        mlp = step.parameters("mlp parameters", "layer", mlp_matmul_parameters(model), step.layers) + step.half("mlp", gated)
        planned += step.in_layers(model.dense_layers, mlp)
    if moe is not None and moe.shared_experts:
        shared = step.parameters("shared experts", "layer", moe.shared_experts * expert_parameters(model), step.layers)
        planned += step.in_layers(model.moe_layers, shared + step.half("shared experts", gated))
        ordered = in_order(model, step.config.compute, frozen=step.frozen)
        if (
            model.norm_position != "post" and not ordered and not step.defers
        ):  # the norm before the experts is computed for routed and for shared ones
            norm = (2 if model.norm == "layernorm" else 1) * model.embed_dim
            planned += step.in_layers(model.moe_layers, step.replicated_gradient("norms of shared experts", norm * 4))
    if moe is not None:
        planned += step.deferred("experts", step.in_layers(model.moe_layers, experts(step, moe)))
    twice = 1 if step.latents and not _low_rank_queries(step) and model.norm_position != "post" else 0  # for queries and latents each
    norms = (layer_norms(model) + twice) * (2 if model.norm == "layernorm" else 1) * model.embed_dim
    norms += head_norms(step.model) if step.model.qk_norm_dims == "head" else 0
    return [
        *planned,
        *adapters(step),
        *sequence(step),
        *step.summed_once(step.replicated_gradient("norms", norms * 4)),
        *_all_head_norms(step),
        *_biases(step),
    ]


def _attention(step: StepSizes) -> list[PlannedCollective]:
    """Return the collectives of attention's input and update, and of the projections to latents."""
    if not step.latents:
        return step.half("attention", 3)
    down = step.parameters("latent parameters", "layer", latent_parameters(step.model), step.layers, whole=True)
    stream = [item for item in step.half("attention", 1) if item.what != "attention input" or not _low_rank_queries(step)]
    return [
        *down,
        *stream,
        step.through_tensor("latents", "forward", "all-gather", step.latents),
        step.through_tensor("latents", "backward", "reduce-scatter", step.latents),
    ]


def _low_rank_queries(step: StepSizes) -> bool:
    return step.model.latent_attention is not None and step.model.latent_attention.q_rank is not None


def _all_head_norms(step: StepSizes) -> list[PlannedCollective]:
    """Return what norms over all heads of queries and keys add: sums over the heads of each token, and gradients of their scales.

    The backward pass computes the sums of squares again and sums the products with the gradient. Where layers in order are recomputed XLA
    does not see that the norm's own recomputation is the same: it sums the squares twice.
    """
    if not step.model.qk_norm or step.model.qk_norm_dims != "all_heads":
        return []
    sums = step.tokens * 4
    tensor, scales = step.over("tensor"), head_norms(step.model) // step.tensor * 4
    compute = step.config.compute
    twice = in_order(step.model, compute, frozen=step.frozen) and POLICIES[compute.remat.policy].recomputes_block
    planned = [step.item(f"sums of {what} norms", "forward", "all-reduce", tensor, sums) for what in ("query", "key")]
    planned += [
        replace(step.item(f"sums of {what} norms", "backward", "all-reduce", tensor, sums), count=(2 + twice) * step.layers)
        for what in ("query", "key")
    ]
    groups = () if step.frozen else (step.over("data", "fsdp", "expert"), step.over("context"))
    names = "query and key norms"
    gradients = [replace(step.item(names, "backward", "all-reduce", axes, scales), replicated=True) for axes in groups]
    return planned + step.summed_once(gradients)


def _biases(step: StepSizes) -> list[PlannedCollective]:
    """Return the reductions of the gradients of biases, which are in the compute dtype."""
    model, width = step.model, step.model.embed_dim
    size = (model.num_heads + 2 * model.kv_heads) * model.head_width // step.tensor if model.attention_bias else 0
    planned = _hidden_biases(step, "biases", size)
    if model.output_bias:  # added where tokens are sharded over tensor
        planned += step.replicated_gradient("biases of attention updates", width * step.act)
    if model.mlp_bias:
        gates, moe = 2 if model.gated_mlp else 1, model.moe
        update = step.replicated_gradient("biases of mlp updates", width * step.act)
        planned += step.in_layers(model.dense_layers, _hidden_biases(step, "mlp biases", gates * model.mlp_dim // step.tensor) + update)
        if moe is not None and moe.shared_experts:
            shared = gates * moe.shared_experts * model.expert_width // step.tensor
            update = step.replicated_gradient("biases of updates of shared experts", width * step.act)
            planned += step.in_layers(model.moe_layers, _hidden_biases(step, "biases of shared experts", shared) + update)
    return [*planned, *_sinks(step)]


def _hidden_biases(step: StepSizes, what: str, size: int) -> list[PlannedCollective]:
    """Return the reductions of the gradients of `size` biases of results that are sharded over tensor."""
    groups = (step.over("data", "fsdp", "expert"), step.over("context")) if size and not step.frozen else ()
    return [replace(step.item(what, "backward", "all-reduce", axes, size * step.act), replicated=True) for axes in groups]


def _sinks(step: StepSizes) -> list[PlannedCollective]:
    """Return the reduction of the gradient of attention sinks, float32."""
    if not step.model.attention_sinks or step.frozen:
        return []
    axes = step.over("data", "fsdp", "context", "expert")
    sinks = step.item("attention sinks", "backward", "all-reduce", axes, step.model.num_heads // step.tensor * 4)
    return [replace(sinks, by_hand=step.context > 1)]


def recomputed_in_layer(step: StepSizes) -> list[PlannedCollective]:
    """Return the gathers and reductions that the backward pass of a block repeats."""
    again = recomputed_by(step.config)
    planned = []
    if again.inputs or step.ring:
        read = step.latents + (0 if _low_rank_queries(step) else step.stream)
        planned.append(step.through_tensor("attention input (recomputed)", "backward", "all-gather", read))
        mlp = step.through_tensor("mlp input (recomputed)", "backward", "all-gather", step.stream)
        layers = step.model.num_layers if step.model.moe is None or step.model.moe.shared_experts else step.model.dense_layers
        planned += step.in_layers(layers, [mlp]) if layers else []
    parts = step.ring and step.config.compute.remat.policy == "dots"  # only parts of the sum are kept
    if again.attention_update or parts:
        planned.append(step.through_tensor("attention update (recomputed)", "backward", "reduce-scatter", step.stream))
    if again.mlp_update or (parts and step.model.norm_position != "pre"):
        planned.append(step.through_tensor("mlp update (recomputed)", "backward", "reduce-scatter", step.stream))
    return [*planned, *sequence_recomputed(step, again)]
