"""Check a job before submission: errors refuse it, warnings are printed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.configs.format import format_bytes
from ridgeline.configs.mesh import with_mesh
from ridgeline.configs.rules import check_devices
from ridgeline.configs.schema import Config
from ridgeline.launch.slurm import filesystems
from ridgeline.launch.slurm.elastic import elastic_job
from ridgeline.launch.slurm.filesystems import Mount
from ridgeline.launch.slurm.shape import CPU, JobShape, memory_shortage
from ridgeline.launch.slurm.units import format_time, parse_memory_bytes, parse_time_s
from ridgeline.planner.economics import state_bytes
from ridgeline.planner.host_memory import advice_text, offloads, refusal, settings_text

PLAIN_PATH = re.compile(r"[\w/.+@=-]+")
"""Paths that need no quoting in bash, Slurm's filename patterns, and lists of container mounts."""


SHOWN = 4
"""Numbers of nodes without a layout that are shown with their reason."""


@dataclass(frozen=True)
class Finding:
    """An error or a warning."""

    error: bool
    message: str

    def __str__(self) -> str:
        return f"{'error' if self.error else 'warning'}: {self.message}"


def lint(config: Config, cluster: ClusterConfig, shape: JobShape, mounts: list[Mount]) -> list[Finding]:
    """Check a training job against its cluster file. `config.run_dir` is absolute."""
    return [
        *_nodes(cluster, shape),
        *_cores(cluster, shape),
        *_memory(config, cluster, shape),
        *_required(cluster, shape),
        *_time(cluster, shape),
        *_grace(config, cluster, shape),
        *_devices(config, cluster, shape),
        *_elastic(config, cluster, shape),
        *_run_directory(config.directory, cluster, shape, mounts),
    ]


def lint_job(cluster: ClusterConfig, shape: JobShape, directory: Path, mounts: list[Mount]) -> list[Finding]:
    """Check a job without a config."""
    checks = (_nodes(cluster, shape), _cores(cluster, shape), _required(cluster, shape), _time(cluster, shape))
    return [*(finding for check in checks for finding in check), *_run_directory(directory, cluster, shape, mounts)]


def _nodes(cluster: ClusterConfig, shape: JobShape) -> Iterator[Finding]:
    limits = {"slurm.max_nodes": cluster.slurm.max_nodes, "nodes": cluster.nodes}
    for key, limit in limits.items():
        if limit is not None and shape.nodes > limit:
            yield Finding(True, f"--nodes {shape.nodes}: {cluster.name} allows at most {limit} ({key})")
    if shape.nodes > 1 and not shape.exclusive:
        yield Finding(False, "slurm.exclusive is false: another job on one node slows down all nodes of this one")


def _cores(cluster: ClusterConfig, shape: JobShape) -> Iterator[Finding]:
    cores = shape.tasks_per_node * shape.cpus_per_task
    if cores > cluster.cores_per_node:
        fits = cluster.cores_per_node // shape.tasks_per_node
        yield Finding(
            True,
            f"{shape.tasks_per_node} tasks x {shape.cpus_per_task} cores exceed the {cluster.cores_per_node} cores of a node"
            + (f"; slurm.cpus_per_task={fits} fits" if fits else f"; at most slurm.tasks_per_node={cluster.cores_per_node}"),
        )
    wanted = cluster.slurm.cores_per_device
    if not shape.devices_per_node or cores > cluster.cores_per_node:
        return
    if wanted is not None and cores != wanted * shape.devices_per_node:
        yield Finding(
            True,
            f"{cluster.name} requires {wanted} cores per device: {wanted * shape.devices_per_node} for {shape.devices_per_node}, "
            f"not {cores} ({shape.tasks_per_node} tasks x {shape.cpus_per_task})",
        )
    elif wanted is None and cluster.device != CPU and 2 * cores <= cluster.cores_per_node and shape.exclusive:
        yield Finding(False, f"the job requests {cores} of the {cluster.cores_per_node} cores of a node: the rest stays idle")


def _memory(config: Config, cluster: ClusterConfig, shape: JobShape) -> Iterator[Finding]:
    """Requested memory must not exceed the node's, and must hold the host copy of an asynchronous save."""
    if cluster.slurm.memory is None:
        requested = None
    else:
        try:
            requested = parse_memory_bytes(cluster.slurm.memory, "slurm.memory")
        except UserError as error:
            yield Finding(True, str(error))
            return
    node = cluster.memory_per_node_gib * 2**30
    if requested is not None and requested > node:
        yield Finding(True, f"slurm.memory={cluster.slurm.memory} ({format_bytes(requested)}) exceeds the {format_bytes(node)} of a node")
        return
    state = state_bytes(config) / shape.nodes
    if config.checkpoint.asynchronous and state > (requested or node):
        yield Finding(
            False,
            f"an asynchronous save copies {format_bytes(state)} of parameters and optimizer state to each host, which has "
            f"{format_bytes(requested or node)}: use more nodes or checkpoint.asynchronous=false",
        )
    sizes = _sizes(config, shape) if offloads(config) and cluster.device != CPU else None
    if sizes is not None and (reason := refusal(config, sizes, shape.devices_per_node, requested or node)):
        yield Finding(True, f"{settings_text(config)} {reason}: {advice_text(config)}")


def _sizes(config: Config, shape: JobShape) -> dict[str, int] | None:
    """Return the mesh sizes on the devices of the job; None if they do not fit, which `_devices` reports."""
    try:
        return check_devices(config, shape.devices)
    except UserError:
        return None


