"""The search over layouts: for each number of nodes every valid layout, its memory, step time and cost, or why it is rejected.

Pruning does not change the result: for a mesh and a rematerialization policy, fewer microbatches mean less traffic and larger matmuls, so
only the TIMED_PER_MESH smallest numbers of microbatches that fit are timed. Memory is checked before time, because it is cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.economics import RunEstimate, estimate_run
from ridgeline.planner.hardware import check_block_scaled, hardware
from ridgeline.planner.host_memory import refusal
from ridgeline.planner.layouts import Layout, Mesh, accumulations, check_plannable, meshes, remat_choices
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.memory import MemoryEstimate, memory_per_device
from ridgeline.planner.step_time import Machine, StepEstimate, StepParts, step_parts

Objective = Literal["time", "cost", "efficiency"]
TIMED_PER_MESH = 2
"""Numbers of microbatches timed per mesh and rematerialization policy."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its predictions."""

    nodes: int
    layout: Layout
    microbatch: int
    """Rows of a microbatch on one device."""
    memory: MemoryEstimate
    parts: StepParts
    step: StepEstimate
    run: RunEstimate


@dataclass(frozen=True)
class Rejection:
    """A layout that is rejected."""

    nodes: int
    mesh: dict[str, int]
    remat: str | None
    """Rematerialization policy; None: the mesh itself is rejected."""
    reason: str
    short_bytes: int = 0
    """Bytes by which the smallest memory estimate exceeds the capacity; 0: rejected for another reason."""


@dataclass(frozen=True)
class Limits:
    """Limits on money, time and device-hours, failures included; None: no limit."""

    budget_usd: float | None = None
    deadline_days: float | None = None
    device_hours: float | None = None


@dataclass
class Scale:
    """The result for one number of nodes."""

    nodes: int
    devices: int
    candidates: list[Candidate] = field(default_factory=list)
    """Layouts that fit, fastest first."""
    rejections: list[Rejection] = field(default_factory=list)

    @property
    def best(self) -> Candidate | None:
        """The fastest layout; for a fixed batch and number of nodes it is also the cheapest and most efficient."""
        return self.candidates[0] if self.candidates else None


def capacity_bytes(machine: Machine) -> int:
    """Return the bytes of a device that a run may use (utilisation_cap of the cluster file)."""
    return int(machine.device.memory_bytes * machine.cluster.utilisation_cap)


def search(config: Config, cluster: ClusterConfig, calibration: Calibration, nodes: Sequence[int], tokens: float) -> list[Scale]:
    """Search each number of nodes. Raises UserError for a config, a number of nodes or a device that cannot be planned."""
    _check(config, cluster)
    for count in nodes:
        if cluster.nodes is not None and count > cluster.nodes:
            raise UserError(f"--nodes {count}: cluster '{cluster.name}' has only {cluster.nodes:,} nodes")
    return [search_scale(config, cluster, calibration, count, tokens) for count in sorted(set(nodes))]


def _check(config: Config, cluster: ClusterConfig) -> None:
    check_plannable(config)
    if config.precision.block_scaled is not None:
        check_block_scaled(hardware(cluster.device), config.precision.block_scaled)


def search_scale(config: Config, cluster: ClusterConfig, calibration: Calibration, nodes: int, tokens: float) -> Scale:
    """Search one number of nodes."""
    devices = nodes * cluster.devices_per_node
    machine = Machine(cluster, calibration, devices)
    scale = Scale(nodes, devices)
    for mesh in meshes(config, devices, cluster.devices_per_node):
        if mesh.refused is not None:
            scale.rejections.append(Rejection(nodes, mesh.layout.mesh, None, mesh.refused))
            continue
        for found in _layouts(config, mesh, machine, nodes):
            if isinstance(found, Rejection):
                scale.rejections.append(found)
            else:
                layout, memory = found
                scale.candidates.append(evaluate(config, layout, memory, machine, tokens, nodes))
    scale.candidates.sort(key=lambda candidate: (candidate.step.step_s, candidate.memory.total_bytes))
    return scale


def fits(config: Config, cluster: ClusterConfig, calibration: Calibration, nodes: int) -> bool:
    """Return whether some layout fits on this number of nodes. Raises UserError for a config or a device that cannot be planned."""
    _check(config, cluster)
    machine = Machine(cluster, calibration, nodes * cluster.devices_per_node)
    found = meshes(config, machine.devices, cluster.devices_per_node)
    return any(not isinstance(one, Rejection) for mesh in found if mesh.refused is None for one in _layouts(config, mesh, machine, nodes))


