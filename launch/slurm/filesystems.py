"""File system of a directory, and whether other nodes share it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "devpts", "proc", "sysfs"})
"""File systems in the memory of one machine."""
DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "aufs", "vfat", "exfat", "ntfs", "squashfs"})
"""File systems on local disks, unless the machine exports them."""
SCRATCH = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/run"))
"""Directories that are separate on every node."""


@dataclass(frozen=True)
class Mount:
    """A line of /proc/mounts."""

    point: Path
    kind: str


def read_mounts() -> list[Mount]:
    """Return the mounts of this machine."""
    return parse_mounts(Path("/proc/mounts").read_text(errors="replace"))


def parse_mounts(text: str) -> list[Mount]:
    """Parse /proc/mounts; octal escapes in mount points are decoded."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
            mounts.append(Mount(Path(point), fields[2]))
    return mounts


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """Return the mount of an absolute path: the longest mount point above it, the last of equal ones; None without any."""
    above = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(above), key=lambda mount: len(mount.point.parts), default=None)


def existing_parent(path: Path) -> Path:
    """Return the path, or its nearest existing parent, with links resolved."""
    while not path.exists():
        path = path.parent
    return path.resolve()


def problem(path: Path, nodes: int, mounts: list[Mount]) -> tuple[bool, str] | None:
    """Return why the nodes of a job may not share a directory, as (certain, reason); None without a reason."""
    for scratch in SCRATCH:
        if path.is_relative_to(scratch):
            return True, f"{scratch} is separate on every node"
    mount = mount_of(path, mounts)
    if mount is not None and mount.kind in MEMORY:
        return True, f"{mount.point} ({mount.kind}) is in memory of this machine"
    if mount is not None and mount.kind in DISK:
        return nodes > 1, f"{mount.point} ({mount.kind}) is a local disk of this machine"
    return None


def writable(path: Path) -> bool:
    """Return whether a directory can be written, or created."""
    parent = existing_parent(path)
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
