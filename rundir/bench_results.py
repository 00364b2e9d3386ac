"""Stored benchmark results: one JSON file each, with the config, code, packages and machine they were measured with.

<results>/<task>/<UTC time>-<config name>.json
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, ValidationError

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.configs.schema import Config
from ridgeline.configs.yaml_tree import describe
from ridgeline.rundir.files import Record, first_problem
from ridgeline.rundir.provenance import cores, cpu_model, packages, source_state, user

FORMAT = 1
MAX_RESULT_BYTES = 64 << 20
RESULTS = Path("bench")
"""Where results go by default."""
SETTINGS = ("XLA_", "JAX_", "NCCL_", "CUDA_", "OMP_", "NPROC", "RAYON_", "LIBTPU_")
"""Prefixes of environment variables that may change a measurement."""


@dataclass(frozen=True)
class Device:
    """The devices of a measurement."""

    platform: str
    kind: str
    count: int
    """Over all processes."""
    processes: int


@dataclass(frozen=True)
class Stored:
    """A result read back."""

    path: Path
    task: str
    name: str
    """Of the config."""
    series: dict[str, list[float]]
    """Layer -> seconds, by round."""
    config: dict[str, Any]
    """Resolved, as plain data."""
    provenance: dict[str, Any]
    content: dict[str, Any]
    """The whole file."""

    @property
    def load_of_others(self) -> float:
        """Share of the cores that other programs used during the measurement; 0 when not known."""
        return float(self.provenance.get("neighbours") or 0.0)

    @property
    def code(self) -> str:
        """Commit and digest of uncommitted changes. Two results with equal `code` measured unchanged code."""
        code = self.provenance["code"]
        changes = f" with changes {code['diff_sha256'][:8]}" if code.get("diff_sha256") else ""
        return f"{(code.get('commit') or 'no commit')[:12]}{changes}"


def provenance(config: Config, *, command: Sequence[str], overrides: Sequence[str], device: Device, now: datetime) -> dict[str, Any]:
    """Return the provenance of a measurement.

    Args:
      command: as typed; `overrides`: the config's.
      device: of JAX.
      now: time of the measurement, with its time zone.
    """
    state = source_state()
    diff = hashlib.sha256(state.diff.encode(errors="surrogateescape")).hexdigest() if state.diff else None
    installed = packages()
    return {
        "time": now.isoformat(timespec="seconds"),
        "command": list(command),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "user": user(),
        "code": {**state.facts, "diff_sha256": diff},
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": installed,
        "device": dataclasses.asdict(device),
        "cpu": {"model": cpu_model(), "cores": cores()},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
        "config_sha256": config_sha256(config),
        "overrides": list(overrides),
    }


def config_sha256(config: Config) -> str:
    """Digest of the resolved config."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()


def default_path(results: Path, task: str, name: str, now: datetime) -> Path:
    """Return the file for a new result."""
    return results / task / f"{now:%Y%m%dT%H%M%S}-{name}.json"


def as_stored(path: Path, found: Mapping[str, Any], config: Config, made_with: Mapping[str, Any]) -> Stored:
    """Return a new result as `read` would return it."""
    content = _content(found, config, made_with)
    return Stored(path, content["task"], config.name, content["series"], content["config"], content["provenance"], content)


def _content(found: Mapping[str, Any], config: Config, made_with: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "name": config.name, **found, "config": config.model_dump(mode="json"), "provenance": dict(made_with)}


def write(path: Path, found: Mapping[str, Any], config: Config, made_with: Mapping[str, Any]) -> Path:
    """Write a result to a new file; return the file. Raises UserError when it exists or cannot be written."""
    content = _content(found, config, made_with)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except FileExistsError:
        raise UserError(f"{path} exists already: stored results are never overwritten") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return path


class _Code(Record):
    commit: str | None = None
    diff_sha256: str | None = None


class _Provenance(Record):
    """The parts of the provenance that a comparison needs."""

    time: str
    code: _Code
    device: dict[str, str | int | None]
    cpu: dict[str, str | int | None]
    packages: dict[str, str]
    xla_flags: str
    host: str | None = None
    neighbours: float | None = None


class _Result(Record):
    """A stored result."""

    format: int
    task: str
    name: str
    series: dict[str, list[FiniteFloat]]
    config: dict[str, Any]
    provenance: _Provenance


def read(path: Path) -> Stored:
    """Return a stored result. Raises UserError when the file cannot be read, is not a result, or a value has another type."""
    data = read_limited(path, MAX_RESULT_BYTES)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not a result of ridge bench: not JSON, or incomplete") from None
    needed = [key for key, kind in _Result.model_fields.items() if kind.is_required()]
    if not isinstance(content, dict) or not set(needed) <= content.keys():
        raise UserError(f"{path} is not a result of ridge bench: {', '.join(needed)} are needed")
    if content["format"] != FORMAT:
        raise UserError(f"{path} has format {describe(content['format'])}; this version of ridge reads format {FORMAT}")
    try:
        _Result.model_validate_json(data)
    except ValidationError as error:
        raise UserError(f"{path} is damaged: {first_problem(error)}") from None
    return Stored(path, content["task"], content["name"], content["series"], content["config"], content["provenance"], content)


def read_all(path: Path) -> list[Stored]:
    """Read one result, or all of a directory (and below it), oldest first. Raises UserError when there is none."""
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"{path} not found: give a stored result of ridge bench, or a directory of results")
        return [read(path)]
    found = [read(file) for file in sorted(path.rglob("*.json"))]
    if not found:
        raise UserError(f"{path} contains no result of ridge bench (*.json)")
    return sorted(found, key=lambda stored: stored.provenance["time"])
