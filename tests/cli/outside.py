"""What a command changes outside of what it may write: the files beside a run directory, the home directory, the working directory."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

State = tuple[object, ...]


def state(top: Path, writable: tuple[Path, ...]) -> dict[str, State]:
    """Return type, size, time, inode and target of every entry below a directory but those that may be written. Links are not followed."""
    found: dict[str, State] = {}
    pending = [top]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if path in writable:
                    continue
                now = entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                    found[entry.path] = (now.st_mode, now.st_ino)
                else:
                    target = os.readlink(path) if stat.S_ISLNK(now.st_mode) else ""
                    found[entry.path] = (now.st_mode, now.st_ino, now.st_size, now.st_mtime_ns, target)
    return found


def changes(top: Path, before: dict[str, State], after: dict[str, State]) -> str | None:
    """Return what was made, removed or changed, in one line; None for nothing."""
    found = [f"made {name}" for name in sorted(set(after) - set(before))]
    found += [f"removed {name}" for name in sorted(set(before) - set(after))]
    found += [f"changed {name}" for name in sorted(set(before) & set(after)) if before[name] != after[name]]
    return ", ".join(found[:4]).replace(f"{top}/", "") or None


@contextlib.contextmanager
def own_places(top: Path) -> Iterator[Path]:
    """Use a home, a cache and a working directory below `top`; yield the cache."""
    places = {"HOME": top / "home", "RIDGE_CACHE": top / "cache"}
    here, before = Path.cwd(), {name: os.environ.get(name) for name in places}
    for place in (*places.values(), top / "here"):
        place.mkdir(exist_ok=True)
    os.environ.update({name: str(place) for name, place in places.items()})
    os.chdir(top / "here")
    try:
        yield places["RIDGE_CACHE"]
    finally:
        os.chdir(here)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