def evaluate(config: Config, layout: Layout, memory: MemoryEstimate, machine: Machine, tokens: float, nodes: int) -> Candidate:
    """Predict the step time of a layout and the cost of the run."""
    chosen = layout.apply(config)
    local = LocalSizes.of(chosen, layout.sizes)
    parts = step_parts(chosen, layout.sizes, machine, memory=memory)
    step = parts.assemble()
    run = estimate_run(chosen, local, step.step_s, machine.cluster, machine.device, tokens, nodes)
    return Candidate(nodes, layout, local.rows, memory, parts, step, run)


def _layouts(config: Config, mesh: Mesh, machine: Machine, nodes: int) -> Iterator[tuple[Layout, MemoryEstimate] | Rejection]:
    """Yield the layouts of a mesh that fit, and for each rematerialization policy without one the reason."""
    capacity = capacity_bytes(machine)
    counts = accumulations(config, mesh.layout)
    stage = mesh.layout.zero_stage
    if not counts:  # rows for fewer microbatches than stages
        yield Rejection(nodes, mesh.layout.mesh, None, f"has rows for fewer microbatches than mesh.pipeline={mesh.layout.pipeline}")
        return

    def named(reason: str) -> str:
        return f"mesh.zero_stage={stage}: {reason}" if stage else reason

    layer = machine.calibration.layer(machine.device, LocalSizes.of(mesh.layout.apply(config), mesh.layout.sizes))
    for remat in remat_choices(config, [] if layer is None else [cost.remat for cost in layer.policies]):
        if remat.offloads and (not machine.device.tensor_cores or mesh.layout.pipeline > 1):
            continue  # a CPU has no separate host memory
        timed, least, reason = 0, None, ""
        for accumulation in counts:
            layout = replace(mesh.layout, accumulation=accumulation, remat=remat)
            on_node = min(machine.cluster.devices_per_node, layout.devices)
            if reason := refusal(layout.apply(config), layout.sizes, on_node, machine.cluster.memory_per_node_gib * 2**30):
                continue
            memory = memory_per_device(layout.apply(config), layout.sizes, gpu=machine.device.tensor_cores, device=machine.device)
            if least is None or memory.total_bytes < least:
                least = memory.total_bytes
            if memory.total_bytes <= capacity:
                timed += 1
                yield layout, memory
                if timed == TIMED_PER_MESH:
                    break
        if least is None:
            yield Rejection(nodes, mesh.layout.mesh, remat.policy, named(reason))
        elif not timed:
            reason = (
                f"needs at least {least / 1e9:.1f} GB per device, {(least - capacity) / 1e9:.1f} GB more than the {capacity / 1e9:.1f} GB"
                " a run may use"
            )
            yield Rejection(nodes, mesh.layout.mesh, remat.policy, named(reason), least - capacity)


def within(candidate: Candidate, limits: Limits) -> str | None:
    """Return by how much a candidate exceeds a limit; None when it meets all."""
    run = candidate.run
    if limits.deadline_days is not None and run.wall_days > limits.deadline_days:
        over = run.wall_days / limits.deadline_days
        return f"takes {run.wall_days:.3g} days, {over:.2g} times the deadline of {limits.deadline_days:g} days"
    if limits.budget_usd is not None and run.wall_cost_usd is not None and run.wall_cost_usd > limits.budget_usd:
        over = run.wall_cost_usd / limits.budget_usd
        return f"costs ${run.wall_cost_usd:,.0f}, {over:.2g} times the budget of ${limits.budget_usd:,.0f}"
    if limits.device_hours is not None and run.wall_device_hours > limits.device_hours:
        over = run.wall_device_hours / limits.device_hours
        return f"takes {run.wall_device_hours:,.0f} device-hours, {over:.2g} times the limit of {limits.device_hours:,.0f}"
    return None


def rank_key(objective: Objective) -> tuple[str, ...]:
    """Return the names of what an objective minimizes, in order."""
    return {"time": ("wall_days", "cost"), "cost": ("cost", "wall_days"), "efficiency": ("per_token", "wall_days")}[objective]


def ranked(scales: Sequence[Scale], objective: Objective, limits: Limits) -> list[Candidate]:
    """Return all candidates within the limits, best first; ties go to the layout with less memory."""

    def key(candidate: Candidate) -> tuple[float, ...]:
        run, step = candidate.run, candidate.step
        values = {
            "wall_days": run.wall_days,
            "cost": run.wall_device_hours if run.wall_cost_usd is None else run.wall_cost_usd,
            "per_token": -step.tokens_per_s_per_device,
        }
        return (*(values[name] for name in rank_key(objective)), candidate.memory.total_bytes)

    return sorted((c for scale in scales for c in scale.candidates if within(c, limits) is None), key=key)
