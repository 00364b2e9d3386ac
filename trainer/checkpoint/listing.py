"""What is in a checkpoint directory, and whether it is good (`ridge checkpoint list` and `ridge checkpoint verify`). Changes nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.configs.errors import UserError
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.identity import RUN, misplaced, run_id
from ridgeline.trainer.checkpoint.integrity import Damage
from ridgeline.trainer.checkpoint.seal import FINITE, DamagedError, read_metadata

State = Literal["complete", "incomplete", "being written", "being deleted", "set aside"]
_DIRECTORY = re.compile(r"step_(?P<step>\d{8,18})(?P<rest>\..*)?")


@dataclass(frozen=True)
class Entry:
    """One directory of a step. A run of another process may change it at any time."""

    name: str
    step: int
    state: State
    """complete: sealed. incomplete: written but not sealed; its save is going on, or was interrupted."""
    reason: str
    """Why it was set aside; empty for others."""
    size_bytes: int | None
    """Of its files on disk; None: they cannot be listed."""
    sealed_s: float | None
    """When it was sealed, seconds since 1970; None: it is not."""
    finite: bool | None
    """Whether the state was verified to be finite before it was sealed; None: not sealed, or metadata.json cannot be read."""
    run: str | None
    """Id of the run that wrote it; None: not recorded."""
    resumes: bool = False
    """Whether it is the newest complete one: a restart begins here, unless it is damaged."""


def entries(root: Path) -> list[Entry]:
    """Return every directory of a step, by step and name. Raises UserError for a directory that cannot be read or is not one of ours."""
    dirs.check_ours(root)
    try:
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        complete = dirs.complete_steps(root)
    except OSError as error:
        raise UserError(f"checkpoint directory {root} cannot be read: {error.strerror}") from error
    newest = dirs.step_dir(root, complete[-1]).name if complete else None
    matches = [match for match in map(_DIRECTORY.fullmatch, names) if match]
    found = [_entry(root, match[0], int(match["step"]), match["rest"] or "", match[0] == newest) for match in matches]
    return sorted(found, key=lambda entry: (entry.step, entry.name))


def _entry(root: Path, name: str, step: int, rest: str, resumes: bool) -> Entry:
    path = root / name
    sealed_s, metadata = None, {}
    try:
        sealed_s = (path / integrity.MANIFEST).stat().st_mtime
        metadata = read_metadata(path)
    except (OSError, DamagedError):
        pass
    try:
        size_bytes: int | None = sum(integrity.list_files(path).values())
    except OSError:
        size_bytes = None
    state: State = "incomplete" if sealed_s is None else "complete"
    reason = ""
    if rest.startswith(".bad-"):
        state, reason = "set aside", rest.removeprefix(".bad-")
    elif rest == ".deleting":
        state = "being deleted"
    elif rest:
        state = "being written"
    run = metadata.get(RUN)
    finite = (metadata.get(FINITE) is True) if metadata else None
    return Entry(name, step, state, reason, size_bytes, sealed_s, finite, run if isinstance(run, str) else None, resumes)


def verify(root: Path, step: int) -> list[Damage]:
    """Compare a complete step with its manifest, all files read, and with the run and the step that it should be of; [] when it is good.

    Raises UserError for a step that is missing or incomplete.
    """
    dirs.check_ours(root)
    try:
        dirs.check_complete(root, step)
    except OSError as error:
        raise UserError(f"checkpoint directory {root} cannot be read: {error.strerror}") from error
    path = dirs.step_dir(root, step)
    if damage := integrity.verify(path):
        return damage
    try:
        problem = misplaced(read_metadata(path), step, run_id(root))
    except DamagedError as error:
        return error.damage
    return [] if problem is None else [problem]
