"""The collectives of low-rank adapters (models/lora.py): of their parameters, of the narrow vectors, and of DoRA's norms."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.configs.remat import POLICIES
from ridgeline.planner.adapters import AdaptedMatrix, adapted_matrices
from ridgeline.planner.collectives.planned import PlannedCollective, StepSizes


def adapters(step: StepSizes) -> list[PlannedCollective]:
    """Return the collectives of a layer's adapters, with those that the backward pass repeats."""
    planned = []
    for matrix in adapted_matrices(step.config.model_copy(update={"model": step.model})):
        if matrix.experts:
            planned += step.in_layers(matrix.layers, _of_experts(step, matrix))
            continue
        of_matrix = [*_parameters(step, matrix), *_narrow(step, matrix), *(_magnitudes(step, matrix) if matrix.magnitudes else [])]
        planned += step.in_layers(matrix.layers, of_matrix)
    return planned


def _of_experts(step: StepSizes, matrix: AdaptedMatrix) -> list[PlannedCollective]:
    """Return the gathers of the side of the residual stream, and the reductions of both gradients, by hand (models/moe/adapters.py)."""
    what, local = f"{matrix.name} adapters", matrix.experts // step.expert
    embed, fsdp = local * matrix.embed_side * step.grad, step.sizes["fsdp"]
    rows = step.over("data", "context") if step.over("fsdp") else step.over("data", "fsdp", "context")
    reduced = [
        step.item(what, "backward", "reduce-scatter", step.over("fsdp"), embed),
        step.item(what, "backward", "all-reduce", (*rows, *step.over("tensor")), embed // fsdp),
        step.item(
            f"{what}, other side",
            "backward",
            "all-reduce",
            step.over("data", "fsdp", "context"),
            local * matrix.other_side // step.tensor * step.grad,
        ),
    ]
    gathers = step.parameters(
        what, "layer", matrix.experts * matrix.embed_side, step.layers, of_experts=True, whole=True, gathered=step.act
    )
    return [*gathers, *(replace(item, by_hand=True) for item in reduced)]


def _parameters(step: StepSizes, matrix: AdaptedMatrix) -> list[PlannedCollective]:
    """Return the gathers of the side that fsdp shards, and the reductions of both gradients, which are whole (models/matmul)."""
    what, other = f"{matrix.label} adapter", matrix.other_side // (1 if matrix.writes_latent else step.tensor)
    return [
        *step.parameters(what, "layer", matrix.embed_side, step.layers, whole=True, gathered=step.act),
        *_replicated(step, what, matrix.embed_side * step.grad, over_tensor=matrix.on_shards),
        *_replicated(step, f"{what}, other side", other * step.grad, over_tensor=matrix.writes_latent),
    ]


def _replicated(step: StepSizes, what: str, size: int, *, over_tensor: bool) -> list[PlannedCollective]:
    """Return the reductions of a gradient that fsdp does not shard; over_tensor: tensor shards the tokens it is a sum over."""
    sequence = ("context", "tensor") if over_tensor else ("context",)
    groups = (step.over("data", "fsdp", "expert"), step.over(*sequence))
    return [replace(step.item(what, "backward", "all-reduce", axes, size), replicated=True) for axes in groups if axes]


def _narrow(step: StepSizes, matrix: AdaptedMatrix) -> list[PlannedCollective]:
    """Return the collectives of the vectors x A over tensor: those of an update are reduce-scattered as it is."""
    what, size = f"narrow vectors of {matrix.label}", step.tokens * matrix.rank * step.act
    if matrix.writes_latent:
        return []
    if not matrix.writes_stream:
        return [step.item(what, "backward", "all-reduce", step.over("tensor"), size)]
    forward = step.item(what, "forward", "reduce-scatter", step.over("tensor"), size)
    again = [replace(forward, what=f"{what} (recomputed)", phase="backward")] if _recomputed(step) else []
    return [forward, step.item(what, "backward", "all-gather", step.over("tensor"), size), *again]


def _recomputed(step: StepSizes) -> bool:
    policy = step.config.compute.remat.policy
    return POLICIES[policy].recomputes_block and policy != "dots"


def _magnitudes(step: StepSizes, matrix: AdaptedMatrix) -> list[PlannedCollective]:
    """Return the sums over the inputs of the columns' squares, float32, and the gradient of the magnitudes."""
    what, size = f"norms of {matrix.label}", 4 * matrix.local_magnitudes(step.tensor)
    fsdp = step.over("fsdp", "expert")
    if matrix.writes_stream:
        norms = [
            step.item(what, "forward", "all-reduce", step.over("tensor"), size // step.fsdp),
            step.item(what, "forward", "all-gather", fsdp, size),
        ]
    else:
        norms = [step.item(what, "forward", "all-reduce", fsdp, size)]
    again = (
        [replace(item, what=f"{what} (recomputed)", phase="backward") for item in norms]
        if POLICIES[step.config.compute.remat.policy].recomputes_block
        else []
    )
    return [*norms, *again, *_replicated(step, f"magnitudes of {matrix.label}", size, over_tensor=matrix.on_shards)]
