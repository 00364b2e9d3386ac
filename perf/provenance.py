"""What a figure was measured with: the code, its packages, the processor. No JAX here; the device's own facts are passed in."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

SOURCE_TREE = Path(__file__).resolve().parent.parent
SNAPSHOT = "snapshot.json"
"""Beside the packages of a submitted job: which code they were copied from (launch/slurm/snapshot.py)."""


@dataclass(frozen=True)
class SourceState:
    """The state of a source tree."""

    facts: dict[str, Any]
    """commit, dirty, untracked; or the snapshot's own description; or commit None and why."""
    diff: str | None
    """Uncommitted changes of tracked files, empty when there are none; None where git does not say."""


def source_state(tree: Path = SOURCE_TREE) -> SourceState:
    """Describe a source tree; an installed copy has no commit.

    The snapshot of a submitted job says itself what it is: it may lie inside some other checkout.
    """
    if (tree / SNAPSHOT).is_file():
        return SourceState({"snapshot": str(tree), **json.loads((tree / SNAPSHOT).read_bytes())}, None)
    try:
        commit = _git(tree, "rev-parse", "HEAD").strip()
        status = _git(tree, "status", "--porcelain", "--untracked-files=normal", ".")
        diff = _git(tree, "diff", "HEAD", "--binary", ".")
    except (OSError, subprocess.SubprocessError) as error:
        return SourceState({"commit": None, "why": (getattr(error, "stderr", None) or str(error)).strip()}, None)
    untracked = [line[3:] for line in status.splitlines() if line.startswith("??")]
    return SourceState({"commit": commit, "dirty": bool(status), "untracked": untracked}, diff)


def packages() -> dict[str, str]:
    """Return the version of every installed package, by name."""
    found = {d.name: d.version for d in distributions() if d.name}  # half-removed packages have no name
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def user() -> str | None:
    """Return the name of the user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a numeric user id without an entry, as in many containers
        return None


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the host's processor, or the architecture where the kernel gives no name."""
    try:
        match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", str(tree), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="surrogateescape", timeout=60).stdout
