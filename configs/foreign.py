"""Reading small files of a directory that others made, such as a Hugging Face model: bounded in size and nesting, no link leaves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited

MAX_BYTES = 96 << 20
"""Largest file; the largest tokenizer.json of a published model has about 35 MB."""
MAX_CONTAINERS = 4_000_000
"""Most objects and lists in a JSON file: they take many times more memory than their text."""
_MAX_SHOWN = 80


def read_inside(directory: Path, path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file of a directory. Raises UserError for what `read_limited` refuses, and a link out of the directory."""
    check_inside(directory, path)
    return read_limited(path, max_bytes)


def check_inside(directory: Path, path: Path) -> None:
    """Raise UserError for a link whose target is outside the directory, unless it is a blob of the same entry of the Hugging Face cache."""
    try:
        root, target = directory.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise UserError(f"{path} cannot be read: {error}") from None
    cached = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    if not target.is_relative_to(root) and not cached:
        raise UserError(f"{path} is a link to {target}, outside its directory; copy the file into {directory}")


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return a JSON file as a dict. Raises UserError when it cannot be read, is too large, too deeply nested, or not a JSON object."""
    return parse_object(read_limited(path, max_bytes), path)


def parse_object(content: bytes, path: Path) -> dict[str, Any]:
    """Return JSON text as a dict. Raises UserError naming the file when it is too deeply nested, has too many parts or is not an object."""
    if content.count(b"[") + content.count(b"{") > MAX_CONTAINERS:
        raise UserError(f"{path} has more than {MAX_CONTAINERS:,} JSON objects and lists")
    try:
        value = json.loads(content)
    except RecursionError:
        raise UserError(f"{path} cannot be read: too deeply nested") from None
    except ValueError as error:
        raise UserError(f"{path} cannot be read: it is not JSON ({shortened(error)})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


def shortened(value: object) -> str:
    """Return the text of a value from a file, on one line and short enough for a message."""
    text = " ".join(str(value)[: 4 * _MAX_SHOWN].split())
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " ..."
