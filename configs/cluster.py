"""Cluster files: what the machines are, how they are wired, what they cost, and how Slurm is asked for them.

One file serves the planner (devices, links, storage, failures, price), the job scripts (`slurm`, `software`) and the preflight
(the figures a healthy node reaches). Shipped files lie in configs/clusters; `ridge ... --cluster NAME|FILE`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Mapping as Environment
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ridgeline.configs.compose import CLUSTERS, read_with_bases
from ridgeline.configs.errors import UserError, nearest
from ridgeline.configs.fields import Slot
from ridgeline.configs.overrides import apply_overrides
from ridgeline.configs.problems import validation_error
from ridgeline.configs.schema import Fraction, LocalPath, Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from ridgeline.configs.tree import Source, plain, source_of


class LinkLevel(Section):
    """One level of the interconnect; levels are listed from the innermost out."""

    name: Name
    """What it is called in plans: nvlink, pcie, network, spine, ..."""
    devices: PositiveInt | None = None
    """Devices joined by one domain of this level; null: all of the cluster (the last level)."""
    bandwidth_gb_per_s: PositiveFloat
    """GB/s (1e9) of one device in one direction: an NVLink datasheet prints both directions together, a NIC serves its devices."""
    latency_us: NonNegativeFloat
    """Time of one hop of a small message."""
    kind: Literal["nvlink", "pcie", "network", "memory"] = "network"
    """Which achieved-bandwidth curve of the calibration applies."""
    in_switch_reduction: bool = False
    """The switch adds up an all-reduce itself (NVLink SHARP of an NVSwitch since Hopper)."""


class StorageConfig(Section):
    """The file system that runs and data live on."""

    read_gb_per_s: PositiveFloat = 10.0
    """Sequential read of the whole job, GB/s (1e9)."""
    write_gb_per_s: PositiveFloat = 5.0
    """Sequential write of the whole job, GB/s (1e9)."""


class ContainerConfig(Section):
    """Run inside a container."""

    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """pyxis: `srun --container-image` (enroot). apptainer: `apptainer exec`."""
    image: str
    """Image file or URI."""
    mounts: list[str] = []
    """HOST:CONTAINER[:OPTIONS] binds beside the run directory and the project."""
    arguments: list[str] = []
    """Further arguments of the container runtime."""


class SoftwareConfig(Section):
    """What a job does before its tasks start."""

    modules: list[str] = []
    """Environment modules to load, in order, after `module purge`."""
    container: ContainerConfig | None = None
    """Run inside a container; null: on the host."""
    setup: list[str] = []
    """Shell lines run before srun, such as activating an environment."""
    environment: dict[str, str] = {}
    """Variables exported to every task."""
    python: str | None = None
    """Interpreter of the tasks; null: the one `ridge submit` runs in (in a container: python3)."""


class SlurmConfig(Section):
    """How jobs are asked for. null: not passed, the site's own default holds."""

    partition: str | None = None
    """--partition."""
    account: str | None = None
    """--account."""
    qos: str | None = None
    """--qos."""
    requires: list[Literal["partition", "account", "qos", "time"]] = ["time"]
    """What this site refuses a job without: checked before submitting."""
    reservation: str | None = None
    """--reservation."""
    constraint: str | None = None
    """--constraint."""
    max_time: str | None = None
    """Longest --time of the partition or QOS, as Slurm writes it (D-HH:MM:SS)."""
    max_nodes: PositiveInt | None = None
    """Largest job, in nodes."""
    gpu_request: Literal["gres", "gpus-per-node", "none"] = "gres"
    """How GPUs are asked for: --gres=gpu[:type]:N, --gpus-per-node=[type:]N, or not at all."""
    gpu_type: str | None = None
    """Type in the request, as in gpu:h100:4."""
    tasks_per_node: PositiveInt | None = None
    """Processes per node; null: one per device (on CPU clusters: one)."""
    cpus_per_task: PositiveInt | None = None
    """null: the node's cores over its tasks."""
    cores_per_device: PositiveInt | None = None
    """Cores a job must ask for per device, where the site insists; null: any number."""
    memory: str | None = None
    """--mem, e.g. 0 for all of the node."""
    exclusive: bool | None = None
    """--exclusive; null: when the job has more than one node."""
    requeue: bool = True
    """Requeue after preemption, time limit, lost nodes."""
    max_restarts: NonNegativeInt = 20
    """Requeues after which a job gives up."""
    signal_grace_s: PositiveInt = 300
    """Seconds before the time limit at which the tasks get SIGTERM."""
    preflight_minutes: NonNegativeInt = 10
    """Limit of the preflight (`ridge doctor`) before training; 0: none."""
    single_machine: bool = False
    """All nodes are this machine, as in a test: any directory is shared, so none is refused."""
    options: list[str] = []
    """Further #SBATCH options, verbatim."""
    srun_options: list[str] = []
    """Further options of srun, verbatim."""


