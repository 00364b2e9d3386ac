"""Resources of a job: nodes, tasks, cores, devices, time, with the defaults of the cluster file resolved."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.launch.slurm.units import parse_time_s
from ridgeline.planner.hardware import hardware
from ridgeline.planner.layouts import check_plannable
from ridgeline.planner.memory import memory_per_device

CPU = "cpu"
"""Value of `device` in cluster files without accelerators."""


@dataclass(frozen=True)
class JobShape:
    """The size of a job."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    devices_per_node: int
    exclusive: bool
    time_s: int | None
    """None: --time is not passed."""

    @property
    def devices(self) -> int:
        """Devices of the whole job."""
        return self.nodes * self.devices_per_node

    @property
    def tasks(self) -> int:
        """Processes of the whole job."""
        return self.nodes * self.tasks_per_node


def job_shape(cluster: ClusterConfig, nodes: int, time: str | None) -> JobShape:
    """Return the size of a job. Raises UserError for an invalid time."""
    slurm = cluster.slurm
    tasks = slurm.tasks_per_node or (1 if cluster.device == CPU else cluster.devices_per_node)
    return JobShape(
        nodes=nodes,
        tasks_per_node=tasks,
        cpus_per_task=slurm.cpus_per_task or max(1, cluster.cores_per_node // tasks),
        devices_per_node=cluster.devices_per_node,
        exclusive=nodes > 1 if slurm.exclusive is None else slurm.exclusive,
        time_s=None if time is None else parse_time_s(time, "--time"),
    )


def placed(config: Config, cluster: ClusterConfig) -> Config:
    """Return the config with an absolute run directory: its own, else one under the cluster's run_root."""
    directory = config.directory
    if config.run_dir is None and cluster.run_root is not None:
        directory = cluster.run_root / config.name
    return config.model_copy(update={"run_dir": directory.absolute()})


def memory_shortage(config: Config, cluster: ClusterConfig) -> str | None:
    """Return how much memory a device of the config's mesh needs (ridge estimate memory), where that is more than a run may use.

    None: it fits, or cannot be estimated.
    """
    if cluster.device == CPU:
        return None
    try:
        check_plannable(config)
        device = hardware(cluster.device)
        need = memory_per_device(config, config.mesh.sizes, device=device).total_bytes
    except UserError:
        return None
    usable = int(device.memory_bytes * cluster.utilisation_cap)
    if need <= usable:
        return None
    return f"a device needs {need / 1e9:.1f} GB of the {usable / 1e9:.1f} GB that a run may use (ridge estimate memory)"


def describe(cluster: ClusterConfig, shape: JobShape) -> str:
    """Return the size as text, such as `2 nodes of dgx-h100 x 8 processes = 16 devices`."""
    nodes = _count(shape.nodes, "node")
    if not shape.devices_per_node:
        return f"{nodes} of {cluster.name}, {_count(shape.cpus_per_task, 'core')}"
    return f"{nodes} of {cluster.name} x {_count(shape.tasks_per_node, 'process')} = {_count(shape.devices, 'device')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('s') else 's'}"
