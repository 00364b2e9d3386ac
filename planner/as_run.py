"""The collectives of a step as other training software runs it: planned ones that only this project's step has, or has more often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.planner.collectives import PlannedCollective
from ridgeline.planner.pipeline import Schedule
from ridgeline.planner.software import Software

REPLICATED_OVER = {"data", "context", "expert"}
"""Mesh axes over which software with `reduces_once` has whole parameters (of experts: over the first two)."""
OF_PARAMETERS = ("all-gather", "reduce-scatter", "all-reduce")


def as_run(
    planned: Sequence[PlannedCollective], software: Software, schedule: Schedule, *, narrow: bool = False
) -> list[PlannedCollective]:
    """Return the collectives of a step as software runs it. narrow: the layers' matmuls have 8-bit inputs."""
    if narrow and software.gathers_narrow:
        planned = [_narrow(item) for item in planned]
    found = [_kept_once(item, schedule) if software.reduces_once and _of_parameters(item) else item for item in planned]
    if software.stages_hold_layers:
        found = [_in_last_chunk(item) for item in found if item.axes != ("pipeline",) or item.where == "layer"]
    return [item for item in found if item.count and not (software.keeps_received and item.what.endswith("(again)"))]


def _narrow(item: PlannedCollective) -> PlannedCollective:
    """Return the gather of a matmul's inputs over tensor in 8 bits."""
    inputs = item.where == "layer" and item.phase == "forward" and item.kind == "all-gather" and item.axes == ("tensor",)
    return replace(item, bytes=item.bytes // 2) if inputs else item


def _of_parameters(item: PlannedCollective) -> bool:
    return item.kind in OF_PARAMETERS and item.where != "optimizer" and not item.of_tokens and set(item.axes) <= REPLICATED_OVER


def _kept_once(item: PlannedCollective, schedule: Schedule) -> PlannedCollective:
    """Return a gather of parameters or a reduction of gradients of every microbatch as one per step; those that the backward pass repeats
    are none."""
    if item.kind == "all-gather" and item.phase == "backward":
        return replace(item, count=0)
    once = round(item.count * schedule.chunks / schedule.forward_ticks) if item.where == "layer" else 1
    return replace(item, count=max(1, once), where="layer")


def _in_last_chunk(item: PlannedCollective) -> PlannedCollective:
    """Return the reduction of a step's gradients of a stage as one that begins after its last microbatch in each layer."""
    reduced = item.where == "optimizer" and item.axes == ("data",)
    return replace(item, where="layer") if reduced else item