class ClusterConfig(Section):
    """A cluster."""

    name: Name
    """Name in reports."""
    description: str = ""
    """One line for people."""
    device: Name
    """Entry of the hardware catalogue (planner/hardware.yaml)."""
    devices_per_node: PositiveInt
    """Accelerators per node; on CPU clusters the devices a node presents."""
    cores_per_node: PositiveInt
    """Physical cores per node."""
    memory_per_node_gib: PositiveFloat
    """Host memory per node."""
    nodes: PositiveInt | None = None
    """Nodes of the cluster; null: unknown."""
    links: list[LinkLevel] = Field(min_length=1)
    """Interconnect, innermost level first; only the last may span all devices."""
    nic_gb_per_s: PositiveFloat | None = None
    """GB/s (1e9) of all network ports of one node in one direction; null: no network."""
    storage: StorageConfig = StorageConfig()
    price_per_device_hour_usd: NonNegativeFloat | None = None
    """Price of one device for an hour; null: the catalogue's typical price."""
    node_mtbf_hours: PositiveFloat | None = None
    """Mean time between failures of one node; null: the published fleet figure the planner names."""
    power_usage_effectiveness: PositiveFloat = 1.2
    """Facility power over IT power."""
    utilisation_cap: Fraction = 0.95
    """Share of device memory a run may plan with."""
    sources: list[str] = []
    """Where the figures come from."""
    run_root: LocalPath | None = None
    """Directory (on a shared file system) for run directories of submitted jobs; null: the config's own."""
    slurm: SlurmConfig = SlurmConfig()
    software: SoftwareConfig = SoftwareConfig()


@dataclass(frozen=True, slots=True)
class ResolvedCluster:
    """A checked cluster and the file it came from."""

    config: ClusterConfig
    path: Path


ROOT = Slot(ClusterConfig)


def cluster_names() -> list[str]:
    """Return the names of the shipped clusters."""
    return sorted(path.stem for path in CLUSTERS.glob("*.yaml"))


def load_cluster(name: str, overrides: Iterable[str] = (), *, environment: Environment[str, str] | None = None) -> ResolvedCluster:
    """Load a cluster by shipped name or file, with overrides such as `slurm.account=me`.

    RIDGE_CLUSTERS may name a directory of the site's own files, looked into before the shipped ones. Raises UserError naming file and line.
    """
    env = os.environ if environment is None else environment
    roots = [Path(), *([Path(env["RIDGE_CLUSTERS"])] if env.get("RIDGE_CLUSTERS") else []), CLUSTERS]
    path = next((found for root in roots if (found := locate_cluster(name, root)) is not None), None)
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
    """Find `name` or `name`.yaml under one directory."""
    return next((path for path in (root / name, root / f"{name}.yaml") if path.is_file()), None)


def _check(config: ClusterConfig, where: Source) -> None:
    """Refuse an interconnect that does not nest, and two levels of one name."""
    names = [level.name for level in config.links]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{where}: links: two levels are called '{twice}'; reports tell them apart by name")
    inner = 1
    for index, level in enumerate(config.links):
        last = index == len(config.links) - 1
        if level.devices is None and not last:
            raise UserError(f"{where}: links.{index}.devices: only the last level may span all devices")
        if level.devices is not None:
            if level.devices % inner or level.devices < inner:
                raise UserError(f"{where}: links.{index}.devices: {level.devices} is no multiple of the level inside ({inner})")
            inner = level.devices
