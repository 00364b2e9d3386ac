"""The collectives over pipeline stages (trainer/pipeline.py, sharding/stages.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ridgeline.configs.pipeline import stored_by_stage
from ridgeline.planner.collectives.planned import Kind, Phase, PlannedCollective, StepSizes, Where
from ridgeline.planner.parameters import (
    attention_matmul_parameters,
    head_norms,
    latent_parameters,
    layer_norms,
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
        planned += _of_gradients(step, item(what, "optimizer", "backward", "reduce-scatter", size * step.grad, 1))
    norms = (2 if model.norm == "layernorm" else 1) * model.embed_dim * step.grad
    planned.append(item("final norm of all stages", "optimizer", "backward", "all-reduce", norms, 1))
    return [*planned, *_moved_layers(step, item)]


def _moved_layers(step: StepSizes, item: Callable[..., PlannedCollective]) -> list[PlannedCollective]:
    """Return the moves of layers to their stages and of their gradients back, where no stage stores its own."""
    if stored_by_stage(step.config, step.sizes):
        return []
    matrices = step.model.num_layers * _layer_matrices(step)
    vectors = step.schedule.stages * step.model.num_layers * _layer_vectors(step)
    moe = step.model.moe
    router = 4 * step.schedule.stages * step.model.num_layers * (moe.experts + 4) if moe is not None else 0
    back = item("gradients of layers from their stages", "optimizer", "backward", "all-to-all", matrices * step.grad, 1)
    return [
        item("layers to their stages", "optimizer", "forward", "all-to-all", matrices * step.master, 1),
        *_of_gradients(step, back),
        item("gradients of norms from their stages", "optimizer", "backward", "all-gather", vectors * step.grad, 1),
        *([item("router metrics of all stages", "optimizer", "backward", "all-gather", router, 1)] if router else []),
    ]


def _of_gradients(step: StepSizes, item: PlannedCollective) -> list[PlannedCollective]:
    """Return the transfer of gradients over stages; with mesh.zero_stage=2 of those sharded over data, which are reordered then."""
    if not step.config.mesh.zero_stage:
        return [item]
    scattered = replace(item, bytes=item.bytes // step.sizes["data"])
    of_device = scattered.bytes // step.schedule.stages if item.kind == "reduce-scatter" else scattered.bytes
    return [
        scattered,
        replace(scattered, kind="collective-permute", axes=step.over("pipeline", "data"), bytes=of_device, by_hand=False),
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


def _layer_vectors(step: StepSizes) -> int:
    model = step.model
    vectors = layer_norms(model) * (2 if model.norm == "layernorm" else 1) * model.embed_dim + head_norms(model)
    vectors += (model.num_heads + 2 * model.kv_heads) * model.head_width // step.tensor if model.attention_bias else 0
    vectors += model.embed_dim if model.output_bias else 0
    return vectors + ((2 if model.gated_mlp else 1) * model.mlp_dim // step.tensor + model.embed_dim if model.mlp_bias else 0)
