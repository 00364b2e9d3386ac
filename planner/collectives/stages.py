"""The collectives over pipeline stages (trainer/pipeline.py, sharding/stages.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ridgeline.configs.pipeline import stored_by_stage
from ridgeline.planner.collectives.planned import Kind, Phase, PlannedCollective, StepSizes, Where
from ridgeline.planner.parameters import (
    all_mlp_matmul_parameters,
    attention_matmul_parameters,
    count_parameters,
    head_norms,
    latent_parameters,
    mlp_matmul_parameters,
    moe_matmul_parameters,
)


def stages(step: StepSizes) -> list[PlannedCollective]:
    """Return the collectives over `pipeline` (trainer/pipeline.py, sharding/stages.py)."""
    axes, model, ticks = step.over("pipeline"), step.model, step.schedule.forward_ticks
    if not axes:
        return []
    cut = step.stream // step.tensor

    def item(what: str, where: Where, phase: Phase, kind: Kind, size: int, count: int) -> PlannedCollective:
        return PlannedCollective(what, where, phase, kind, axes, size, count, 1, True)

    planned = [
        item("residual stream to the next stage", "layer", "forward", "collective-permute", cut, ticks),
        item("its gradient to the previous stage", "layer", "backward", "collective-permute", cut, ticks),
        item("result of the last stage", "loss", "forward", "reduce-scatter", cut, step.micro),
        item("gradient of the result of the last stage", "loss", "forward", "all-gather", cut, step.micro),
    ]
    table = model.padded_vocab_size * model.embed_dim // step.tensor // step.fsdp
    shared = [("embedding of all stages", table)] + ([] if model.tie_embeddings else [("unembedding of all stages", table)])
    if model.position == "learned":
        shared.append(("positions of all stages", model.max_seq_len * model.embed_dim // step.fsdp))
    for what, size in shared:
        gathered = item(what, "optimizer", "forward", "all-gather", size * step.master, 1)
        planned.append(replace(gathered, by_hand=False))
        planned.append(item(what, "optimizer", "backward", "reduce-scatter", size * step.grad, 1))
        planned += _over_data(step, what, size // step.schedule.stages, scattered=True)
    norms = item("final norm of all stages", "optimizer", "backward", "all-reduce", _norm(step) * step.grad, 1)
    planned.append(replace(norms, axes=(*axes, *_copies(step))))
    matrices = step.config.model.num_layers * _layer_matrices(step) // step.schedule.stages
    planned += _over_data(step, "layers", matrices, scattered=True)
    planned += _over_data(step, "norms and biases of layers", _vectors(step), scattered=False)
    return [*planned, *_moved_layers(step, item)]


def _copies(step: StepSizes) -> tuple[str, ...]:
    return step.over_mesh("data") if step.once else ()


def _over_data(step: StepSizes, what: str, elements: int, *, scattered: bool) -> list[PlannedCollective]:
    """Return the sum of the gradients of a step over data; scattered: with mesh.zero_stage=2 each device gets its part."""
    kind: Kind = "reduce-scatter" if scattered and step.config.mesh.zero_stage else "all-reduce"
    summed = PlannedCollective(f"gradients of {what}", "optimizer", "backward", kind, _copies(step), elements * step.grad, 1, 1, True)
    return [summed] if elements else []


def _moved_layers(step: StepSizes, item: Callable[..., PlannedCollective]) -> list[PlannedCollective]:
    """Return the moves of layers to their stages and of their gradients back, where no stage stores its own."""
    if stored_by_stage(step.config, step.sizes):
        return []
    matrices = step.model.num_layers * _layer_matrices(step)
    vectors = step.schedule.stages * _vectors(step)
    moe = step.model.moe
    router = 4 * step.schedule.stages * step.model.num_layers * (moe.experts + 4) if moe is not None else 0
    return [
        item("layers to their stages", "optimizer", "forward", "all-to-all", matrices * step.master, 1),
        item("gradients of layers from their stages", "optimizer", "backward", "all-to-all", matrices * step.grad, 1),
        item("gradients of norms from their stages", "optimizer", "backward", "all-gather", vectors * step.grad, 1),
        *([item("router metrics of all stages", "optimizer", "backward", "all-gather", router, 1)] if router else []),
    ]


def _layer_matrices(step: StepSizes) -> int:
    """Return the elements of one layer's matrices on a device: those of routers and of projections to latents are whole over tensor."""
    model, whole = step.model, latent_parameters(step.model)
    if model.moe is None:
        sharded = attention_matmul_parameters(model) - whole + mlp_matmul_parameters(model)
    else:
        router = model.embed_dim * model.moe.experts
        sharded = attention_matmul_parameters(model) - whole + moe_matmul_parameters(model, active=False) - router
        whole += router
    return (sharded // step.tensor + whole) // step.fsdp


def _vectors(step: StepSizes) -> int:
    """Return the elements of norms, biases and sinks of the layers of a stage, empty ones included, on a device."""
    model, moe, gates = step.model, step.model.moe, 2 if step.model.gated_mlp else 1
    count = count_parameters(model)
    matrices = model.num_layers * attention_matmul_parameters(model) + all_mlp_matmul_parameters(model, active=False)
    vectors = count.attention + count.mlp + count.norms - _norm(step) - matrices
    of_heads = (model.num_heads + 2 * model.kv_heads) * model.head_width if model.attention_bias else 0
    of_heads += model.num_heads if model.attention_sinks else 0
    of_heads += head_norms(model) if model.qk_norm and model.qk_norm_dims == "all_heads" else 0
    hidden = routed = 0
    if model.mlp_bias:
        hidden = gates * (model.mlp_dim if moe is None else moe.shared_experts * model.expert_width)
        routed = 0 if moe is None else gates * moe.experts * model.expert_width
    whole = vectors - model.num_layers * (of_heads + hidden + routed)
    return whole + model.num_layers * ((of_heads + hidden) // step.tensor + routed // step.tensor // step.expert)


def _norm(step: StepSizes) -> int:
    return (2 if step.model.norm == "layernorm" else 1) * step.model.embed_dim
