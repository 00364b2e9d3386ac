"""Which file system a directory is on, and whether other nodes can see it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "devpts", "proc", "sysfs"})
"""In the memory of one machine."""
DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "aufs", "vfat", "exfat", "ntfs", "squashfs"})
"""On the disks of one machine, unless that machine exports them."""
SCRATCH = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/run"))
"""Each node has its own, whatever they are mounted from."""


@dataclass(frozen=True)
class Mount:
    """A line of /proc/mounts."""

    point: Path
    kind: str


def read_mounts(text: str) -> list[Mount]:
    """Parse /proc/mounts, octal escapes in mount points decoded."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
            mounts.append(Mount(Path(point), fields[2]))
    return mounts


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """Return the mount an absolute path lies on: the longest mount point above it, the last of equals; None without any."""
    above = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(above), key=lambda mount: len(mount.point.parts), default=None)


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest directory above it that exists, links resolved."""
    while not path.exists():
        path = path.parent
    return path.resolve()


def problem(path: Path, nodes: int, mounts: list[Mount]) -> tuple[bool, str] | None:
    """Say why the nodes of a job would not see a directory: (whether that is certain, reason); None when nothing speaks against it."""
    for scratch in SCRATCH:
        if path.is_relative_to(scratch):
            return True, f"{scratch} is another directory on every node"
    mount = mount_of(path, mounts)
    if mount is not None and mount.kind in MEMORY:
        return True, f"{mount.point} ({mount.kind}) is in the memory of this machine"
    if mount is not None and mount.kind in DISK:
        return nodes > 1, f"{mount.point} ({mount.kind}) is a disk of this machine"
    return None


def writable(path: Path) -> bool:
    """Tell whether a directory can be written, or made."""
    parent = existing_parent(path)
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
