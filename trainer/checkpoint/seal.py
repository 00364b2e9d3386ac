"""Seal a step with its integrity manifest, and verify it. The hashing is divided over all processes; the result is the same in each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.rundir.files import write_atomically
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.integrity import Damage, FileDigest

METADATA = "metadata.json"
FINITE = "finite"
"""Key of metadata.json: true if the state was verified to be finite before it was sealed. Earlier versions did not write it."""


EVALUATION = "evaluation"
"""Key of metadata.json: evaluation set -> loss in nats per token of this state, of the evaluation at the step of the save, if any."""


class DamagedError(Exception):
    """A step differs from its manifest."""

    def __init__(self, damage: list[Damage]) -> None:
        super().__init__(str(damage[0]))
        self.damage = damage


def seal(path: Path, metadata: Mapping[str, Any], agreement: Agreement) -> int:
    """Write metadata.json, hash every file (each process its share), and write the manifest last. Return the size of the step in bytes.

    Raises OSError (with one process) or PeerError.
    """

    def list_payload() -> dict[str, int]:
        write_atomically(path / METADATA, (json.dumps(metadata, indent=1) + "\n").encode())
        integrity.sync_directories(path)
        return integrity.list_files(path)

    sizes = agreement.first(list_payload)
    mine = integrity.share(sizes, agreement.process, agreement.count)
    shares = agreement.each(lambda: integrity.digest_files(path, mine, threads=integrity.default_threads(), sync=True))
    digests = {name: sha256 for share in shares for name, sha256 in share.items()}  # empty except in process 0
    agreement.first(lambda: integrity.write_manifest(path, {name: FileDigest(sizes[name], digests[name]) for name in sizes}))
    return sum(sizes.values())


def is_finite_verified(path: Path) -> bool:
    """Return whether the state of a sealed step was verified to be finite; False if metadata.json cannot be read."""
    try:
        return read_metadata(path).get(FINITE) is True
    except DamagedError:
        return False


def evaluation_loss(path: Path, name: str | None) -> float | None:
    """Return the loss of an evaluation set (None: the first) that a step was sealed with; None without one."""
    try:
        return loss_of(read_metadata(path).get(EVALUATION), name)
    except DamagedError:
        return None


def loss_of(losses: Any, name: str | None) -> float | None:
    """Return the loss of an evaluation set (None: the first) from the value of EVALUATION; None without one."""
    if not isinstance(losses, dict):
        return None
    loss = losses.get(next(iter(losses), None) if name is None else name)
    return float(loss) if isinstance(loss, int | float) else None


def read_metadata(path: Path) -> dict[str, Any]:
    """Return metadata.json of a step. Raises DamagedError when it cannot be read."""
    try:
        content = json.loads(read_limited(path / METADATA))
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except (UserError, ValueError, RecursionError) as error:
        raise DamagedError([Damage("unreadable", METADATA, str(error))]) from None
    return content


def check_names(path: Path, agreement: Agreement) -> dict[str, FileDigest]:
    """Return the manifest of a step after comparing file names and sizes with it. Raises DamagedError."""

    def check() -> dict[str, Any]:
        try:
            manifest = integrity.read_manifest(path)
        except integrity.ManifestDamage as error:
            return {"damage": [["manifest", integrity.MANIFEST, str(error)]]}
        damage = integrity.check_listing(path, manifest)
        return {"damage": [_fields(d) for d in damage], "files": {n: [f.size_bytes, f.sha256] for n, f in manifest.items()}}

    result = agreement.first(check)
    _raise(result["damage"])
    return {name: FileDigest(*entry) for name, entry in result["files"].items()}


def check_digests(path: Path, manifest: Mapping[str, FileDigest], names: list[str], agreement: Agreement) -> None:
    """Hash the named files, each process its share, and compare. Raises DamagedError."""
    mine = integrity.share({name: manifest[name].size_bytes for name in names}, agreement.process, agreement.count)
    found = agreement.each(lambda: [_fields(d) for d in integrity.check_digests(path, manifest, mine, threads=integrity.default_threads())])
    _raise(agreement.first(lambda: [fields for part in found for fields in part]))


def _raise(found: list[list[Any]]) -> None:
    if found:
        raise DamagedError([Damage(*fields) for fields in found])


def _fields(damage: Damage) -> list[Any]:
    return [damage.reason, damage.file, damage.detail]
