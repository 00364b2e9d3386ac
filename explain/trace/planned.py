"""What the plan expects of the collectives of a capture: bus bandwidth on the links of a cluster."""

from __future__ import annotations

import json
from pathlib import Path

from ridgeline.configs.cluster import ClusterConfig, load_cluster
from ridgeline.configs.errors import UserError
from ridgeline.explain.trace.analysis import PlannedBandwidth
from ridgeline.explain.trace.capture import Capture, mesh_sizes
from ridgeline.planner.calibration import load_calibration
from ridgeline.planner.communication import bus_factor, time_s
from ridgeline.planner.links import Fabric

KINDS = frozenset({"all-reduce", "all-gather", "reduce-scatter", "all-to-all"})


def planned_bandwidth(capture: Capture, cluster: str | None = None, calibration: Path | None = None) -> PlannedBandwidth | None:
    """Return what the planner expects of collectives: (kind, bytes, axes) -> bus bandwidth in bytes/s.

    On the links of the cluster that is named; else of the one the run was submitted to, or that its plan.json was made for; None where
    nothing tells. `calibration`: file of `ridge calibrate`; None: published rates.

    Raises UserError: there is no such cluster or calibration, or the run's own is damaged.
    """
    found = load_cluster(cluster).config if cluster is not None else _own_cluster(capture)
    devices = int(capture.record.get("num_devices", 1))
    sizes = mesh_sizes(capture, devices)
    if found is None or sizes is None:
        return None
    fabric = Fabric.from_cluster(found, load_calibration(calibration), num_devices=devices)

    def expected(kind: str, size_bytes: float, axes: tuple[str, ...]) -> float | None:
        if kind not in KINDS or not set(axes) <= set(sizes):
            return None
        group = fabric.axes_group(sizes, axes)
        cost = time_s(kind, size_bytes, group)
        return size_bytes / cost.seconds * bus_factor(kind, group.size) if cost.seconds > 0 else None

    return expected


def _own_cluster(capture: Capture) -> ClusterConfig | None:
    """The cluster of the run's newest submission, else that of its plan (a shipped one, by name)."""
    if capture.run_dir is None:
        return None
    files = sorted(capture.run_dir.glob("slurm/*/cluster.yaml"), key=lambda path: path.stat().st_mtime)
    if files:
        return load_cluster(str(files[-1])).config
    plan = capture.run_dir / "plan.json"
    try:
        name = json.loads(plan.read_bytes()).get("cluster") if plan.is_file() else None
        return load_cluster(str(name)).config if name else None
    except (ValueError, AttributeError):
        return None
    except UserError:  # a cluster of another machine
        return None
