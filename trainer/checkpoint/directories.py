"""Step directories on disk: names, listing, setting aside, deleting, and repairing what a killed run left behind.

step_00000100/                          Orbax payload, metadata.json, integrity.json (complete only with the last)
step_00000100.orbax-checkpoint-tmp/     Orbax is writing, or was killed while writing
step_00000100.deleting/                 retention is deleting, or was killed while deleting
step_00000100.bad-<reason>/             set aside; the newest checkpoint.keep_set_aside are kept
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.configs.errors import UserError
from ridgeline.rundir.files import make_directory, sync_directory, temporary, write_atomically
from ridgeline.trainer.checkpoint.integrity import MANIFEST

MARKER = "ridge-checkpoints.json"
"""Marks a directory of our checkpoints. Nothing is renamed or deleted in a directory without it."""

REPLACED = "replaced"
"""Why a directory with the damaged files of a repaired step is set aside (repair.py)."""
NOT_DAMAGED = ("incomplete", "superseded", REPLACED)
"""Reasons of directories that are no damaged checkpoints."""

_STEP = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,17})")
_ASIDE = re.compile(r"step_([0-9]{8,18})\.bad-(.+)")
_ORBAX_LEFTOVER = re.compile(r"step_[0-9]{8,18}\.orbax-checkpoint-tmp.*")
_DELETING = ".deleting"


def step_dir(root: Path, step: int) -> Path:
    """Name the directory of a step."""
    return root / f"step_{step:08d}"


def create(root: Path) -> None:
    """Create and mark the checkpoint directory. Raises OSError; UserError for a directory with other contents."""
    check_ours(root)
    make_directory(root)
    if not (root / MARKER).exists():
        write_atomically(root / MARKER, b'{"format": 1}\n')


def check_ours(root: Path) -> None:
    """Raise UserError for a directory that cannot be read or has other contents. A missing or empty one is fine."""
    try:
        names = [name for name in os.listdir(root) if name != temporary(root / MARKER).name]  # left by a process killed while writing it
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"checkpoint directory {root} cannot be read: {error.strerror}") from error
    if names and MARKER not in names and not any(_STEP.fullmatch(name) and _has_manifest(root / name) for name in names):
        raise UserError(f"{root} is not a checkpoint directory of ridge (it contains {', '.join(sorted(names)[:3])}, but no complete step)")


def steps(root: Path) -> list[int]:
    """Return all step directories, complete or not, in ascending order. Raises OSError."""
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, _names(root)) if match)


def complete_steps(root: Path) -> list[int]:
    """Return the steps that have a manifest, or cannot be searched for one, in ascending order. Raises OSError."""
    return [step for step in steps(root) if _has_manifest(step_dir(root, step))]


def check_complete(root: Path, step: int) -> None:
    """Raise UserError, with the list of complete steps, for a step that is missing or has no manifest."""
    if step not in (complete := complete_steps(root)):
        raise UserError(f"{root} has no complete checkpoint of step {step} (complete: {', '.join(map(str, complete)) or 'none'})")


def damaged_steps(root: Path) -> list[str]:
    """Return the directory names of steps that were complete and were set aside as damaged. Raises OSError."""
    return sorted(name for _, reason, name in aside(root) if not reason.startswith(NOT_DAMAGED))


def expired(root: Path, keep: int) -> list[str]:
    """Return the directory names of the steps that were set aside before the newest `keep` of them. Raises OSError."""
    # a rename sets the time of the last status change, by the clock of the file server
    aside = sorted((os.lstat(root / name).st_ctime_ns, name) for name in _names(root) if _ASIDE.fullmatch(name))
    return [name for _, name in aside[: max(0, len(aside) - keep)]]


def set_aside(root: Path, step: int, reason: str) -> Path:
    """Rename a step directory so that it is neither restored nor deleted; return its new path. Raises OSError."""
    old = step_dir(root, step)
    new, number = old.with_name(f"{old.name}.bad-{reason}"), 1
    while os.path.lexists(new):
        number += 1
        new = old.with_name(f"{old.name}.bad-{reason}-{number}")
    os.rename(old, new)
    sync_directory(root)
    return new


def delete(root: Path, step: int) -> None:
    """Delete a step. It is renamed first: an interrupted deletion must not look like a checkpoint. Raises OSError."""
    old = step_dir(root, step)
    condemned = old.with_name(old.name + _DELETING)
    if os.path.lexists(condemned):
        remove(condemned)
    os.rename(old, condemned)
    sync_directory(root)
    remove(condemned)


def discard_unfinished(root: Path, step: int) -> None:
    """Delete the files of a failed save of `step`, but not a complete step. Raises OSError."""
    path = step_dir(root, step)
    for name in _names(root):
        if _ORBAX_LEFTOVER.fullmatch(name) and name.startswith(path.name + "."):
            remove(root / name)
    if os.path.lexists(path) and not _has_manifest(path):
        remove(path)


@dataclass(frozen=True)
class Leftover:
    """What a killed run left in a checkpoint directory."""

    name: str
    kind: Literal["deletion", "payload", "marker", "incomplete"]
    """An unfinished deletion, a payload that Orbax did not commit, an unfinished marker, or a step without a manifest."""


def leftovers(root: Path) -> list[Leftover]:
    """Return what a killed run left, incomplete steps last. Raises OSError."""
    found = []
    for name in sorted(_names(root)):
        if name.endswith(_DELETING) and _STEP.fullmatch(name.removesuffix(_DELETING)):
            found.append(Leftover(name, "deletion"))
        elif _ORBAX_LEFTOVER.fullmatch(name):
            found.append(Leftover(name, "payload"))
        elif name == temporary(root / MARKER).name:
            found.append(Leftover(name, "marker"))
    incomplete = sorted(set(steps(root)) - set(complete_steps(root)))
    return found + [Leftover(step_dir(root, step).name, "incomplete") for step in incomplete]


def repair(root: Path) -> list[str]:
    """Repair the directory after a kill: finish deletions, delete payloads that Orbax did not commit, set incomplete steps aside.

    Call it only in the process that writes here. Returns one line per repair, and per one that failed: what is left costs disk space.
    """
    return [line for leftover in leftovers(root) if (line := clear(root, leftover))]


def clear(root: Path, leftover: Leftover) -> str:
    """Remove what a killed run left, or set it aside; return a line about it, empty for a temporary file."""
    name = leftover.name
    try:
        if leftover.kind == "incomplete":
            new = set_aside(root, int(name.removeprefix("step_")), "incomplete")
            return f"{name} is incomplete (it has no {MANIFEST}): set aside as {new.name}"
        remove(root / name)
    except OSError as error:
        if leftover.kind == "incomplete":
            return f"{name} is incomplete, and cannot be set aside: {error.strerror}"
        return f"{name} cannot be removed: {error.strerror}" if leftover.kind != "marker" else ""
    if leftover.kind == "deletion":
        return f"finished the interrupted deletion of {name.removesuffix(_DELETING)}"
    return f"{name.split('.')[0]} is incomplete (its save was interrupted): removed what was written" if leftover.kind == "payload" else ""


def aside(root: Path) -> list[tuple[int, str, str]]:
    """Return (step, reason, directory name) of the steps that were set aside. Raises OSError."""
    matches = [match for match in map(_ASIDE.fullmatch, _names(root)) if match]
    return sorted((int(match[1]), match[2], match[0]) for match in matches)


def remove(path: Path) -> None:
    """Delete a directory, or a file in its place. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _has_manifest(step: Path) -> bool:
    """Return whether a step has a manifest. One that cannot be searched may have: verifying it then finds the damage."""
    try:
        os.lstat(step / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []
