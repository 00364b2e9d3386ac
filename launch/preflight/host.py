"""Facts about a process's host, read from Linux: versions, cores, memory, limits, file system of the run directory."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from ridgeline.rundir.provenance import code_hash

_PACKAGES = re.compile(r"ridgeline|jax.*|flax|optax|orbax-checkpoint|grain|numpy|nvidia-.*|ml[-_]dtypes", re.IGNORECASE)
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class HostFacts:
    """Facts about its host as one process sees them. Plain values, sent as JSON."""

    node: str
    process: int
    versions: dict[str, str]
    """Versions of Python, the packages used in a step, and the driver."""
    cpus: int
    """Logical processors of the machine."""
    cores: int
    """Physical cores of the machine."""
    affinity: list[int]
    """Logical processors this process may run on."""
    quota_cpus: float | None
    """CPU quota of the control group, in processors; None: no quota."""
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None
    """Of the control group; None: no limit below the machine's memory."""
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    memlock_bytes: int | None
    """Soft limit of locked memory; None: unlimited."""
    clock_offset_s: float = 0.0
    """This wall clock minus process 0's."""
    clock_error_s: float = 0.0
    """Bound of the error of `clock_offset_s`."""
    disk: dict[str, Any] | None = field(default=None)
    """`DiskFacts` of the run directory as a dict; only from a node's first process."""


@dataclass(frozen=True)
class DiskFacts:
    """The file system of the run directory."""

    path: str
    free_bytes: int
    write_bytes_per_s: float | None
    written_bytes: int
    error: str | None = None
    """Error of the write."""


def read_host(node: str, process: int, *, shm: Path = Path("/dev/shm")) -> HostFacts:
    """Read the facts of this host and process."""
    meminfo = _meminfo(Path("/proc/meminfo").read_text())
    shm_total: int | None = None
    shm_free: int | None = None
    limit, quota = control_group(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    total = meminfo["MemTotal"]
    try:
        space = os.statvfs(shm)
        shm_total, shm_free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    except OSError:
        pass  # not mounted: reported by the check
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cpus = os.cpu_count() or 1
    return HostFacts(
        node=node,
        process=process,
        versions=versions(),
        cpus=cpus,
        cores=_physical_cores(Path("/proc/cpuinfo").read_text()) or cpus,
        affinity=sorted(os.sched_getaffinity(0)),
        quota_cpus=quota,
        memory_total_bytes=total,
        memory_available_bytes=meminfo.get("MemAvailable", meminfo["MemFree"]),
        memory_limit_bytes=limit if limit is not None and limit < total else None,
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def memory_bytes() -> int:
    """Return the memory of this machine, or the limit of its control group if lower, bytes."""
    total = _meminfo(Path("/proc/meminfo").read_text())["MemTotal"]
    limit, _ = control_group(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return total if limit is None else min(limit, total)


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes: Python, the code, the packages used in a step, the NVIDIA driver."""
    found = {"python": platform.python_version(), "ridgeline code": code_hash()[:12]}
    for package in distributions():
        # The first on the path is imported; partly removed packages have no name.
        if package.name and _PACKAGES.fullmatch(package.name):
            found.setdefault(package.name.lower().replace("_", "-"), package.version)
    with contextlib.suppress(OSError):
        driver = re.search(r"(\d+\.\d+(?:\.\d+)?)", _DRIVER.read_text())
        if driver:
            found["nvidia driver"] = driver[1]
    return found


def control_group(root: Path, membership: Path) -> tuple[int | None, float | None]:
    """Return (memory limit in bytes, CPU quota in processors) of this process's control group and those above it; None: no limit."""
    memory: list[int] = []
    cpus: list[float] = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None, None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / controllers
        for group in _and_above(base, path.lstrip("/")):
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):
                    memory.append(int((group / name).read_text()))
            with contextlib.suppress(OSError, ValueError):
                quota, period = (group / "cpu.max").read_text().split()
                cpus.append(int(quota) / int(period))
            with contextlib.suppress(OSError, ValueError):
                quota_us = int((group / "cpu.cfs_quota_us").read_text())
                if quota_us > 0:
                    cpus.append(quota_us / int((group / "cpu.cfs_period_us").read_text()))
    return min(memory, default=None), min(cpus, default=None)


def _and_above(base: Path, relative: str) -> list[Path]:
    group = base / relative
    return [group, *[parent for parent in group.parents if parent == base or base in parent.parents]]


def _meminfo(text: str) -> dict[str, int]:
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in text.splitlines()) if rest.strip()}


def _physical_cores(cpuinfo: str) -> int:
    """Count distinct (socket, core) pairs; 0 if the kernel lists none (ARM)."""
    found = set()
    for block in cpuinfo.split("\n\n"):
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in block.splitlines())}
        if "core id" in fields:
            found.add((fields.get("physical id"), fields["core id"]))
    return len(found)


def measure_disk(directory: Path, size_bytes: int, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> DiskFacts:
    """Write up to `size_bytes` sequentially into a new file of `directory`, sync it, and remove it.

    Writing stops after `limit_s`. An error (full, read-only) is returned, not raised.
    """
    path = directory / f".doctor-{uuid.uuid4().hex}"
    block = os.urandom(1 << 20) * 4  # random: some file systems do not store zeros
    written = 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        space = os.statvfs(directory)
        free = space.f_bavail * space.f_frsize
        begun = clock()
        with path.open("wb", buffering=0) as file:
            while written < size_bytes and clock() - begun < limit_s:
                written += file.write(block[: min(len(block), size_bytes - written)])
            os.fsync(file.fileno())
        return DiskFacts(str(directory), free, written / max(clock() - begun, 1e-9), written)
    except OSError as error:
        return DiskFacts(str(directory), _free_bytes(directory), None, written, error.strerror or str(error))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _free_bytes(directory: Path) -> int:
    try:
        space = os.statvfs(directory)
        return space.f_bavail * space.f_frsize
    except OSError:
        return 0
