"""The campaign of a config on a cluster: step time, checkpoint size and price from the planner, failure rates from the catalog."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.campaign.model import Campaign, Tier
from ridgeline.planner.economics import price_usd, state_bytes
from ridgeline.planner.failure_catalog import FailureClass, classes_of, restart_times, stragglers, waits
from ridgeline.planner.hardware import hardware
from ridgeline.planner.layouts import Layout
from ridgeline.planner.plan import why_nothing_fits
from ridgeline.planner.policy import LEAST_SHARE, configured_interval_s, elastic_sizes, step_limit_s
from ridgeline.planner.search import Candidate, Limits, ranked, search

ALWAYS_S = 1800.0
"""Time without a step after which a person ends a job without a watchdog (trainer.hang_timeout_s: null); assumed."""


STATE_SHARE = 0.5
"""Share of a device's memory with parameters and optimizer state where the planner has no layout; assumed."""


@dataclass(frozen=True)
class Given:
    """What the user states instead of the catalog and the planner, such as measured times of a run; None: not stated. Times in seconds."""

    fleet: str | None = None
    failure_scale: float = 1.0
    step_s: float | None = None
    save_s: float | None = None
    write_s: float | None = None
    restore_s: float | None = None
    detection_s: float | None = None
    requeue_s: float | None = None
    startup_s: float | None = None
    compile_s: float | None = None
    repair_s: float | None = None
    resubmit_s: float | None = None
    queue_wait_s: float = 0.0
    time_limit_s: float | None = None
    preemptions_per_day: float = 0.0
    stragglers: bool = True


@dataclass(frozen=True)
class Inputs:
    """A campaign and where its figures are from."""

    campaign: Campaign
    tier: Tier
    """Of the config: local with checkpoint.local."""
    layout: Candidate | None
    """The planned layout; None: the planner has none for this number of nodes (`without`)."""
    without: str
    """Why there is no planned layout."""
    step_s: float | None
    """Time of a step; None without a layout and a stated time."""
    configured_s: float | None
    """Interval of the config's own saves; infinite: it saves only at the end; None: its saves are by step, whose time is unknown."""
    tokens: float | None
    """Tokens of the whole work; None where the time of a step is unknown."""


def inputs(config: Config, cluster: ClusterConfig, calibration: Calibration, nodes: int, days: float | None, given: Given) -> Inputs:
    """Return the campaign of a config: `days` of steps, or all trainer.steps of it (None).

    Raises UserError for more nodes than the cluster has, and where the number of steps decides and their time is unknown.
    """
    if cluster.nodes is not None and nodes > cluster.nodes:
        raise UserError(f"--nodes {nodes}: cluster '{cluster.name}' has only {cluster.nodes:,} nodes")
    layout, without = _layout(config, cluster, calibration, nodes)
    step_s = given.step_s if given.step_s is not None else None if layout is None else layout.step.step_s
    if days is None and step_s is None:
        raise UserError(f"give --days or --step-time: {without}")
    work_s = config.trainer.steps * (step_s or 0.0) if days is None else days * 86400
    by_steps_only = config.checkpoint.every > 0 and step_s is None
    return Inputs(
        campaign=_campaign(config, cluster, nodes, work_s, layout, step_s, given),
        tier="shared" if config.checkpoint.local.directory is None else "local",
        layout=layout,
        without=without,
        step_s=step_s,
        configured_s=None if by_steps_only else configured_interval_s(config.checkpoint, step_s or math.inf),
        tokens=None if step_s is None else work_s / step_s * config.data.batch_size * config.data.seq_len,
    )


def _layout(config: Config, cluster: ClusterConfig, calibration: Calibration, nodes: int) -> tuple[Candidate | None, str]:
    """Return the layout that `ridge plan` chooses, and why there is none. Other numbers of nodes are not tried: that takes long."""
    tokens = float(config.trainer.steps) * config.data.batch_size * config.data.seq_len
    try:
        scales = search(config, cluster, calibration, [nodes], tokens)
    except UserError as error:
        return None, str(error)
    if found := ranked(scales, "time", Limits()):
        return found[0], ""
    return None, f"{why_nothing_fits(scales)}; `ridge plan` with the same arguments names the nearest layouts"


