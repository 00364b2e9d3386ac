"""Cluster files: the machines of a cluster, their interconnect and price, and how jobs request them from Slurm.

The planner (devices, links, storage, failures, price), the job scripts (`slurm`, `software`) and the preflight (expected rates of a
healthy node) read the same file. Shipped files are in configs/clusters; `ridge ... --cluster NAME|FILE` selects one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Mapping as Environment
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ridgeline.configs import plugins
from ridgeline.configs.compose import CLUSTERS, read_with_bases
from ridgeline.configs.errors import UserError, nearest
from ridgeline.configs.fields import Slot
from ridgeline.configs.overrides import apply_overrides
from ridgeline.configs.section import Fraction, LocalPath, Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from ridgeline.configs.validation_errors import validation_error
from ridgeline.configs.yaml_tree import Source, plain, source_of


class LinkLevel(Section):
    """One level of the interconnect. Levels are listed innermost first."""

    name: Name
    """Name of the level in plans: nvlink, pcie, network, spine, ..."""
    devices: PositiveInt | None = None
    """Devices in one domain of this level; null: all devices of the cluster (last level only)."""
    bandwidth_gb_per_s: PositiveFloat
    """GB/s (1e9) of one device in one direction. NVLink datasheets print both directions together; a NIC is divided by its devices."""
    latency_us: NonNegativeFloat
    """Latency of one hop in microseconds."""
    kind: Literal["nvlink", "pcie", "network", "memory"] = "network"
    """Kind of link, which selects the bandwidth curve of the calibration."""
    in_switch_reduction: bool = False
    """Whether the switch computes all-reduces (NVLink SHARP of NVSwitch, since Hopper)."""


class StorageConfig(Section):
    """The file system of run directories and data."""

    read_gb_per_s: PositiveFloat = 10.0
    """Sequential read bandwidth of the whole job, GB/s (1e9)."""
    write_gb_per_s: PositiveFloat = 5.0
    """Sequential write bandwidth of the whole job, GB/s (1e9)."""
    nodes: PositiveInt | None = None
    """Number of nodes that share this bandwidth, such as those of a scalable unit: larger jobs have more in proportion. null: a job
    of any size has this bandwidth."""

    def read_bytes_per_s(self, nodes: int) -> float:
        """Return the read bandwidth of a job with this number of nodes."""
        return self.read_gb_per_s * 1e9 * self._units(nodes)

    def write_bytes_per_s(self, nodes: int) -> float:
        """Return the write bandwidth of a job with this number of nodes."""
        return self.write_gb_per_s * 1e9 * self._units(nodes)

    def _units(self, nodes: int) -> float:
        return 1.0 if self.nodes is None else max(1.0, nodes / self.nodes)


class ContainerConfig(Section):
    """A container that tasks run in."""

    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """pyxis: `srun --container-image` (enroot). apptainer: `apptainer exec`."""
    image: str
    """Image file or URI of the container."""
    mounts: list[str] = []
    """Additional bind mounts HOST:CONTAINER[:OPTIONS]; the run directory and the project are always mounted."""
    arguments: list[str] = []
    """Additional arguments of the container runtime."""


class SoftwareConfig(Section):
    """Software environment of a job's tasks."""

    modules: list[str] = []
    """Environment modules to load, in order, after `module purge`."""
    container: ContainerConfig | None = None
    """Container that tasks run in; null: none."""
    setup: list[str] = []
    """Shell lines that run before srun, e.g. to activate a virtual environment."""
    environment: dict[str, str] = {}
    """Variables exported to every task."""
    python: str | None = None
    """Python interpreter of the tasks; null: the one that runs `ridge submit` (in a container: python3)."""


class SlurmConfig(Section):
    """Options of Slurm jobs. A null option is not passed, so that the site's default applies."""

    partition: str | None = None
    """Value of --partition."""
    account: str | None = None
    """Value of --account."""
    qos: str | None = None
    """Value of --qos."""
    requires: list[Literal["partition", "account", "qos", "time"]] = ["time"]
    """Options that this site requires; checked before submission."""
    reservation: str | None = None
    """Value of --reservation."""
    constraint: str | None = None
    """Value of --constraint."""
    max_time: str | None = None
    """Longest --time that the partition or QOS allows, in Slurm's format (D-HH:MM:SS)."""
    max_nodes: PositiveInt | None = None
    """Largest number of nodes of a job."""
    gpu_request: Literal["gres", "gpus-per-node", "none"] = "gres"
    """How a job requests GPUs: --gres=gpu[:type]:N, --gpus-per-node=[type:]N, or none of them."""
    gpu_type: str | None = None
    """GPU type in the request, e.g. h100 for gpu:h100:4."""
    tasks_per_node: PositiveInt | None = None
    """Processes per node; null: one per device (on clusters of CPUs: one)."""
    cpus_per_task: PositiveInt | None = None
    """Cores per task; null: the node's cores divided by its tasks."""
    cores_per_device: PositiveInt | None = None
    """Cores per device that the site requires jobs to request; null: no requirement."""
    memory: str | None = None
    """Value of --mem, e.g. "0" for all memory of the node."""
    exclusive: bool | None = None
    """Whether to pass --exclusive; null: for jobs with more than one node."""
    requeue: bool = True
    """Requeue the job after preemption, the time limit or a lost node."""
    max_restarts: NonNegativeInt = 20
    """Largest number of requeues of a job."""
    signal_grace_s: PositiveInt = 300
    """Seconds before the time limit at which the tasks receive SIGTERM. A save must fit into them."""
    preflight_minutes: NonNegativeInt = 10
    """Time limit of the preflight (`ridge doctor`) before training, in minutes; 0: no preflight."""
    single_machine: bool = False
    """All nodes are the same machine, as in tests, so that every directory counts as shared."""
    options: list[str] = []
    """Additional #SBATCH options, verbatim."""
    srun_options: list[str] = []
    """Additional options of srun, verbatim."""


