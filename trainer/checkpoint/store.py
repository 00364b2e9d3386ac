"""Copies of checkpoints at a URL (an object store, or any other file system of fsspec): copying there, verifying, and fetching back.

    URL/ridge-checkpoints.json                 the run that the copies are of
    URL/run/                                   run.json, config.yaml and tokenizer/: what a restore needs beside a checkpoint
    URL/step_00000100/                         the files of the step; integrity.json is written last: a step without it is no checkpoint

A file counts as copied when its size and the sha256 of its bytes, read back, are those of the manifest, so that an interrupted copy
continues with the first file that does not.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.loaders.remote import CHUNK_BYTES, is_url, open_store, retried
from ridgeline.rundir.directory import CONFIG_FILE
from ridgeline.rundir.files import make_directory, sync_directory, write_atomically
from ridgeline.rundir.records import RUN_FILE
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.integrity import FileDigest, ManifestDamage
from ridgeline.trainer.checkpoint.seal import METADATA

_THREADS = 4
"""Files that are copied at a time."""
_RUN = "run"


@dataclass(frozen=True)
class Copied:
    """What a copy of one step transferred."""

    step: int
    files: int
    size_bytes: int
    """Of the files that had to be sent; those that were there already are not counted."""


class Store:
    """The copies at one URL. A path of this machine is a URL too; a run directory stands for its checkpoints.

    Every method raises UserError for a store that cannot be reached.
    """

    def __init__(self, place: str) -> None:
        if not is_url(place):
            path = Path(place).absolute()
            place = f"file://{path / 'checkpoints' if (path / RUN_FILE).is_file() else path}"
        self.url = place.rstrip("/")
        self._system, self._root = open_store(self.url)
        self._root = self._root.rstrip("/")
        protocols = self._system.protocol
        self._has_directories = "file" in ((protocols,) if isinstance(protocols, str) else protocols)

    def steps(self) -> list[int]:
        """Return the steps with an intact manifest, in ascending order."""
        self._system.invalidate_cache()
        if not self._exists(self._root):
            return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in self._ask(lambda: self._system.ls(self._root, detail=False))]
        found = [int(name.removeprefix("step_")) for name in names if name.startswith("step_") and name.removeprefix("step_").isdecimal()]
        return sorted(step for step in found if self.manifest(step) is not None)

    def manifest(self, step: int) -> dict[str, FileDigest] | None:
        """Return the manifest of a step; None when it is absent or damaged: the step is not copied."""
        try:
            content = self._read(f"{self._name(step)}/{integrity.MANIFEST}")
            return None if content is None else integrity.parse_manifest(content)
        except ManifestDamage:
            return None

    def fetch(self, step: int, name: str, entry: FileDigest, target: Path) -> bool:
        """Write a file of a step to `target`; return whether its bytes are those of `entry`. Raises OSError for a disk."""
        make_directory(target.parent)
        with target.open("wb") as stream:
            good = self._digest(f"{self._name(step)}/{name}", entry.size_bytes, stream.write) == entry.sha256
            stream.flush()
            os.fsync(stream.fileno())
        return good

    def copy(self, root: Path, step: int) -> Copied:
        """Copy a complete step; what is there already is verified instead of sent. Raises OSError; UserError for damage."""
        source = dirs.step_dir(root, step)
        try:
            manifest = integrity.read_manifest(source)
        except ManifestDamage as error:
            raise UserError(f"{source / integrity.MANIFEST} {error}") from None
        there = self.manifest(step)
        if there is not None and there != manifest:  # of a start that was superseded
            self.delete(step)

        def send(name: str) -> int:
            return self._ensure(source / name, f"{self._name(step)}/{name}", manifest[name])

        with ThreadPoolExecutor(_THREADS) as pool:
            sent = list(pool.map(send, manifest))
        if there != manifest:
            self._write(f"{self._name(step)}/{integrity.MANIFEST}", integrity.render_manifest(manifest))
        return Copied(step, sum(size > 0 for size in sent), sum(sent))

    def restore(self, root: Path, step: int) -> None:
        """Write a step into a checkpoint directory that does not have it, verified. Raises OSError; UserError for a damaged copy."""
        manifest = self.manifest(step)
        if manifest is None:
            raise UserError(
                f"{self.url} has no complete checkpoint of step {step} (complete: {', '.join(map(str, self.steps())) or 'none'})"
            )
        dirs.create(root)
        path = dirs.step_dir(root, step)
        if os.path.lexists(path):
            raise UserError(f"{path} exists: `ridge checkpoint repair --from {self.url}` repairs it")
        part = path.with_name(f"{path.name}.orbax-checkpoint-tmp-copy")  # removed by a start if this is interrupted

        def receive(name: str) -> str | None:
            target, entry = part / name, manifest[name]
            if target.is_file() and target.stat().st_size == entry.size_bytes and integrity.sha256_file(target) == entry.sha256:
                return None
            return None if self.fetch(step, name, entry, target) else name

        with ThreadPoolExecutor(_THREADS) as pool:
            wrong = [name for name in pool.map(receive, manifest) if name is not None]
        if wrong:
            raise UserError(f"{self.url}: the copy of step {step} is damaged: {wrong[0]} does not match its sha256")
        write_atomically(part / integrity.MANIFEST, integrity.render_manifest(manifest))
        integrity.sync_directories(part)
        os.rename(part, path)
        sync_directory(root)

    def delete(self, step: int) -> None:
        """Delete the copy of a step, its manifest first."""
        place = f"{self._root}/{self._name(step)}"
        if self._exists(f"{place}/{integrity.MANIFEST}"):
            self._ask(lambda: self._system.rm_file(f"{place}/{integrity.MANIFEST}"))
        self._ask(lambda: self._system.rm(place, recursive=True))
        self._system.invalidate_cache()

    def metadata(self, step: int) -> dict[str, Any]:
        """Return metadata.json of a step; {} when it cannot be read."""
        try:
            found = json.loads(self._read(f"{self._name(step)}/{METADATA}") or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def refuse_within(self, run: Path) -> None:
        """Raise UserError when the URL is in a run directory or its checkpoints: the copy would be the checkpoint, or be lost with it."""
        if not self._has_directories:
            return
        root = Path(self._root).resolve()
        if any(root.is_relative_to(own.resolve()) for own in (run, run / "checkpoints")):
            raise UserError(f"{self.url} is in the run directory {run}: choose a place outside of it")

    def claim(self, run: str) -> None:
        """Mark the URL as that of a run. Raises UserError when it is another run's."""
        owner = self.owner()
        if owner is None:
            self._write(dirs.MARKER, json.dumps({"format": 1, "run": run}).encode())
        elif owner != run:
            raise UserError(f"{self.url} has the checkpoints of another run ({owner}, not {run}): choose another URL for each run")

    def owner(self) -> str | None:
        """Return the id of the run that the URL is marked with; None without a mark."""
        try:
            found = json.loads(self._read(dirs.MARKER) or b"{}")
        except ValueError:
            return None
        return found.get("run") if isinstance(found, dict) else None

    def keep_run(self, run: Path) -> None:
        """Copy what a restore into an empty directory needs: run.json, config.yaml and the tokenizer."""
        for path in _run_files(run):
            content = path.read_bytes()
            name = f"{_RUN}/{path.relative_to(run).as_posix()}"
            if self._read(name) != content:
                self._write(name, content)

    def restore_run(self, run: Path) -> None:
        """Write run.json, config.yaml and the tokenizer into a new run directory; run.json last. Raises OSError."""
        place = f"{self._root}/{_RUN}"
        self._system.invalidate_cache()
        if not self._exists(f"{place}/{RUN_FILE}"):
            raise UserError(f"{self.url} has no {_RUN}/{RUN_FILE}: it is no copy of a run")
        names = [str(path).removeprefix(self._system._strip_protocol(place) + "/") for path in self._ask(lambda: self._system.find(place))]
        for name in sorted(names, key=lambda name: name == RUN_FILE):
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise UserError(f"{self.url}: {_RUN}/{name} is not a file of a run")
            make_directory((run / name).parent)
            write_atomically(run / name, self._read(f"{_RUN}/{name}") or b"")

    def _ensure(self, path: Path, name: str, entry: FileDigest) -> int:
        """Send a file unless it is there; return the bytes sent. Raises UserError when what arrives differs twice."""
        if self._matches(name, entry):
            return 0
        for _ in range(2):
            if self._has_directories:
                os.makedirs(os.path.dirname(f"{self._root}/{name}"), exist_ok=True)
            self._ask(lambda: self._system.put_file(os.fspath(path), f"{self._root}/{name}"))
            if self._matches(name, entry):
                return entry.size_bytes or 1
        raise UserError(f"{path} does not match its sha256 at {self.url}: it is damaged here, or the store returns other bytes")

    def _matches(self, name: str, entry: FileDigest) -> bool:
        place = f"{self._root}/{name}"
        self._system.invalidate_cache()
        if not self._exists(place) or int(self._ask(lambda: self._system.info(place))["size"]) != entry.size_bytes:
            return False
        return self._digest(name, entry.size_bytes, len) == entry.sha256

    def _digest(self, name: str, size_bytes: int, each: Callable[[bytes], object]) -> str:
        """Read a file in requests of CHUNK_BYTES, pass each part on, and return the sha256."""
        digest, place = hashlib.sha256(), f"{self._root}/{name}"
        for start in range(0, size_bytes, CHUNK_BYTES):
            request = functools.partial(self._system.cat_file, place, start=start, end=min(start + CHUNK_BYTES, size_bytes))
            data: bytes = self._ask(request)
            digest.update(data)
            each(data)
        return digest.hexdigest()

    def _exists(self, place: str) -> bool:
        return bool(self._ask(lambda: self._system.exists(place)))

    def _read(self, name: str) -> bytes | None:
        place = f"{self._root}/{name}"
        self._system.invalidate_cache()
        return self._ask(lambda: self._system.cat_file(place)) if self._exists(place) else None

    def _write(self, name: str, content: bytes) -> None:
        if self._has_directories:
            os.makedirs(os.path.dirname(f"{self._root}/{name}"), exist_ok=True)
        self._ask(lambda: self._system.pipe_file(f"{self._root}/{name}", content))

    def _ask(self, request: Callable[[], Any]) -> Any:
        return retried(self.url, request)

    @staticmethod
    def _name(step: int) -> str:
        return dirs.step_dir(Path(), step).name


def _run_files(run: Path) -> list[Path]:
    tokenizer = run / "tokenizer"
    files = [path for path in sorted(tokenizer.rglob("*")) if path.is_file()] if tokenizer.is_dir() else []
    return files + [run / name for name in (CONFIG_FILE, RUN_FILE) if (run / name).is_file()]
