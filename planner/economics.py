"""Cost of a whole run from the time of one step: days, device-hours, money, energy, failures and goodput."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.schema import Config
from ridgeline.planner.calculators.failures import DEFAULT_NODE_MTBF_HOURS, fleet_mtbf_s, goodput
from ridgeline.planner.failure_catalog import restart_times
from ridgeline.planner.hardware import Hardware
from ridgeline.planner.local import LocalSizes, parameter_bytes
from ridgeline.planner.optimizer_state import optimizer_state
from ridgeline.planner.policy import save_interval_s

RESTART_S = restart_times().total_s
"""Seconds from a failure to the next useful step (detection, requeue, start-up, compilation), without reading the state and lost steps."""
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class RunEstimate:
    """A whole run. `days`, `device_hours` and `cost_usd` count the steps only; `wall_*` include saves, failures and restarts."""

    tokens: float
    steps: int
    days: float
    device_hours: float
    cost_usd: float | None
    """US dollars; None: neither the cluster file nor the catalog has a price."""
    energy_kwh: float
    """Of the facility: `device_energy_kwh` times the cluster's power_usage_effectiveness."""
    device_energy_kwh: float
    """Of the devices at their power limit, without hosts and network."""
    mtbf_hours: float
    expected_failures: float
    checkpoint_interval_s: float
    save_s: float
    """Seconds that a save blocks training."""
    goodput: float
    wall_days: float
    wall_cost_usd: float | None
    wall_device_hours: float


@dataclass(frozen=True)
class Spot:
    """Machines that are cheaper because their owner may take them back."""

    price_usd: float
    """Of a device-hour."""
    interruptions_per_node_day: float

    def of(self, cluster: ClusterConfig) -> ClusterConfig:
        """Return the cluster at the spot price, where an interruption of a node costs as much as its failure: rates add."""
        failures = 24 / (cluster.node_mtbf_hours or DEFAULT_NODE_MTBF_HOURS)
        rate = failures + self.interruptions_per_node_day
        return cluster.model_copy(update={"price_per_device_hour_usd": self.price_usd, "node_mtbf_hours": 24 / rate})

    def __str__(self) -> str:
        return f"${self.price_usd:,.2f} per device-hour (spot, {self.interruptions_per_node_day:g} interruptions per node and day)"


def price_usd(cluster: ClusterConfig, device: Hardware) -> float | None:
    """Return the price of one device-hour in US dollars: the cluster's, else the catalog's; None when neither has one."""
    return cluster.price_per_device_hour_usd if cluster.price_per_device_hour_usd is not None else device.price_per_hour_usd


def price_text(cluster: ClusterConfig, device: Hardware) -> str:
    """Return the price of one device-hour and where it is from."""
    if cluster.price_per_device_hour_usd is not None:
        return f"${cluster.price_per_device_hour_usd:,.2f} per device-hour (cluster file)"
    if device.price_per_hour_usd is None:
        return "no price: set price_per_device_hour_usd in the cluster file"
    return f"${device.price_per_hour_usd:,.2f} per device-hour (catalog: {device.sources['price']})"


def state_bytes(config: Config) -> float:
    """Return the bytes of a checkpoint: parameters and optimizer state of the whole model."""
    whole = LocalSizes(config, 1, 1, 1)
    return parameter_bytes(whole) + optimizer_state(whole)[0]


def estimate_run(
    config: Config, local: LocalSizes, step_s: float, cluster: ClusterConfig, device: Hardware, tokens: float, nodes: int
) -> RunEstimate:
    """Estimate a run of `tokens` tokens on a cluster.

    Asynchronous saves block training for the copy to host memory, others for the whole write. The save interval is that of
    planner.policy.save_interval_s.
    """
    per_step = config.data.batch_size * config.data.seq_len
    steps = math.ceil(tokens / per_step)
    seconds = steps * step_s
    whole = state_bytes(config)
    write_s = whole / cluster.storage.write_bytes_per_s(nodes)
    per_device = whole / local.fsdp / local.tensor / local.pipeline
    save_s = per_device / device.host_bandwidth_bytes_per_s if config.checkpoint.asynchronous else write_s
    mtbf_s = fleet_mtbf_s([(nodes, cluster.node_mtbf_hours or DEFAULT_NODE_MTBF_HOURS)])
    interval_s = save_interval_s(save_s, mtbf_s, write_s)
    restart_s = RESTART_S + whole / cluster.storage.read_bytes_per_s(nodes)
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
        device_energy_kwh=wall_hours * device.tdp_w / 1000,
        mtbf_hours=mtbf_s / 3600,
        expected_failures=wall_s / mtbf_s,
        checkpoint_interval_s=interval_s,
        save_s=save_s,
        goodput=share,
        wall_days=wall_s / SECONDS_PER_DAY,
        wall_cost_usd=None if price is None else wall_hours * price,
        wall_device_hours=wall_hours,
    )
