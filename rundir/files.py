"""Reading and writing whole files of a run directory: JSON with checked types, atomic replacement."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited

_MAX_SHOWN = 40


class Record(BaseModel):
    """Base of the typed JSON records: values are checked and never converted; unknown keys are kept."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


RecordT = TypeVar("RecordT", bound=Record)


def read_record(path: Path, kind: type[RecordT]) -> RecordT | None:
    """Return a JSON file as a typed record; None when the file does not exist.

    Raises:
      UserError: the file cannot be read, is too large, is not JSON, or a key is missing or has another type. The message is one line.
    """
    if not path.exists():
        return None
    try:
        return kind.model_validate_json(read_limited(path))
    except ValidationError as error:
        raise UserError(f"{path} is damaged: {first_problem(error)}") from None


def write_record(path: Path, record: Record) -> None:
    """Write a record as indented JSON, replacing the file atomically. Raises OSError."""
    write_atomically(path, (record.model_dump_json(indent=1, exclude_unset=True) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file. After a crash it holds either the old or the new content, complete. Raises OSError."""
    written = temporary(path)
    if written.is_symlink():  # it would be written where it leads
        written.unlink()
    with open(written, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.replace(written, path)
    except FileNotFoundError:  # over NFS also when the reply of a successful rename was lost
        if written.exists() or not path.exists() or path.read_bytes() != content:
            raise
    sync_directory(path.parent)


def discard(path: Path) -> None:
    """Remove a directory with its content, or a file or link in its place; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def refuse_link(path: Path) -> None:
    """Raise UserError for a symbolic link, before something is written or removed below it: it may lead anywhere."""
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link to {os.readlink(path)}: nothing is written through it; remove it")


def refuse_links(path: Path, below: Path) -> None:
    """Raise UserError if a path or a directory on the way to it from `below`, which may be one, is a symbolic link."""
    for place in [*reversed(path.relative_to(below).parents), path.relative_to(below)]:
        if place.parts:
            refuse_link(below / place)


def has_entry_ending(directory: Path, end: str) -> bool:
    """Whether the name of an entry of a directory, which may be a link to nothing, ends so."""
    return any(name.endswith(end) for name in os.listdir(directory))


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, on disk when this returns. Raises OSError."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_directory(place.parent)


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to disk: without it, a rename or a new file may be lost in a power failure. Raises OSError."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def temporary(path: Path) -> Path:
    """Return the file that `write_atomically` writes first. A killed process may leave it; the next write replaces it."""
    return path.with_name(path.name + ".tmp")


def first_problem(error: ValidationError) -> str:
    """Return `key: what is wrong` of the first problem."""
    found: dict[str, Any] = dict(error.errors(include_url=False)[0])
    key = ".".join(str(part) for part in found["loc"])
    if found["type"] == "missing":
        return f"{key} is missing"
    message = str(found["msg"]).replace("Input should be", "must be")
    if found["type"] == "json_invalid":
        return message
    given = repr(found["input"])
    shown = given if len(given) <= _MAX_SHOWN else given[:_MAX_SHOWN] + "..."
    return f"{key + ': ' if key else ''}{message}, got {shown}"
