"""The code of a job, as it is at the moment of submitting: later edits of the working tree change nothing for a queued job."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ridgeline.rundir.provenance import PACKAGES, SOURCE_TREE

STATE_FILE = "snapshot.json"
"""Beside the packages: what was copied. trainer/run_dir.py records it, since the copy is no git checkout."""
DIFF_FILE = "git.diff"
_PATHS = ("ridgeline", *PACKAGES)
"""What of a checkout is the code: the package, which holds links, and the folders they lead to."""


@dataclass(frozen=True)
class CodeState:
    """What the code is: version and git commit, None where it was installed without git."""

    version: str
    commit: str | None
    dirty: bool
    source: Path

    def __str__(self) -> str:
        commit = "" if self.commit is None else f", commit {self.commit[:12]}{' with changes' if self.dirty else ''}"
        return f"ridgeline {self.version}{commit}"


def code_state(source: Path = SOURCE_TREE) -> CodeState:
    """Describe the code that is running."""
    try:
        number = version("ridgeline")
    except PackageNotFoundError:
        number = "unknown"
    if not _is_checkout(source):
        return CodeState(number, None, False, source)
    return CodeState(number, _git(source, "rev-parse", "HEAD").strip(), bool(_git(source, "status", "--porcelain", "--", *_PATHS)), source)


def take_snapshot(target: Path, source: Path = SOURCE_TREE) -> dict[str, Any]:
    """Copy the package as it is, links resolved, uncommitted changes and new files included; return what is written beside it.

    target: a directory that does not exist. In a git checkout ignored files are left out.
    """
    state = code_state(source)
    for name, file in sorted(_files(source, state)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target / name)
    described = {"source": str(source), "version": state.version, "commit": state.commit, "dirty": state.dirty, "diff": None}
    if state.dirty and (changes := _git(source, "diff", "HEAD", "--binary", "--", *_PATHS)):
        (target / DIFF_FILE).write_text(changes, encoding="utf-8", errors="surrogateescape")
        described["diff"] = str(target / DIFF_FILE)
    (target / STATE_FILE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    return described


def _files(source: Path, state: CodeState) -> Iterator[tuple[str, Path]]:
    """Yield the files of the package: their place in the copy, and where they are now."""
    if state.commit is not None:
        listed = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_PATHS).split("\0")
        for name in set(listed):
            if name and (source / name).is_file():
                yield name if name.startswith("ridgeline/") else f"ridgeline/{name}", source / name
        return
    for top in (source / "ridgeline", *(source / "ridgeline" / package for package in PACKAGES)):
        for path in top.glob("*.py") if top.name == "ridgeline" else top.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(source)), path


def _is_checkout(source: Path) -> bool:
    """Tell whether the source is the top of a git working tree (not merely somewhere inside one, as a virtual environment may be)."""
    try:
        return Path(_git(source, "rev-parse", "--show-toplevel").strip()).resolve() == source
    except (OSError, subprocess.SubprocessError):
        return False


def _git(source: Path, *arguments: str) -> str:
    command = ["git", "-C", str(source), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="surrogateescape", timeout=60).stdout