class ClusterConfig(Section):
    """One cluster."""

    name: Name
    """Name of the cluster in reports."""
    description: str = ""
    """Description in one line."""
    device: Name
    """Name of the device in the hardware catalog (planner/hardware.yaml)."""
    devices_per_node: PositiveInt
    """Accelerators per node; on clusters of CPUs, JAX devices per node."""
    cores_per_node: PositiveInt
    """Physical cores per node."""
    memory_per_node_gib: PositiveFloat
    """Host memory per node in GiB."""
    nodes: PositiveInt | None = None
    """Number of nodes of the cluster; null: unknown."""
    links: list[LinkLevel] = Field(min_length=1)
    """Levels of the interconnect, innermost first. Only the last may connect all devices (devices: null)."""
    nic_gb_per_s: PositiveFloat | None = None
    """GB/s (1e9) of all network ports of one node together, in one direction; null: not limited by the ports."""
    storage: StorageConfig = StorageConfig()
    """The file system of run directories and data."""
    price_per_device_hour_usd: NonNegativeFloat | None = None
    """Price of one device-hour in US dollars; null: the catalog's typical price."""
    node_mtbf_hours: PositiveFloat | None = None
    """Mean time between failures of one node, in hours; null: the published rate in planner/calculators/failures.py."""
    power_usage_effectiveness: PositiveFloat = 1.2
    """Power of the facility over that of its machines (PUE)."""
    utilisation_cap: Fraction = 0.95
    """Fraction of device memory that a plan may use."""
    sources: list[str] = []
    """Sources of the figures in this file."""
    run_root: LocalPath | None = None
    """Directory on a shared file system for the run directories of submitted jobs; null: that of the config."""
    slurm: SlurmConfig = SlurmConfig()
    """Options of Slurm jobs."""
    software: SoftwareConfig = SoftwareConfig()
    """Software environment of the tasks."""


@dataclass(frozen=True, slots=True)
class ResolvedCluster:
    """A valid cluster and its file."""

    config: ClusterConfig
    path: Path


ROOT = Slot(ClusterConfig)


def cluster_names() -> list[str]:
    """Return the names of the shipped clusters and those of plug-ins."""
    return sorted(plugins.all_names("clusters", _shipped()))


def _shipped() -> list[str]:
    return sorted(path.stem for path in CLUSTERS.glob("*.yaml"))


def load_cluster(name: str, overrides: Iterable[str] = (), *, environment: Environment[str, str] | None = None) -> ResolvedCluster:
    """Load a cluster by shipped name or file, with overrides such as `slurm.account=me`.

    Files in the directory $RIDGE_CLUSTERS take precedence over shipped ones, and those over the files of plug-ins. A plug-in is the path
    of a file. Raises UserError with file and line.
    """
    env = os.environ if environment is None else environment
    roots = [Path(), *([Path(env["RIDGE_CLUSTERS"])] if env.get("RIDGE_CLUSTERS") else []), CLUSTERS]
    path = next((found for root in roots if (found := locate_cluster(name, root)) is not None), None)
    if plugins.find("clusters", name, _shipped()) is not None and path is None:
        path = plugins.load("clusters", name, Path)
        if not path.is_file():
            raise UserError(f"cluster '{name}': its package has no file {path}")
    if path is None:
        close = nearest(name, cluster_names())
        hint = f"; did you mean '{close}'?" if close else ""
        raise UserError(f"cluster '{name}' not found{hint} (shipped: {', '.join(cluster_names())}; or a YAML file)")
    tree = apply_overrides(read_with_bases(path), tuple(overrides), ROOT)
    try:
        config = ClusterConfig.model_validate(plain(tree))
    except ValidationError as error:
        raise validation_error(error, tree, ROOT) from None
    _check(config, source_of(tree, ("links",)))
    return ResolvedCluster(config, path)


def locate_cluster(name: str, root: Path) -> Path | None:
    """Return the file `name` or `name`.yaml in a directory; None when there is none."""
    return next((path for path in (root / name, root / f"{name}.yaml") if path.is_file()), None)


def _check(config: ClusterConfig, where: Source) -> None:
    """Raise UserError for levels that do not nest, and for two levels with the same name."""
    names = [level.name for level in config.links]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{where}: links: two levels have the name '{twice}'; names must differ")
    inner = 1
    for index, level in enumerate(config.links):
        last = index == len(config.links) - 1
        if level.devices is None and not last:
            raise UserError(f"{where}: links.{index}.devices: only the last level may be null (all devices)")
        if level.devices is not None:
            if level.devices % inner or level.devices < inner:
                raise UserError(f"{where}: links.{index}.devices: {level.devices} must be a multiple of the {inner} of the previous level")
            inner = level.devices
