"""Description of one process, exchanged at the rendezvous, and the comparison of two: what must be equal in all processes of a run."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from ridgeline.configs.schema import Config
from ridgeline.launch.cluster.detect import Cluster
from ridgeline.launch.cluster.devices import expected_devices
from ridgeline.rundir.provenance import SOURCE_TREE as SOURCE
from ridgeline.rundir.provenance import code_hash, makers

SETTINGS = ("JAX_", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Prefixes of variables that must be equal: they change the compiled program, and processes with different programs deadlock."""
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
"""Variables with these prefixes that may differ."""


@dataclass(frozen=True)
class ProcessInfo:
    """One process of a run, as the rendezvous compares it."""

    process: int
    processes: int
    host: str
    pid: int
    versions: dict[str, str]
    settings: dict[str, str]
    config: dict[str, str]
    """Resolved config, flattened: dotted key -> value as text."""
    code: str
    """Hash of the project's sources."""
    source: str
    """Directory of the sources."""
    devices: int | None
    """Devices this process will use; None: unknown until JAX is loaded."""
    error: tuple[int, str] | None = None
    """Error that excludes this process from the run: exit code and message."""

    @property
    def name(self) -> str:
        """Name of the process in messages."""
        return f"process {self.process} on {self.host}"

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(value: object) -> ProcessInfo:
        """Read JSON values. Raises ValueError for other types or fields."""
        return _INFO.validate_json(json.dumps(value), strict=True)


_INFO: TypeAdapter[ProcessInfo] = TypeAdapter(ProcessInfo)


def describe_process(cluster: Cluster, config: Config, env: Mapping[str, str]) -> ProcessInfo:
    """Describe this process."""
    host = cluster.hosts[cluster.process] if cluster.process < len(cluster.hosts) else None
    return ProcessInfo(
        process=cluster.process,
        processes=cluster.processes,
        host=host or socket.gethostname(),
        pid=os.getpid(),
        versions={"python": platform.python_version(), **makers(sys.path)},
        settings={name: value for name, value in env.items() if name.startswith(SETTINGS) and name not in OWN_SETTINGS},
        config=dict(_flat(config.model_dump(mode="json"))),
        code=code_hash(),
        source=str(SOURCE),
        devices=expected_devices(cluster.devices, config.runtime, env),
        error=cluster.devices.error,
    )


def differences(reference: ProcessInfo, other: ProcessInfo) -> list[str]:
    """Return the differences between two processes that must be equal, one message each."""
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


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, str(value)
