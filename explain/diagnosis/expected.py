"""What the planner expects of a run on its cluster: seconds of a step by term, bandwidth of collectives, device memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.planner.calibration import Calibration, load_calibration
from ridgeline.planner.communication import mesh_bus_bandwidth
from ridgeline.planner.hardware import hardware
from ridgeline.planner.links import Fabric
from ridgeline.planner.step_time import step_time
from ridgeline.rundir.directory import RunDir, known_cluster


@dataclass(frozen=True)
class Expected:
    """The planner's expectations of one run on a cluster."""

    cluster: ClusterConfig
    mesh: Mapping[str, int]
    """Axis -> devices, all axes."""
    breakdown_s: Mapping[str, float] = field(default_factory=dict)
    """Planned seconds of a step by term (planner.step_time); empty where the run cannot be planned on the cluster."""
    calibration: Calibration = field(default_factory=load_calibration)
    """The rates the planner uses."""

    @property
    def step_s(self) -> float | None:
        """Planned time of a step."""
        return math.fsum(self.breakdown_s.values()) if self.breakdown_s else None

    @property
    def capacity_bytes(self) -> int:
        """Memory of one device; of a CPU device, its share of the memory of the node."""
        device = hardware(self.cluster.device)
        if device.name != "cpu":
            return device.memory_bytes
        return int(self.cluster.memory_per_node_gib * 2**30 / self.cluster.devices_per_node)

    def bus_bandwidth(self, kind: str, size_bytes: float, axes: Sequence[str]) -> float | None:
        """Return the planned bus bandwidth of a collective in bytes/s; None for kinds and axes without a model."""
        return mesh_bus_bandwidth(kind, size_bytes, self._fabric, self.mesh, axes)

    @functools.cached_property
    def _fabric(self) -> Fabric:
        return Fabric.from_cluster(self.cluster, self.calibration, num_devices=math.prod(self.mesh.values()))


def expect(run: RunDir, cluster: str | None = None, calibration: str | Path | None = None) -> Expected | None:
    """Return what the planner expects of a run; None where cluster, mesh or config are unknown.

    Args:
      run: the run directory; plan.json has the mesh.
      cluster: file or name; None: see rundir.directory.known_cluster.
      calibration: file of `ridge calibrate`; None: published rates.

    Raises:
      UserError: there is no such cluster or calibration, or its device cannot be planned for.
    """
    found = known_cluster(run, cluster)
    mesh = None if run.plan is None else run.plan.mesh
    if found is None or mesh is None or run.config is None:
        return None
    rates = load_calibration(calibration)
    try:
        breakdown = step_time(run.config, mesh, found, rates).breakdown_s
    except UserError:
        if cluster is not None:
            raise
        breakdown = {}  # links and memory are known without it
    return Expected(found, dict(mesh), breakdown, rates)
