"""The provenance of a measurement or a program: code, packages, user and CPU. The device is described by the caller, who has JAX."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from ridgeline import PACKAGE
from ridgeline.configs.errors import UserError
from ridgeline.configs.foreign import read_object

SOURCE_TREE = PACKAGE.parent
SNAPSHOT = "snapshot.json"
"""File beside the packages of a submitted job that describes the code they were copied from (launch/slurm/snapshot.py)."""
PACKAGES = (
    *("configs", "planner", "rundir", "hlo", "observe", "sharding"),
    *("loaders", "models", "trainer", "explain", "measure", "launch", "cli"),
)
"""The packages of `ridgeline`; each may import only those before it."""
NAME_AND_VERSION = re.compile(r"^(Name|Version): *(.*)$", re.M)
MAKERS = re.compile(
    r"(jax|jaxlib|jax_(cuda|rocm)\w*|nvidia_\w+|flax|optax|orbax_checkpoint|grain|array_record|numpy|ml_dtypes|tokenizers|ridgeline)", re.I
)
"""Packages that affect the compiled program, communication between processes, or the order of the data."""

RECORDED_PREFIXES = (
    *("CUDA", "GLOO", "HIP", "JAX", "LIBTPU", "MKL", "NCCL", "NVIDIA", "OMP", "OPENBLAS", "PMI", "PMIX", "RAYON", "RIDGE"),
    *("ROCM", "ROCR", "SLURM", "TF", "UCX", "XLA"),
)
"""Variables NAME_... that a run may depend on: recorded with a job. An allow-list: a secret may have any name."""
RECORDED_NAMES = (
    *("HOSTNAME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOADEDMODULES", "NPROC", "PATH", "PWD", "PYTHONPATH"),
    *("PYTHONSAFEPATH", "SHELL", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV"),
)
NEVER_RECORDED = ("AUTH", "COOKIE", "CREDENTIAL", "JWT", "KEY", "PASS", "SECRET", "TOKEN")
"""Words in a name that exclude a variable in spite of its prefix (SLURM_JWT, RIDGE_SECRET)."""


@dataclass(frozen=True)
class SourceState:
    """The state of a source tree."""

    facts: dict[str, Any]
    """commit, dirty, untracked; or the description of a snapshot; or commit None and `why`."""
    diff: str | None
    """Uncommitted changes of tracked files, empty when there are none; None without git."""


def source_state(tree: Path = SOURCE_TREE) -> SourceState:
    """Describe a source tree; an installed copy has no commit.

    The snapshot of a submitted job is described by its own file, since it may lie inside another checkout.
    """
    try:
        if (tree / SNAPSHOT).is_file():
            return SourceState({"snapshot": str(tree), **read_object(tree / SNAPSHOT)}, None)
        commit = git(tree, "rev-parse", "HEAD").strip()
        status = git(tree, "status", "--porcelain", "--untracked-files=normal", ".")
        diff = git(tree, "diff", "HEAD", "--binary", ".")
    except (OSError, UserError, subprocess.SubprocessError) as error:
        return SourceState({"commit": None, "why": (getattr(error, "stderr", None) or str(error)).strip()}, None)
    untracked = [line[3:] for line in status.splitlines() if line.startswith("??")]
    return SourceState({"commit": commit, "dirty": bool(status), "untracked": untracked}, diff)


def own_version() -> str:
    """Return the version of the installed Ridgeline; `unknown` where it runs from a checkout that is not installed."""
    try:
        return version("ridgeline")
    except PackageNotFoundError:
        return "unknown"


def packages() -> dict[str, str]:
    """Return the version of every installed package, by name. Of their metadata only the first lines are parsed, a tenth of the time."""
    found: dict[str, str] = {}
    for distribution in distributions():
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        fields = dict(NAME_AND_VERSION.findall(text.partition("\n\n")[0]))
        if "Name" in fields:  # half-removed packages have none
            found[fields["Name"]] = fields.get("Version", "")
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def makers(search: Iterable[str]) -> dict[str, str]:
    """Return name -> version of the installed MAKERS, from the names of their metadata directories (0.5 ms; all packages take 100)."""
    found: dict[str, str] = {}
    for directory in search:
        try:
            entries = os.listdir(directory or ".")
        except OSError:
            continue
        for entry in entries:
            if not entry.endswith(".dist-info"):
                continue
            name, _, version = entry.removesuffix(".dist-info").partition("-")
            if MAKERS.fullmatch(name):
                found.setdefault(name.lower(), version)
    return found


def code_hash(package: Path = PACKAGE, names: Sequence[str] = PACKAGES) -> str:
    """Hash the project's sources, their names included: equal in a checkout, a snapshot and an installation of the same code (15 ms)."""
    digest = hashlib.sha256()
    for name in names:
        files = [path for path in (package / name).rglob("*") if path.suffix in (".py", ".yaml") and path.is_file()]
        for path in sorted(files):
            digest.update(f"{path.relative_to(package)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def files_hash(files: Iterable[Path]) -> str:
    """Hash files outside the project, such as those of plug-ins: paths and contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def user() -> str | None:
    """Return the name of the user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a numeric user id without an entry, as in many containers
        return None


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the CPU, or the architecture when the kernel reports no name."""
    try:
        match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the architecture and instruction sets of the CPU, which compiled code may use."""
    try:
        match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return f"{platform.machine()} {' '.join(sorted(match.group(1).split())) if match else cpu_model()}"


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def git(tree: Path, *arguments: str) -> str:
    """Return what git prints for a working tree. Raises OSError and SubprocessError."""
    command = ["git", "-C", str(tree), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="surrogateescape", timeout=60).stdout
