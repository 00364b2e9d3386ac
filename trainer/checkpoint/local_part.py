"""The part of a local checkpoint that one process writes: the raw bytes of its shards, sealed like any checkpoint.

    process_00003/step_00000120/00000.bin ...     shards, one behind the other
                                metadata.json     what a checkpoint stores beside its arrays, and where each shard is
                                integrity.json    size and sha256 of each file

Files are hashed while they are written and while they are read: every byte passes once. They are not flushed to disk: they have to survive
the process, not the node, whose part the neighbor has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ridgeline.sharding.host import HOST, shard_sharding
from ridgeline.trainer.checkpoint import integrity, payload
from ridgeline.trainer.checkpoint.integrity import Damage, FileDigest
from ridgeline.trainer.checkpoint.seal import METADATA, DamagedError

_FILE_BYTES = 64 << 20
"""Shards are packed into files of about this size: files are written, hashed and read in parallel."""
_ALIGN_BYTES = 64
"""Shards begin at multiples of this: XLA uses such a buffer without a copy."""
SHARDS = "shards"
"""Key of metadata.json: [array, first indices, file, offset, bytes] of each shard."""


@dataclass(frozen=True)
class Shard:
    """One shard of an array in host memory."""

    array: str
    start: tuple[int, ...]
    """Index of its first element in the array."""
    data: np.ndarray


def host_shards(state: Any) -> list[Shard]:
    """Copy the shards of this process to the host, each once. The arrays may be donated as soon as this returns."""
    found: dict[tuple[str, tuple[int, ...]], jax.Array] = {}
    with jax.transfer_guard("allow"):
        for name, leaf in payload.raw_leaves(state).items():
            for shard in leaf.addressable_shards:
                found.setdefault((name, _start(shard.index, leaf.ndim)), shard.data)
        for data in found.values():
            data.copy_to_host_async()
        # The next step overwrites what is in host memory in place.
        return [Shard(name, start, np.array(data, copy=data.sharding.memory_kind == HOST or None)) for (name, start), data in found.items()]


def layout(abstract_state: Any) -> str:
    """Return a digest of the shards that this process stores of a state: two states with the same one can replace each other."""
    digest = hashlib.sha256()
    for name, leaf in payload.raw_abstract_leaves(abstract_state).items():
        starts = sorted({_start(index, len(leaf.shape)) for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()})
        digest.update(f"{name} {leaf.dtype} {leaf.shape} {leaf.sharding.shard_shape(leaf.shape)} {starts}\n".encode())
    return digest.hexdigest()


def write(path: Path, shards: Sequence[Shard], metadata: Mapping[str, Any]) -> int:
    """Write and seal the part of a step at `path`, which must not exist; return its bytes. Raises OSError."""
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    groups = list(_groups(shards))
    places = [
        [shard.array, list(shard.start), f"{number:05d}.bin", offset, shard.data.nbytes]
        for number, group in enumerate(groups)
        for shard, offset in zip(group, _offsets(group), strict=True)
    ]
    content = json.dumps({**metadata, SHARDS: places}).encode()
    (part / METADATA).write_bytes(content)
    files = {METADATA: FileDigest(len(content), hashlib.sha256(content).hexdigest())}
    with ThreadPoolExecutor(integrity.default_threads()) as pool:
        entries = pool.map(lambda item: _write_file(part / f"{item[0]:05d}.bin", item[1]), enumerate(groups))
        files |= {f"{number:05d}.bin": entry for number, entry in enumerate(entries)}
    integrity.write_manifest(part, files)
    os.rename(part, path)
    return sum(entry.size_bytes for entry in files.values())


def read(path: Path, abstract_state: Any) -> Any:
    """Return the state whose shards of this process are at `path`. Raises DamagedError; ValueError for shards of another layout."""
    try:
        manifest = integrity.read_manifest(path)
    except integrity.ManifestDamage as error:
        raise DamagedError([Damage("manifest", integrity.MANIFEST, str(error))]) from None
    if damage := integrity.check_listing(path, manifest):
        raise DamagedError(damage)
    with ThreadPoolExecutor(integrity.default_threads()) as pool:
        contents = dict(zip(manifest, pool.map(lambda name: read_verified(path / name, manifest[name]), manifest), strict=True))
    if wrong := [Damage("sha256", name) for name, content in contents.items() if content is None]:
        raise DamagedError(wrong)
    known = {name: content for name, content in contents.items() if content is not None}
    places = {(array, tuple(start)): (file, at, size) for array, start, file, at, size in json.loads(known[METADATA].tobytes())[SHARDS]}

    def load(name: str, leaf: Any) -> jax.Array:
        pieces = []
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            file, offset, size_bytes = places[name, _start(index, len(leaf.shape))]
            data = known[file][offset : offset + size_bytes].view(leaf.dtype)
            pieces.append(jax.device_put(data.reshape(leaf.sharding.shard_shape(leaf.shape)), shard_sharding(leaf.sharding, device)))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)

    with jax.transfer_guard("allow"):
        arrays = {name: load(name, leaf) for name, leaf in payload.raw_abstract_leaves(abstract_state).items()}
        return jax.block_until_ready(payload.from_raw(arrays, abstract_state))


def read_verified(path: Path, entry: FileDigest) -> np.ndarray | None:
    """Return the bytes of a file, hashed while they are read; None when they are not those of the manifest. Raises OSError."""
    content = _aligned(entry.size_bytes)
    view, digest, done = content.data, hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(view[done : done + integrity.CHUNK_BYTES]):
            digest.update(view[done : done + count])
            done += count
    return content if done == entry.size_bytes and digest.hexdigest() == entry.sha256 else None


def _write_file(path: Path, shards: Sequence[Shard]) -> FileDigest:
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for shard in shards:
            data = np.ascontiguousarray(shard.data).reshape(-1).view(np.uint8).data
            for start in range(0, len(data), integrity.CHUNK_BYTES):
                piece = data[start : start + integrity.CHUNK_BYTES]
                digest.update(piece)
                while piece:
                    piece = piece[file.write(piece) :]
            padding = bytes(-len(data) % _ALIGN_BYTES)
            digest.update(padding)
            file.write(padding)
            size += len(data) + len(padding)
    return FileDigest(size, digest.hexdigest())


def _aligned(size_bytes: int) -> np.ndarray:
    buffer = np.empty(size_bytes + _ALIGN_BYTES, np.uint8)
    begin = -buffer.ctypes.data % _ALIGN_BYTES
    return buffer[begin : begin + size_bytes]


def _groups(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    """Divide shards into files."""
    group: list[Shard] = []
    size = 0
    for shard in shards:
        if group and size + shard.data.nbytes > _FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(shard)
        size += shard.data.nbytes
    if group:
        yield group


def _offsets(group: Sequence[Shard]) -> Iterator[int]:
    offset = 0
    for shard in group:
        yield offset
        offset += shard.data.nbytes + -shard.data.nbytes % _ALIGN_BYTES


def _start(index: tuple[slice, ...], ndim: int) -> tuple[int, ...]:
    return tuple(index[dim].start or 0 for dim in range(ndim))
