"""What a device costs per hour: of a cluster, or of the cluster a run was submitted to."""

from __future__ import annotations

from pathlib import Path

from ridgeline.configs.cluster import load_cluster
from ridgeline.planner.hardware import hardware


def cluster_price(cluster: str) -> float | None:
    """Return the price of one device for an hour, USD, of a cluster (name or file): its own, else the typical one of its device.

    Raises UserError: there is no such cluster.
    """
    config = load_cluster(cluster).config
    price = config.price_per_device_hour_usd
    return hardware(config.device).price_per_hour_usd if price is None else price


def run_price(run_dir: Path) -> float | None:
    """Return the price of the cluster a run was last submitted to; None for one that never was.

    Raises UserError: the cluster file in the run directory is damaged.
    """
    files = sorted(run_dir.glob("slurm/*/cluster.yaml"), key=lambda path: path.stat().st_mtime)
    return cluster_price(str(files[-1])) if files else None