def _campaign(
    config: Config, cluster: ClusterConfig, nodes: int, work_s: float, layout: Candidate | None, step_s: float | None, given: Given
) -> Campaign:
    device = hardware(cluster.device)
    whole = state_bytes(config)
    sizes = {} if layout is None else layout.layout.sizes
    fewest = max(1, math.ceil(whole / (STATE_SHARE * device.memory_bytes)))
    shards = fewest if layout is None else sizes["fsdp"] * sizes["tensor"] * sizes["pipeline"]
    write_s = _or(given.write_s, whole / cluster.storage.write_bytes_per_s(nodes))
    copy_s = whole / shards / device.host_bandwidth_bytes_per_s
    asynchronous = config.checkpoint.asynchronous
    port_gb = cluster.nic_gb_per_s or cluster.links[-1].bandwidth_gb_per_s * cluster.devices_per_node
    to_neighbor_s = whole / shards * cluster.devices_per_node / (port_gb * 1e9)
    times, wait, slow = restart_times(), waits(), stragglers()
    least_s = config.trainer.hang_timeout_s
    return Campaign(
        work_s=work_s,
        nodes=nodes,
        devices_per_node=cluster.devices_per_node,
        classes=tuple(_scaled(one, given.failure_scale) for one in classes_of(cluster, given.fleet)),
        step_limit_s=ALWAYS_S if least_s is None else step_limit_s(least_s, step_s, config.trainer.deadlines.step_factor),
        save_s=_or(given.save_s, copy_s if asynchronous else write_s),
        write_s={"shared": write_s if asynchronous else 0.0, "local": to_neighbor_s},
        restore_s={"shared": _or(given.restore_s, whole / cluster.storage.read_bytes_per_s(nodes)), "local": to_neighbor_s},
        detection_s=_or(given.detection_s, times.detection_s),
        requeue_s=_or(given.requeue_s, times.requeue_s),
        startup_s=_or(given.startup_s, times.startup_s),
        compile_s=_or(given.compile_s, times.compile_s),
        repair_s=_or(given.repair_s, wait.repair_s),
        outage_s=wait.outage_s,
        resubmit_s=_or(given.resubmit_s, wait.resubmit_s),
        max_restarts=cluster.slurm.max_restarts if cluster.slurm.requeue else 0,
        grace_s=cluster.slurm.signal_grace_s,
        queue_wait_s=given.queue_wait_s,
        time_limit_s=_or(given.time_limit_s, math.inf),
        preemptions_per_s=given.preemptions_per_day / 86400,
        straggler_per_s=slow.per_node_hour * nodes / 3600 if given.stragglers else 0.0,
        straggler_excess=slow.excess,
        straggler_found_s=slow.found_s,
        sizes=() if layout is None else _sizes(config, layout.layout, nodes, cluster.devices_per_node),
        price_per_device_hour_usd=price_usd(cluster, device),
    )


def _sizes(config: Config, layout: Layout, nodes: int, devices_per_node: int) -> tuple[int, ...]:
    """Return the numbers of nodes on which the job could go on, from elastic.min_nodes or LEAST_SHARE of its nodes on."""
    planned = config.model_copy(
        update={
            "mesh": config.mesh.model_copy(
                update={**layout.sizes, "zero_stage": layout.zero_stage, "pipeline_chunks": layout.pipeline_chunks}
            ),
            "trainer": config.trainer.model_copy(update={"accumulation": layout.accumulation}),
        }
    )
    least = min(nodes, config.elastic.min_nodes or math.ceil(LEAST_SHARE * nodes))
    return tuple(elastic_sizes(planned, range(least, nodes + 1), devices_per_node)[0])


def _or(stated: float | None, otherwise: float) -> float:
    return otherwise if stated is None else stated


def _scaled(one: FailureClass, factor: float) -> FailureClass:
    return replace(one, per_component_hour=one.per_component_hour * factor)
