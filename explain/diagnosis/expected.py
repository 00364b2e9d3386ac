"""What the planner expects of a run on the cluster it ran on: seconds by term, bandwidth of collectives, memory to be had."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.configs.cluster import ClusterConfig, load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.planner.calibration import Calibration, load_calibration
from ridgeline.planner.communication import bus_factor, time_s
from ridgeline.planner.hardware import Hardware, hardware
from ridgeline.planner.links import Fabric
from ridgeline.planner.step_time import step_time

_MODELLED = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


@dataclass(frozen=True)
class Expected:
    """A cluster, and what the planner says about one run on it."""

    cluster: ClusterConfig
    mesh: Mapping[str, int]
    """Axis -> devices, all axes."""
    breakdown_s: Mapping[str, float] = field(default_factory=dict)
    """Planned seconds of a step by term (planner.step_time)."""
    calibration: Calibration = field(default_factory=load_calibration)
    """The rates the planner counts with."""

    @property
    def step_s(self) -> float | None:
        """Planned time of a step."""
        return math.fsum(self.breakdown_s.values()) if self.breakdown_s else None

    @property
    def capacity_bytes(self) -> int:
        """Memory of one device. A CPU's is its share of the node's."""
        device: Hardware = hardware(self.cluster.device)
        if device.name != "cpu":
            return device.memory_bytes
        return int(self.cluster.memory_per_node_gib * 2**30 / self.cluster.devices_per_node)

    def bus_bandwidth(self, kind: str, size_bytes: float, axes: Sequence[str]) -> float | None:
        """Return the planned bus bandwidth of a collective in bytes/s; None for kinds and axes without a model."""
        if kind not in _MODELLED or not axes or not set(axes) <= set(self.mesh):
            return None
        group = self._fabric.axes_group(self.mesh, tuple(axes))
        seconds = time_s(kind, size_bytes, group).seconds
        return size_bytes / seconds * bus_factor(kind, group.size) if seconds > 0 else None

    @functools.cached_property
    def _fabric(self) -> Fabric:
        return Fabric.from_cluster(self.cluster, self.calibration, num_devices=math.prod(self.mesh.values()))


def expect(
    run: Path, config: Config | None, plan: Mapping[str, Any] | None, cluster: str | None = None, calibration: str | Path | None = None
) -> Expected | None:
    """Return what to expect of a run; None where nothing says what it ran on.

    Args:
      run: the run directory.
      config: of the run.
      plan: its plan.json, which knows the mesh, and the cluster of a run on GPUs.
      cluster: file or name; None: the file it was submitted with (the newest slurm/*/cluster.yaml), else that of the plan.
      calibration: file of `ridge calibrate`; None: published rates.

    Raises:
      UserError: there is no such cluster or calibration, or its device cannot be planned for.
    """
    mesh = (plan or {}).get("mesh")
    submitted = sorted(run.glob("slurm/*/cluster.yaml"), key=lambda path: path.stat().st_mtime)
    name = cluster or (str(submitted[-1]) if submitted else (plan or {}).get("cluster"))
    if name is None or mesh is None or config is None:
        return None
    found, rates = load_cluster(str(name)).config, load_calibration(calibration)
    try:
        breakdown = step_time(config, mesh, found, rates).breakdown_s
    except UserError:
        if cluster is not None:
            raise
        breakdown = {}  # the links and the memory are known all the same
    return Expected(found, dict(mesh), breakdown, rates)
