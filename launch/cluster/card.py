"""What every process says of itself in the roll call, and what must not differ between the processes of one run."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.schema import Config, RuntimeConfig
from ridgeline.launch.cluster.detect import Cluster
from ridgeline.launch.cluster.devices import VISIBLE, gpus_present
from ridgeline.rundir.provenance import SOURCE_TREE as SOURCE
from ridgeline.rundir.provenance import code_hash, makers

SETTINGS = ("JAX_", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Prefixes of variables that must agree: they change the compiled program, and different programs wait for each other for ever."""
OWN_SETTINGS = frozenset(
    {
        "JAX_PROCESS_ID",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_COORDINATOR_BIND_ADDRESS",
        "JAX_CUDA_VISIBLE_DEVICES",
        "JAX_ROCM_VISIBLE_DEVICES",
        "JAX_COMPILATION_CACHE_DIR",
    }
)
"""Those that may differ."""


@dataclass(frozen=True)
class Card:
    """One process of the roll call."""

    process: int
    processes: int
    host: str
    pid: int
    versions: dict[str, str]
    settings: dict[str, str]
    config: dict[str, str]
    """The resolved config, flat: key -> value as text."""
    code: str
    """Hash of the project's sources."""
    source: str
    """Where they lie."""
    devices: int | None
    """Devices this process will bring; None: not known before JAX is asked."""
    trouble: tuple[int, str] | None = None
    """Why this process cannot take part: exit code and words."""

    @property
    def name(self) -> str:
        """The process for people."""
        return f"process {self.process} on {self.host}"

    def to_json(self) -> dict[str, Any]:
        """Return the card as JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Card:
        """Read a card. Raises TypeError or KeyError when it is none."""
        card = Card(**{name: value[name] for name in Card.__dataclass_fields__})
        if not (isinstance(card.process, int) and isinstance(card.processes, int) and isinstance(card.config, dict)):
            raise TypeError("not a card")
        return card


def make_card(cluster: Cluster, config: Config, env: Mapping[str, str]) -> Card:
    """Describe this process."""
    host = cluster.hosts[cluster.process] if cluster.process < len(cluster.hosts) else None
    return Card(
        process=cluster.process,
        processes=cluster.processes,
        host=host or socket.gethostname(),
        pid=os.getpid(),
        versions={"python": platform.python_version(), **makers(sys.path)},
        settings={name: value for name, value in env.items() if name.startswith(SETTINGS) and name not in OWN_SETTINGS},
        config=dict(_flat(config.model_dump(mode="json"))),
        code=code_hash(),
        source=str(SOURCE),
        devices=expected_devices(cluster, config.runtime, env),
        trouble=cluster.devices.trouble,
    )


def differences(reference: Card, other: Card) -> list[str]:
    """Return what must not differ between two processes and does, each as one phrase for people."""
    found: list[str] = []
    for kind, mine, theirs in (
        ("package", reference.versions, other.versions),
        ("config", reference.config, other.config),
        ("environment", reference.settings, other.settings),
    ):
        names = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
        for name in names[:3]:
            here, there = mine.get(name, "missing"), theirs.get(name, "missing")
            found.append(f"{kind} {name} is {here} on {reference.name} and {there} on {other.name}")
        if len(names) > 3:
            found.append(f"{len(names) - 3} more of kind {kind} differ between {reference.name} and {other.name}")
    if reference.code != other.code:
        found.append(
            f"code differs: {reference.source} on {reference.name} (hash {reference.code[:8]}), "
            f"{other.source} on {other.name} (hash {other.code[:8]})"
        )
    return found


def expected_devices(cluster: Cluster, runtime: RuntimeConfig, env: Mapping[str, str]) -> int | None:
    """Return how many devices this process will bring, None where only JAX can say."""
    platform_name = runtime.platform if runtime.platform != "auto" else (env.get("JAX_PLATFORMS", "").split(",")[0] or "auto")
    if cluster.devices.ids is not None and platform_name in ("auto", "cuda"):
        return len(cluster.devices.ids)
    if platform_name == "cpu" or (platform_name == "auto" and not _accelerators(env)):
        forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", env.get("XLA_FLAGS", ""))
        return runtime.cpu_devices if runtime.cpu_devices > 1 or forced is None else int(forced.group(1))
    return None


def _accelerators(env: Mapping[str, str]) -> bool:
    return env.get(VISIBLE) != "" and (gpus_present() is not None or any(Path("/dev").glob("accel*")) or Path("/dev/kfd").exists())


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, str(value)
