"""Reading files that a user names: regular files only, of limited size; and the directory of what may be found again."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ridgeline.configs.errors import UserError

MAX_DOCUMENT_BYTES = 256 << 20
"""Largest JSON document that is read."""


def cache_directory(env: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of what is kept between runs and may be deleted: $RIDGE_CACHE, or `ridgeline` in the user's cache directory."""
    return Path(env.get("RIDGE_CACHE") or os.path.join(env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ridgeline"))


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. A device, a FIFO (which would block) or a directory is refused.

    Raises:
      UserError: it cannot be opened, or is not a regular file. The message names it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    kind = "a directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "not a regular file"
    os.close(descriptor)
    raise UserError(f"{path} cannot be read: it is {kind}")


def read_limited(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
      UserError: the file cannot be read, is not a regular file, or has more than `max_bytes` bytes. The message names it.
    """
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            content = file.read(max_bytes + 1) if size <= max_bytes else b""
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if max(size, len(content)) > max_bytes:
        raise UserError(f"{path} has {max(size, len(content)):,} bytes; at most {max_bytes:,} are read")
    return content
