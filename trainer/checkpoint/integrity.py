"""The integrity manifest of a directory: size and sha256 of every file, written last and atomically.

Orbax stores no payload checksums: a flipped bit loads as a different number. A directory is *complete* when it holds `integrity.json`, and
*good* when its files are exactly the listed ones, byte for byte. The manifest contains the digest of its own content and
must be in canonical form, so that a change of any of its bytes is detected too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.rundir.files import sync_directory, write_atomically

MANIFEST = "integrity.json"
_FORMAT = 1
CHUNK_BYTES = 512 << 10
"""Small enough to stay in the core's cache between read and hash."""
_NOT_REGULAR = "not a regular file"

Reason = Literal["manifest", "missing", "extra", "size", "sha256", "unreadable", "identity", "link"]


@dataclass(frozen=True)
class FileDigest:
    """The manifest entry of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Damage:
    """One difference between a directory and its manifest."""

    reason: Reason
    file: str
    """Relative path, with forward slashes."""
    detail: str = ""

    def __str__(self) -> str:
        text = {
            "manifest": "is damaged",
            "missing": "is missing",
            "extra": "is not in the manifest",
            "size": "has the wrong size",
            "sha256": "does not match its sha256",
            "unreadable": "cannot be read",
            "identity": "belongs elsewhere",
            "link": "is a symbolic link: nothing is changed where it leads",
        }[self.reason]
        line = f"{self.file} {text}" + (f" ({self.detail})" if self.detail else "")
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)  # a file may have any name


class ManifestDamage(Exception):
    """The manifest is missing, unreadable or altered."""


def list_files(root: Path) -> dict[str, int]:
    """Return relative path -> size in bytes of every file below `root` except the manifest.

    Raises OSError; also for what is no regular file: opening a FIFO would wait for ever.
    """
    sizes: dict[str, int] = {}
    pending = [root]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                name = Path(entry.path).relative_to(root).as_posix()
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
                elif name != MANIFEST:
                    found = entry.stat()
                    if not stat.S_ISREG(found.st_mode):
                        raise OSError(errno.EINVAL, _NOT_REGULAR, entry.path)
                    sizes[name] = found.st_size
    return dict(sorted(sizes.items()))


def sync_directories(root: Path) -> None:
    """Flush the entries of `root`, of all directories below it and of its parent to disk. Raises OSError."""
    for place, _, _ in os.walk(root):
        sync_directory(Path(place))
    sync_directory(root.parent)


def share(sizes: Mapping[str, int], index: int, count: int) -> list[str]:
    """Return the files that worker `index` of `count` reads. The files are partitioned by size, identically in every process."""
    load_bytes = [0] * count
    mine: list[str] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        worker = load_bytes.index(min(load_bytes))
        load_bytes[worker] += sizes[name] + 4096  # the cost of opening a file
        if worker == index:
            mine.append(name)
    return mine


def sha256_file(path: Path, *, sync: bool = False) -> str:
    """Return the sha256 of a regular file in hex; `sync` flushes it to disk first. Raises OSError."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))
        if sync:
            os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def digest_files(root: Path, names: Iterable[str], *, threads: int, sync: bool = False) -> dict[str, str]:
    """Return the sha256 of the named files, `threads` at a time (hashlib releases the interpreter lock). Raises OSError."""
    wanted = list(names)
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(wanted, pool.map(lambda name: sha256_file(root / name, sync=sync), wanted), strict=True))


def write_manifest(root: Path, files: Mapping[str, FileDigest]) -> None:
    """Write the manifest atomically: temporary file, fsync, rename, fsync of the directory. Raises OSError."""
    write_atomically(root / MANIFEST, render_manifest(files))


def read_manifest(root: Path) -> dict[str, FileDigest]:
    """Read the manifest of `root`. Raises ManifestDamage when it is missing, truncated or altered in any byte."""
    if not os.path.lexists(root / MANIFEST):
        raise ManifestDamage("is missing")
    try:
        content = read_limited(root / MANIFEST)
    except UserError as error:
        raise ManifestDamage(str(error)) from None
    return parse_manifest(content)


def parse_manifest(content: bytes) -> dict[str, FileDigest]:
    """Return the entries of a manifest. Raises ManifestDamage when it is truncated or altered in any byte."""
    try:
        files = {name: FileDigest(**entry) for name, entry in json.loads(content)["files"].items()}
        intact = content == render_manifest(files) and all(type(entry.size_bytes) is int for entry in files.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise ManifestDamage("was altered")
    return files


def check_listing(root: Path, manifest: Mapping[str, FileDigest]) -> list[Damage]:
    """Compare names and sizes only (cheap)."""
    try:
        sizes = list_files(root)
    except OSError as error:
        name = os.path.relpath(error.filename, root) if isinstance(error.filename, str) else "."
        return [Damage("unreadable", name, str(error.strerror))]
    damage = [Damage("missing", name) for name in manifest if name not in sizes]
    damage += [Damage("extra", name) for name in sizes if name not in manifest]
    damage += [
        Damage("size", name, f"{sizes[name]} bytes, not {entry.size_bytes}")
        for name, entry in manifest.items()
        if name in sizes and sizes[name] != entry.size_bytes
    ]
    return damage


def check_digests(root: Path, manifest: Mapping[str, FileDigest], names: Iterable[str], *, threads: int) -> list[Damage]:
    """Read the named files in parallel and compare their sha256."""

    def check(name: str) -> Damage | None:
        try:
            return None if sha256_file(root / name) == manifest[name].sha256 else Damage("sha256", name)
        except OSError as error:
            return Damage("unreadable", name, str(error.strerror))

    with ThreadPoolExecutor(threads) as pool:
        return [damage for damage in pool.map(check, names) if damage is not None]


def verify(root: Path, *, threads: int | None = None) -> list[Damage]:
    """Compare a directory with its manifest; an empty list means that it is good."""
    try:
        manifest = read_manifest(root)
    except ManifestDamage as error:
        return [Damage("manifest", MANIFEST, str(error))]
    sizes = {name: entry.size_bytes for name, entry in manifest.items()}
    return check_listing(root, manifest) or check_digests(root, manifest, share(sizes, 0, 1), threads=threads or default_threads())


def default_threads() -> int:
    """Return a number of threads that saturates the disk queue and the cores of this process."""
    return max(4, min(32, len(os.sched_getaffinity(0))))


def render_manifest(files: Mapping[str, FileDigest]) -> bytes:
    """Return the manifest of files in canonical form."""
    content: dict[str, Any] = {"format": _FORMAT, "files": {name: asdict(files[name]) for name in sorted(files)}}
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
