"""The integrity manifest of a directory: size and sha256 of every file, written last and atomically.

Orbax stores no payload checksums: a flipped bit loads as a different number. A directory is *complete* when it holds `integrity.json`, and
*good* when its files are exactly the listed ones, byte for byte. The manifest contains the digest of its own content and
must be in canonical form, so that a change of any of its bytes is detected too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ridgeline.rundir.files import write_atomically

MANIFEST = "integrity.json"
_FORMAT = 1
_CHUNK_BYTES = 512 << 10
"""Small enough to stay in the core's cache between read and hash."""

Reason = Literal["manifest", "missing", "extra", "size", "sha256", "unreadable"]


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
        }[self.reason]
        return f"{self.file} {text}" + (f" ({self.detail})" if self.detail else "")


class ManifestDamage(Exception):
    """The manifest is missing, unreadable or altered."""


def list_files(root: Path) -> dict[str, int]:
    """Return relative path -> size in bytes of every file below `root` except the manifest. Raises OSError."""
    sizes: dict[str, int] = {}
    pending = [root]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
                else:
                    sizes[Path(entry.path).relative_to(root).as_posix()] = entry.stat().st_size
    sizes.pop(MANIFEST, None)
    return dict(sorted(sizes.items()))


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
    """Return the sha256 of a file in hex; `sync` flushes it to disk first. Raises OSError."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
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
    write_atomically(root / MANIFEST, _render(files))


def read_manifest(root: Path) -> dict[str, FileDigest]:
    """Read the manifest of `root`. Raises ManifestDamage when it is missing, truncated or altered in any byte."""
    try:
        content = (root / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise ManifestDamage("is missing") from None
    except OSError as error:
        raise ManifestDamage(f"cannot be read: {error.strerror}") from error
    try:
        files = {name: FileDigest(**entry) for name, entry in json.loads(content)["files"].items()}
        intact = content == _render(files)
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise ManifestDamage("was altered")
    return files


def check_listing(root: Path, manifest: Mapping[str, FileDigest]) -> list[Damage]:
    """Compare names and sizes only (cheap)."""
    try:
        sizes = list_files(root)
    except OSError as error:
        return [Damage("unreadable", error.filename or ".", str(error.strerror))]
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


def _render(files: Mapping[str, FileDigest]) -> bytes:
    content: dict[str, Any] = {"format": _FORMAT, "files": {name: asdict(files[name]) for name in sorted(files)}}
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
