"""From a step to a run: days, device-hours, money, energy, failures and goodput."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.schema import Config
from ridgeline.planner.calculators.failures import DEFAULT_NODE_MTBF_HOURS, fleet_mtbf_s, goodput
from ridgeline.planner.hardware import Hardware
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.memory import moment_bytes
from ridgeline.planner.parameters import count_parameters

RESTART_S = 600.0
"""From a failure to the next useful step, state read and lost steps apart: noticing, requeue, start, compilation."""
LEAST_INTERVAL_S = 600.0
"""Saves more often than every ten minutes bring nothing a failure every few hours could take, and crowd the file system."""
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class RunEstimate:
    """A whole run. `days`, `device_hours` and `cost_usd` are of the steps alone; `wall_*` include saves, failures and restarts."""

    tokens: float
    steps: int
    days: float
    device_hours: float
    cost_usd: float | None
    """None: neither the cluster file nor the catalogue has a price."""
    energy_kwh: float
    mtbf_hours: float
    expected_failures: float
    checkpoint_interval_s: float
    save_s: float
    """Training stands still for this long at a save."""
    goodput: float
    wall_days: float
    wall_cost_usd: float | None
    wall_device_hours: float


def price_usd(cluster: ClusterConfig, device: Hardware) -> float | None:
    """Return the price of a device for an hour: the cluster's, else the catalogue's typical one."""
    return cluster.price_per_device_hour_usd if cluster.price_per_device_hour_usd is not None else device.price_per_hour_usd


def state_bytes(config: Config) -> float:
    """Bytes of a checkpoint: parameters and moments of the whole model."""
    whole = LocalSizes(config, 1, 1, 1)
    return count_parameters(config.model).total * whole.parameter_itemsize + moment_bytes(whole)


def estimate_run(
    config: Config, local: LocalSizes, step_s: float, cluster: ClusterConfig, device: Hardware, tokens: float, nodes: int
) -> RunEstimate:
    """Extend a step to `tokens` tokens on a cluster.

    Saves block for the copy to host memory when asynchronous, for the whole write otherwise; the interval is Young's, but no shorter
    than a write or ten minutes. Energy is the devices' power limit times the facility's overhead: hosts and network come on top.
    """
    per_step = config.data.batch_size * config.data.seq_len
    steps = math.ceil(tokens / per_step)
    seconds = steps * step_s
    whole = state_bytes(config)
    write_s = whole / (cluster.storage.write_gb_per_s * 1e9)
    held = whole / local.fsdp / local.tensor
    save_s = held / device.host_bandwidth_bytes_per_s if config.checkpoint.asynchronous else write_s
    mtbf_s = fleet_mtbf_s([(nodes, cluster.node_mtbf_hours or DEFAULT_NODE_MTBF_HOURS)])
    interval_s = max(math.sqrt(2 * save_s * mtbf_s), write_s, LEAST_INTERVAL_S)
    restart_s = RESTART_S + whole / (cluster.storage.read_gb_per_s * 1e9)
    share = goodput(save_s=save_s, mtbf_s=mtbf_s, interval_s=interval_s, restart_s=restart_s)
    wall_s = seconds / share if share > 0 else math.inf
    hours, wall_hours = (time * local.devices / 3600 for time in (seconds, wall_s))
    price = price_usd(cluster, device)
    return RunEstimate(
        tokens=tokens,
        steps=steps,
        days=seconds / SECONDS_PER_DAY,
        device_hours=hours,
        cost_usd=None if price is None else hours * price,
        energy_kwh=wall_hours * device.tdp_w / 1000 * cluster.power_usage_effectiveness,
        mtbf_hours=mtbf_s / 3600,
        expected_failures=wall_s / mtbf_s,
        checkpoint_interval_s=interval_s,
        save_s=save_s,
        goodput=share,
        wall_days=wall_s / SECONDS_PER_DAY,
        wall_cost_usd=None if price is None else wall_hours * price,
        wall_device_hours=wall_hours,
    )
