"""Snapshot of the code for a job: later edits of the working tree do not affect a pending or requeued job.

The copy is JOB/code/ridgeline/..., with the links of a checkout resolved, and is imported with JOB/code on PYTHONPATH. It is taken from a
git checkout (what git tracks, and new files that it does not ignore) or from an installed package (all its files).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.rundir.provenance import PACKAGES, SNAPSHOT, SOURCE_TREE, git, own_version

DIFF_FILE = "git.diff"
_PATHS = ("ridgeline", *PACKAGES)
"""Code in a checkout: the package, which holds links, and the linked folders."""


@dataclass(frozen=True)
class CodeState:
    """Version and git commit of the code; commit None: installed without git."""

    version: str
    commit: str | None
    dirty: bool
    source: Path

    def __str__(self) -> str:
        commit = "" if self.commit is None else f", commit {self.commit[:12]}{' with changes' if self.dirty else ''}"
        return f"ridgeline {self.version}{commit}"


def code_state(source: Path = SOURCE_TREE) -> CodeState:
    """Return the state of the running code."""
    commit = _commit(source)
    dirty = commit is not None and bool(git(source, "status", "--porcelain", "--", *_PATHS))
    return CodeState(own_version(), commit, dirty, source)


def take_snapshot(target: Path, source: Path = SOURCE_TREE) -> dict[str, Any]:
    """Copy the package into `target`, a new directory, and describe it there in snapshot.json; return that description.

    Uncommitted changes and new files are included, and the changes are also stored as git.diff.
    """
    state = code_state(source)
    for name, file in sorted(_files(source, state)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target / name)
    described = {"source": str(source), "version": state.version, "commit": state.commit, "dirty": state.dirty, "diff": None}
    if state.dirty and (changes := git(source, "diff", "HEAD", "--binary", "--", *_PATHS)):
        (target / DIFF_FILE).write_text(changes, encoding="utf-8", errors="surrogateescape")
        described["diff"] = str(target / DIFF_FILE)
    (target / SNAPSHOT).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    return described


def _files(source: Path, state: CodeState) -> Iterator[tuple[str, Path]]:
    """Yield the files of the package: path in the copy, and current path."""
    if state.commit is not None:
        listed = git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_PATHS).split("\0")
        for name in set(listed):
            if name and (source / name).is_file():
                yield name if name.startswith("ridgeline/") else f"ridgeline/{name}", source / name
        return
    for top in (source / "ridgeline", *(source / "ridgeline" / package for package in PACKAGES)):
        for path in top.glob("*") if top.name == "ridgeline" else top.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(source)), path


def _commit(source: Path) -> str | None:
    """Return the commit of a checkout; None unless `source` is the top of a git working tree with a commit.

    A virtual environment inside some working tree is not its top.
    """
    try:
        top, commit = git(source, "rev-parse", "--show-toplevel", "HEAD").splitlines()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return commit if Path(top).resolve() == source.resolve() else None
