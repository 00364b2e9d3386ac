"""Elastic jobs: their numbers of nodes, checked before the queue."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.configs.mesh import with_mesh
from ridgeline.configs.rules import check_devices
from ridgeline.configs.schema import Config
from ridgeline.launch.slurm.shape import JobShape, memory_shortage
from ridgeline.planner.policy import elastic_sizes

PROBE_S = 60
"""A node that does not start a process within this time is bad."""
GUARD_S = 10
"""Interval at which a second node checks that the node of the job script still belongs to the job."""
_CHANGED = ("mesh.data", "mesh.fsdp", "trainer.accumulation")


@dataclass(frozen=True)
class Elastic:
    """What an elastic job may do."""

    layouts: dict[int, tuple[str, ...]]
    """Number of nodes -> overrides of the config, largest first."""
    without: dict[int, str]
    """Number of nodes -> why it has no layout."""
    spares: int
    grow_s: int

    @property
    def most(self) -> int:
        """Nodes that the job requests."""
        return max(self.layouts) + self.spares


def elastic_job(config: Config, cluster: ClusterConfig, shape: JobShape) -> Elastic | None:
    """Return what a config allows a job; None for a job with fixed nodes. Raises UserError for a mesh or nodes that do not fit.

    A number of nodes whose devices have too little memory is left out, unless the whole job has too little by the same estimate.
    """
    wanted = config.elastic
    if not wanted.on:
        return None
    least = wanted.min_nodes or shape.nodes
    if least > shape.nodes:
        raise UserError(f"elastic.min_nodes={least} exceeds --nodes {shape.nodes}")
    check_devices(config, shape.devices)
    whole = with_mesh(config, shape.devices)
    found, without = elastic_sizes(whole, range(least, shape.nodes + 1), shape.devices_per_node)
    if shape.nodes not in found:
        raise UserError(without[shape.nodes])
    if memory_shortage(whole, cluster) is None:
        short = {nodes: why for nodes, smaller in found.items() if (why := memory_shortage(smaller, cluster))}
        found, without = {nodes: smaller for nodes, smaller in found.items() if nodes not in short}, without | short
    layouts = {nodes: _overrides(changed) for nodes, changed in found.items()}
    return Elastic(layouts, without, wanted.spares, round(wanted.grow_minutes * 60))


def _overrides(config: Config) -> tuple[str, ...]:
    values = {f"{section}.{key}": getattr(getattr(config, section), key) for section, key in (name.split(".") for name in _CHANGED)}
    return tuple(f"{name}={value}" for name, value in values.items())
