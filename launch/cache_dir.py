"""The directory of compiled programs. Whoever can write to it decides what the devices run, so nobody else may."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from ridgeline.configs.errors import UserError


def check_cache_dir(path: Path, *, user: int | None = None) -> None:
    """Make the compilation cache directory (mode 700) when it is missing; raise UserError when others can write to it or replace it.

    A parent that everybody can write to is accepted with the sticky bit (/tmp): then only the owner can replace what lies in it. Members of
    a group that can write to a parent can replace the directory, but then another user owns it, and the next start refuses it.
    """
    me = os.geteuid() if user is None else user
    key = f"runtime.compilation_cache={path}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.resolve(strict=True)
        own = found.stat()
    except OSError as error:
        raise UserError(f"{key}: {error.strerror or error}") from None
    if not stat.S_ISDIR(own.st_mode):
        raise UserError(f"{key}: not a directory")
    danger = "compiled programs are loaded from it and run"
    if own.st_uid not in (me, 0):
        raise UserError(f"{key} belongs to {_name(own.st_uid)}, and {danger}: choose a directory of your own")
    if own.st_mode & 0o022:
        raise UserError(f"{key} can be written by others (mode {stat.S_IMODE(own.st_mode):o}), and {danger}: chmod go-w {path}")
    for parent in found.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UserError(
                f"{key}: everybody can replace it, since {parent} has mode {stat.S_IMODE(mode):o}, and {danger}: chmod o-w {parent}"
            )


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
