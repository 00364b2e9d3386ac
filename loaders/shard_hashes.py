"""Which shards have the sha256 of their manifest: a shard is hashed at its first use, and again when its size, time or inode has changed.

So a shard that was rewritten at the same size is noticed before a run trains on it, and a start reads no shard twice. The results are kept
in one file per corpus in $RIDGE_CACHE (default: `ridgeline` in the user's cache directory). Without a writable one, every process hashes
the shards itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import cache_directory, read_limited
from ridgeline.loaders.token_reader import StoredFile, verify_shard

THREADS = 8
LARGE_BYTES = 10e9
"""From this size on a message explains what the start waits for."""
_MAX_CACHE_BYTES = 64 << 20
_log = logging.getLogger("ridgeline")

Seen = tuple[str, str, int, int, int]
"""Name and sha256 of a shard; size, modification time (ns) and inode of its file."""


class Files(Protocol):
    """The manifest of a directory of files."""

    @property
    def shards(self) -> Sequence[StoredFile]: ...


def verify(directory: Path, manifest: Files) -> None:
    """Check that every shard is the one of the manifest, hashing those that changed since they were last hashed.

    Of several processes that share the cache, one hashes and the others wait. Raises CorpusError naming the first shard that differs.
    """
    directory = Path(directory)
    cache = _cache_file(directory)
    if not _changed(directory, manifest, _read(cache)):
        return
    with _locked(cache):
        changed = _changed(directory, manifest, _read(cache))
        size = sum(info.bytes for info in changed)
        if size >= LARGE_BYTES:
            _log.info("%s: comparing %d shards (%.0f GB) with the manifest, once", directory, len(changed), size / 1e9)
        seen = [_seen(directory, info) for info in changed]
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda info: verify_shard(directory / info.name, info), changed):
                pass
        _append(cache, [entry for entry, info in zip(seen, changed, strict=True) if entry is not None and entry == _seen(directory, info)])


def remember(directory: Path, shards: Iterable[StoredFile]) -> None:
    """Record shards that this process has just hashed."""
    _append(_cache_file(directory), [entry for info in shards if (entry := _seen(directory, info)) is not None])


def _changed(directory: Path, manifest: Files, known: set[Seen]) -> list[StoredFile]:
    return [info for info in manifest.shards if _seen(directory, info) not in known]


def _seen(directory: Path, info: StoredFile) -> Seen | None:
    try:
        found = (directory / info.name).stat()
    except OSError:
        return None  # verify_shard reports it
    return info.name, info.sha256, found.st_size, found.st_mtime_ns, found.st_ino


def _cache_file(directory: Path) -> Path:
    name = hashlib.sha256(os.path.realpath(directory).encode(errors="surrogateescape")).hexdigest()
    return cache_directory() / "shards" / f"{name[:32]}.jsonl"


def _read(cache: Path) -> set[Seen]:
    """Return the entries of the cache; a file or line that cannot be read counts as absent."""
    known: set[Seen] = set()
    try:
        lines = read_limited(cache, _MAX_CACHE_BYTES).splitlines()
    except UserError:
        return known
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            name, sha256, size, time_ns, inode = json.loads(line)
            known.add((name, sha256, size, time_ns, inode))
    return known


def _append(cache: Path, entries: Iterable[Seen]) -> None:
    lines = "".join("\n" + json.dumps(entry) for entry in entries) + "\n"  # begins a line of its own, also behind a torn one
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        with cache.open("a", encoding="utf-8") as file:
            file.write(lines)


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Hold the lock of the cache; without one where the file cannot be written or locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(cache.with_suffix(".lock").open("a")), fcntl.LOCK_EX)
        yield
