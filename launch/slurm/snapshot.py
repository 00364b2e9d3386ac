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

from perf.provenance import ROOMS

SOURCE = Path(__file__).resolve().parents[2]
STATE_FILE = "snapshot.json"
"""Beside the packages: what was copied. trainer/run_dir.py records it, since the copy is no git checkout."""
DIFF_FILE = "git.diff"


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


def code_state(source: Path = SOURCE) -> CodeState:
    """Describe the code that is running."""
    try:
        number = version("ridgeline")
    except PackageNotFoundError:
        number = "unknown"
    if not _is_checkout(source):
        return CodeState(number, None, False, source)
    return CodeState(number, _git(source, "rev-parse", "HEAD").strip(), bool(_git(source, "status", "--porcelain", "--", *ROOMS)), source)


def take_snapshot(target: Path, source: Path = SOURCE) -> dict[str, Any]:
    """Copy the packages as they are, uncommitted changes and new files included; return what is written beside them.

    target: a directory that does not exist. In a git checkout ignored files are left out.
    """
    state = code_state(source)
    for name in sorted(_files(source, state)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name)
    described = {"source": str(source), "version": state.version, "commit": state.commit, "dirty": state.dirty, "diff": None}
    if state.dirty and (changes := _git(source, "diff", "HEAD", "--binary", "--", *ROOMS)):
        (target / DIFF_FILE).write_text(changes, encoding="utf-8", errors="surrogateescape")
        described["diff"] = str(target / DIFF_FILE)
    (target / STATE_FILE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    return described


def _files(source: Path, state: CodeState) -> Iterator[str]:
    """Yield the files of the packages, relative to the source."""
    if state.commit is not None:
        listed = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *ROOMS).split("\0")
        yield from (name for name in set(listed) if name and (source / name).is_file())
        return
    for room in ROOMS:
        for path in (source / room).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(source))


def _is_checkout(source: Path) -> bool:
    """Tell whether the source is the top of a git working tree (not merely somewhere inside one, as a virtual environment may be)."""
    try:
        return Path(_git(source, "rev-parse", "--show-toplevel").strip()).resolve() == source
    except (OSError, subprocess.SubprocessError):
        return False


def _git(source: Path, *arguments: str) -> str:
    command = ["git", "-C", str(source), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="surrogateescape", timeout=60).stdout
