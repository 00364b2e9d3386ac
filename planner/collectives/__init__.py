"""The collectives of one optimizer step: kind, mesh axes and bytes of each, inside and outside the layers.

Sharding and models are written to this plan, and tests compare the compiled step with it:
* parameters are sharded over fsdp and gathered in the compute dtype, in the forward and again in the backward pass; their gradients are
  reduce-scattered over fsdp and then all-reduced over data, in the gradient dtype, once per microbatch;
  with mesh.zero_stage=2 they are reduce-scattered over data too, and the updated parameters are gathered over data once per step;
* over tensor, the residual stream is sharded along the sequence; it is gathered before attention and MLP and reduce-scattered after each
  (arXiv 2205.05198); with compute.tensor_overlap=ring each of these is t - 1 permutes of 1/t of it, and inputs that are not kept gathered
  are sent around the ring again in the backward pass;
* of latent attention the latents are gathered over tensor in place of the stream; their projections are not sharded over tensor, whose
  devices have other tokens, so that their gradients are reduced over it;
* what the backward pass recomputes under compute.remat it also communicates again: the gathers of the inputs over tensor, and the
  reduce-scatter of attention's update (the MLP's update only where a norm follows it, since no other gradient needs it). Parameters are
  gathered once for recomputation and gradients;
* over context, tokens are sharded everywhere. Attention passes keys and values around a ring of C devices, C - 1 hops in each pass, and
  their gradients with them, C - 1 hops in float32 and one in the compute dtype; or it exchanges queries, keys, values and results,
  all-to-all. Gradients of parameters are all-reduced over data and context together;
* over expert, tokens are gathered and their results reduce-scattered, or both are all-to-alls (planner/experts.py);
* over pipeline, each tick permutes the residual stream to the next stage and its gradient to the previous one; the last stage's result is
  scattered over stages for the loss, and gathered again. Parameters outside of the layers are gathered over stages once per step, and their
  gradients reduce-scattered. Where layers do not divide into one chunk per stage, all-to-alls move them, and their gradients back. All
  gradients are summed over data after that, once per step; with mesh.zero_stage=2 they are reduce-scattered;
* Muon moves whole matrices to one device each with all-to-alls (trainer/muon.py); every other optimizer works on shards.

Legend: D embed width, F MLP width, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ridgeline.configs.schema import MESH_AXES, Config
from ridgeline.planner.collectives.layers import in_layer, recomputed_in_layer
from ridgeline.planner.collectives.mtp import modules
from ridgeline.planner.collectives.outside_layers import embedding, loss, optimizer
from ridgeline.planner.collectives.planned import Kind, PlannedCollective, StepSizes
from ridgeline.planner.collectives.stages import stages
from ridgeline.planner.pipeline import Schedule

__all__ = [
    "PlannedCollective",
    "as_compiled_for_cpu",
    "as_compiled_for_gpu",
    "bytes_per_step",
    "compiled_collectives",
    "planned_collectives",
]


def planned_collectives(config: Config, sizes: Mapping[str, int], *, gpu: bool = True) -> list[PlannedCollective]:
    """List the collectives of one optimizer step on a mesh of these axis sizes, for every compute.remat policy and optimizer.

    Scalars and Adafactor's row and column sums are omitted.

    Args:
      gpu: whether the devices are GPUs; CPU devices move wider elements (CPU_ITEMSIZE).
    """
    step = StepSizes(config, sizes, gpu)
    planned = [*in_layer(step), *recomputed_in_layer(step), *modules(step), *embedding(step), *loss(step), *optimizer(step), *stages(step)]
    return [item for item in planned if item.axes]


def compiled_collectives(config: Config, sizes: Mapping[str, int], *, gpu: bool = True) -> list[PlannedCollective]:
    """Return the planned collectives in the form, number and dtype in which the backend of a GPU or CPU compiles them."""
    schedule = Schedule.of(config, sizes)
    planned = [_in_branch(item, schedule) for item in planned_collectives(config, sizes, gpu=gpu)]
    return as_compiled_for_gpu(planned) if gpu else [as_compiled_for_cpu(item) for item in planned]


def _in_branch(item: PlannedCollective, schedule: Schedule) -> PlannedCollective:
    """Return a collective as often as the loops of a module run it: with several chunks per pipeline stage, tokens are looked up, and the
    loss is computed, in a branch that some ticks do not take."""
    if schedule.chunks == 1 or item.where not in ("embed", "loss"):
        return item
    ticks = schedule.forward_ticks - (schedule.first_backward if item.where == "loss" else 0)
    return replace(item, count=ticks, summed=False, invariant_count=None)


def as_compiled_for_gpu(planned: Sequence[PlannedCollective]) -> list[PlannedCollective]:
    """Return the collectives that XLA's GPU backend compiles a plan to.

    Gradients of replicated parameters are reduced over all their axes in one all-reduce. Reductions that are only added to the sum over
    microbatches run once, after it.
    """
    merged: dict[tuple[str, str], PlannedCollective] = {}
    compiled = []
    for item in planned:
        item = replace(item, count=1) if item.summed else item
        if not item.replicated:
            compiled.append(item)
        elif (item.what, item.where) in merged:
            other = merged[item.what, item.where]
            assert not set(other.axes) & set(item.axes), f"two gradients named {item.what}, {item.where}"
            axes = other.axes + item.axes
            merged[item.what, item.where] = replace(item, axes=tuple(axis for axis in MESH_AXES if axis in axes))
        else:
            merged[item.what, item.where] = item
    return compiled + list(merged.values())


def as_compiled_for_cpu(item: PlannedCollective) -> PlannedCollective:
    """Return the collective that XLA's CPU backend compiles a planned one to."""
    kind: Kind = "all-reduce" if item.kind == "reduce-scatter" and not item.by_hand else item.kind
    count = item.count if item.invariant_count is None else item.invariant_count
    return replace(item, kind=kind, bytes=item.bytes * item.parts, parts=1, count=count)


def bytes_per_step(planned: list[PlannedCollective]) -> dict[tuple[Kind, tuple[str, ...]], int]:
    """Return the bytes of a step by kind and axes."""
    totals: dict[tuple[Kind, tuple[str, ...]], int] = {}
    for item in planned:
        totals[item.kind, item.axes] = totals.get((item.kind, item.axes), 0) + item.bytes * item.count
    return totals