def _required(cluster: ClusterConfig, shape: JobShape) -> Iterator[Finding]:
    slurm = cluster.slurm
    given = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "time": shape.time_s}
    for name in slurm.requires:
        if given[name] is None:
            where = "" if name == "time" else f", or set slurm.{name} in your own cluster file"
            yield Finding(True, f"{cluster.name} requires --{name}: add it to the command line{where}")


def _time(cluster: ClusterConfig, shape: JobShape) -> Iterator[Finding]:
    slurm = cluster.slurm
    if slurm.max_time is not None:
        try:
            limit = parse_time_s(slurm.max_time, "slurm.max_time")
        except UserError as error:
            yield Finding(True, str(error))
            return
        if limit is not None and shape.time_s is not None and shape.time_s > limit:
            yield Finding(
                True, f"--time {format_time(shape.time_s)} exceeds the limit of {cluster.name}, {format_time(limit)} (slurm.max_time)"
            )


def _grace(config: Config, cluster: ClusterConfig, shape: JobShape) -> Iterator[Finding]:
    """The time between SIGTERM and the limit must suffice for a save and leave time to train."""
    grace_s = cluster.slurm.signal_grace_s
    if shape.time_s is not None and grace_s >= shape.time_s:
        yield Finding(
            True,
            f"--time {format_time(shape.time_s)} must exceed the {grace_s} s between SIGTERM and the limit (slurm.signal_grace_s)",
        )
    elif shape.time_s is not None and 4 * grace_s > shape.time_s:
        share = f"{grace_s} s of {format_time(shape.time_s)}"
        yield Finding(False, f"slurm.signal_grace_s reserves {share} for the last save: lower it or increase --time")
    write_bytes_per_s = cluster.storage.write_bytes_per_s(shape.nodes)
    save_s = state_bytes(config) / write_bytes_per_s
    if 2 * save_s > grace_s:
        yield Finding(
            False,
            f"a save of this model takes about {save_s:.0f} s at {write_bytes_per_s / 1e9:g} GB/s: slurm.signal_grace_s={grace_s} "
            f"is too short (recommended: twice the save)",
        )


def _devices(config: Config, cluster: ClusterConfig, shape: JobShape) -> Iterator[Finding]:
    """Mesh and batch must fit the devices; on CPUs also the virtual devices per process."""
    if shape.devices_per_node % shape.tasks_per_node:
        yield Finding(True, f"{shape.devices_per_node} devices per node are not divisible by {shape.tasks_per_node} tasks")
    if cluster.device == CPU:
        made = shape.tasks_per_node * config.runtime.cpu_devices
        if made != shape.devices_per_node:
            yield Finding(
                True,
                f"{shape.tasks_per_node} tasks per node x runtime.cpu_devices={config.runtime.cpu_devices} = {made} devices, but "
                f"{cluster.name} has devices_per_node={shape.devices_per_node}: add --cluster-set devices_per_node={made}",
            )
            return
    try:
        check_devices(config, shape.devices)
    except UserError as error:
        yield from (Finding(True, line) for line in str(error).splitlines())
        return
    if short := memory_shortage(with_mesh(config, shape.devices), cluster):
        yield Finding(False, f"{short}: `ridge plan` with this cluster and --nodes {shape.nodes} names layouts that fit")


def _elastic(config: Config, cluster: ClusterConfig, shape: JobShape) -> Iterator[Finding]:
    """Every number of nodes that an elastic job may get is checked; those without a layout are named."""
    try:
        job = elastic_job(config, cluster, shape)
    except UserError as error:
        if config.elastic.min_nodes is not None and config.elastic.min_nodes > shape.nodes:
            yield Finding(True, str(error))
        return  # a mesh that does not fit the whole job is reported by `_devices`
    if job is None:
        return
    limits = {"slurm.max_nodes": cluster.slurm.max_nodes, "nodes": cluster.nodes}
    for key, limit in limits.items():
        if limit is not None and shape.nodes <= limit < job.most:
            yield Finding(True, f"elastic.spares={job.spares}: --nodes {shape.nodes} and spares exceed {limit} nodes ({key})")
    if not cluster.slurm.requeue:
        yield Finding(False, "slurm.requeue is false: a job that loses nodes ends instead of going on with fewer")
    shown = list(job.without.items())[:SHOWN]
    for nodes, why in shown:
        yield Finding(False, f"elastic: {nodes} nodes are not used: {why}")
    if len(job.without) > SHOWN:
        yield Finding(False, f"elastic: {len(job.without) - SHOWN} more numbers of nodes have no layout; the job uses {_list(job.layouts)}")


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _run_directory(path: Path, cluster: ClusterConfig, shape: JobShape, mounts: list[Mount]) -> Iterator[Finding]:
    if not PLAIN_PATH.fullmatch(str(path)):
        yield Finding(True, f"run directory '{path}': use only letters, digits and /._+@=-, which are safe in bash, Slurm and containers")
    if not filesystems.writable(path):
        yield Finding(True, f"run directory {path}: {filesystems.existing_parent(path)} is not writable")
    if not cluster.slurm.single_machine:
        found = filesystems.problem(filesystems.existing_parent(path), shape.nodes, mounts)
        if found is not None:
            certain, reason = found
            yield Finding(certain, f"run directory {path}: {reason}, not shared by the nodes; set run_dir, or run_root in the cluster file")
