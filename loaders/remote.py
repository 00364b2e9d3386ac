"""Inputs from object stores, hubs and web servers: s3://, gs://, hf://datasets/, https:// and every other protocol that fsspec has.

Files are listed first, and each is copied into a local cache when a worker first reads it, so tokenizing starts with the first file. A copy
that was interrupted continues where it stopped; a file that changed at its source is copied again. The same files give the same corpus as
local ones, byte for byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ridgeline.configs import files
from ridgeline.configs.errors import UserError

CHUNK_BYTES = 8 << 20
"""Bytes per request."""
ATTEMPTS = 5
WAIT_S = 0.5
"""A failed request is repeated this often, after 0.5, 1, 2 and 4 s."""
VERSION_KEYS = (
    "etag",
    "generation",
    "md5hash",
    "md5",
    "contentmd5",
    "sha256",
    "xet_hash",
    "blob_id",
    "last_modified",
    "lastmodified",
    "updated",
    "mtime",
)
"""Properties that change when a file does, the most reliable first."""
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
"""Protocol -> package that fsspec needs for it (extra `remote`)."""


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL as it was when it was listed."""

    url: str
    name: str
    """Path below the listed directory, or the file's name."""
    size_bytes: int
    version: str
    """Changes when the file does; empty: the server does not tell."""

    @property
    def path(self) -> Path:
        """Place of its copy in the cache."""
        digest = hashlib.sha256(f"{self.url}\0{self.size_bytes}\0{self.version}".encode()).hexdigest()
        return cache_directory() / digest[:24] / PurePosixPath(self.name).name


def is_url(text: str) -> bool:
    """Return whether an input is a URL and not a path."""
    protocol, found, _ = text.partition("://")
    return bool(found) and protocol.replace("+", "").isalnum()


def cache_directory() -> Path:
    """Return the directory of copies: `inputs` in $RIDGE_CACHE (default: `ridgeline` in the user's cache directory)."""
    return files.cache_directory() / "inputs"


def list_remote(url: str) -> tuple[bool, list[RemoteFile]]:
    """List a URL: (whether it is a directory, its files in order of name, hidden ones left out). Raises UserError."""
    system, root = open_store(url)
    protocol = url.partition("://")[0]
    try:
        if protocol not in ("http", "https") and system.isdir(root):
            found = system.find(root, detail=True)
            base = system._strip_protocol(root).rstrip("/") + "/"
            names = {path: path.removeprefix(base) for path in found}
            visible = sorted(path for path, name in names.items() if not any(part.startswith(".") for part in name.split("/")))
            return True, [_described(system.unstrip_protocol(path), names[path], found[path]) for path in visible]
        return False, [_described(url, PurePosixPath(url.partition("?")[0]).name, system.info(root))]
    except FileNotFoundError:
        raise UserError(f"input not found: {url}") from None
    except Exception as error:  # each store has errors of its own
        raise UserError(f"cannot list {url}: {_reason(error)}") from error


def fetch(file: RemoteFile) -> Path:
    """Return the copy of a file, made now if there is none. Of several processes one copies and the others wait. Raises UserError."""
    path = file.path
    try:
        if path.exists() and path.stat().st_size == file.size_bytes:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(path.name + ".lock")):
            if not path.exists() or path.stat().st_size != file.size_bytes:
                partial = path.with_name(path.name + ".part")
                _copy(file, partial)
                partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write the cache {error.filename or path} (set RIDGE_CACHE): {error.strerror or error}") from error
    return path


def _copy(file: RemoteFile, partial: Path) -> None:
    """Copy a file in chunks behind what `partial` has already."""
    system, root = open_store(file.url)
    if file.version and _described(file.url, file.name, retried(file.url, lambda: system.info(root))).version != file.version:
        raise UserError(f"{file.url} changed while it was read; run the command again")
    with partial.open("ab") as stream:
        done = stream.tell()
        if done > file.size_bytes:
            done = stream.truncate(0)
        while done < file.size_bytes:
            stop = min(done + CHUNK_BYTES, file.size_bytes)
            data = retried(file.url, lambda start=done, stop=stop: _range(system, root, file, start, stop))
            stream.write(data)
            stream.flush()
            done = stop


def _range(system: Any, root: str, file: RemoteFile, start: int, stop: int) -> bytes:
    """Read bytes [start, stop). A server without ranges sends the whole file."""
    data: bytes = system.cat_file(root, start=start, end=stop)
    if len(data) == file.size_bytes > stop - start:
        return data[start:stop]
    if len(data) != stop - start:
        raise EOFError(f"{len(data)} bytes received of {stop - start}")
    return data


def retried(url: str, request: Any) -> Any:
    """Return what a request returns, repeated after errors of the network. Raises UserError."""
    for attempt in range(ATTEMPTS):
        try:
            return request()
        except FileNotFoundError:
            raise UserError(f"{url} no longer exists") from None
        except Exception as error:  # each store has errors of its own
            if attempt == ATTEMPTS - 1:
                raise UserError(f"cannot read {url}: {_reason(error)}; run the same command again to continue") from error
            time.sleep(WAIT_S * 2**attempt)
    raise AssertionError


def open_store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path there. Credentials are those of the store's own tools. Raises UserError."""
    protocol = url.partition("://")[0]
    try:
        import fsspec

        system, root = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        if protocol in PACKAGES:
            raise UserError(f"{url}: the package {PACKAGES[protocol]} is missing; install ridgeline[remote]") from error
        raise UserError(f"{url}: {_reason(error)}") from error
    except Exception as error:  # such as missing credentials
        raise UserError(f"cannot open {url}: {_reason(error)}") from error
    system.invalidate_cache()
    return system, root


def open_remote(file: RemoteFile) -> Any:
    """Open a file for reading at any position, without a copy. Raises UserError."""
    system, root = open_store(file.url)
    return retried(file.url, lambda: system.open(root, "rb"))


def _described(url: str, name: str, info: dict[str, Any]) -> RemoteFile:
    size = info.get("size")
    if size is None:
        raise UserError(f"{url}: the server does not send the size of the file")
    known = {key.lower().replace("-", ""): value for key, value in info.items()}
    version = next((f"{key}={known[key]}" for key in VERSION_KEYS if known.get(key) is not None), "")
    return RemoteFile(url, name, int(size), version)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as stream:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
