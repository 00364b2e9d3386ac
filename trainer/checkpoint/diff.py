"""What differs between two checkpoints, of one run or of two: arrays, data position, config (`ridge checkpoint diff`).

Arrays are read in parts, so that the memory needed does not grow with the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ridgeline.configs import diff as configs
from ridgeline.configs.errors import UserError
from ridgeline.rundir.directory import RunDir
from ridgeline.trainer.checkpoint import directories as dirs
from ridgeline.trainer.checkpoint.identity import sealed_config
from ridgeline.trainer.checkpoint.param_slices import newest_good, open_array
from ridgeline.trainer.checkpoint.seal import DamagedError, read_metadata

_PART_BYTES = 64 << 20
_FACTS = ("run", "step", "data_position", "mesh", "process_count", "tokenizer", "corpora", "evaluation", "versions")
"""Keys of metadata.json that are compared as they are."""

Change = Literal["equal", "values", "shape", "dtype", "only in A", "only in B"]


@dataclass(frozen=True)
class ArrayDiff:
    """The difference of one array."""

    name: str
    group: Literal["parameters", "optimizer", "other"]
    change: Change
    a: str | None
    """dtype[shape] in A; None: absent."""
    b: str | None
    max_abs: float | None = None
    """Largest |a - b|; None where values are not compared; infinite where only one is a number."""
    max_rel: float | None = None
    """Largest |a - b| / max(|a|, |b|)."""
    changed: int = 0
    """Elements with other bits."""
    changed_bytes: int = 0
    elements: int = 0


@dataclass(frozen=True)
class CheckpointDiff:
    """The difference of two checkpoints."""

    arrays: list[ArrayDiff]
    """All arrays, in the order of A, then those only in B."""
    facts: list[tuple[str, Any, Any]] = field(default_factory=list)
    """(key of metadata.json, in A, in B) where they differ."""
    config: list[tuple[str, Any, Any]] = field(default_factory=list)
    """(config key, in A, in B) where they differ."""

    @property
    def equal(self) -> bool:
        """Whether all arrays are equal, bit by bit."""
        return all(array.change == "equal" for array in self.arrays)


def find(place: Path, step: int | None) -> Path:
    """Return the directory of a verified step.

    Args:
      place: a run directory, or the directory of one of its steps.
      step: None: the newest good one of the run.

    Raises UserError when there is none, or it is damaged.
    """
    name = place.name.removeprefix("step_")
    if step is None and place.name.startswith("step_") and name.isdecimal() and place.is_dir():
        return dirs.step_dir(place.parent, newest_good(place.parent, int(name)))
    checkpoints = RunDir.open(place).checkpoints
    return dirs.step_dir(checkpoints, newest_good(checkpoints, step))


def compare(a: Path, b: Path) -> CheckpointDiff:
    """Compare two step directories (see `find`). Raises UserError when one cannot be read."""
    try:
        in_a, in_b = read_metadata(a), read_metadata(b)
        arrays_a, arrays_b = in_a["arrays"], in_b["arrays"]
        names = [*arrays_a, *(name for name in arrays_b if name not in arrays_a)]
        arrays = [_compare_array(a, b, name, arrays_a.get(name), arrays_b.get(name)) for name in names]
    except (DamagedError, KeyError, ValueError) as error:
        raise UserError(f"cannot compare {a} with {b}: {' '.join(str(error).split('[tensorstore_spec')[0].split())[:300]}") from error
    facts = [(key, in_a.get(key), in_b.get(key)) for key in _FACTS if in_a.get(key) != in_b.get(key)]
    config_a, config_b = sealed_config(in_a), sealed_config(in_b)
    changed = [] if config_a is None or config_b is None else list(configs.diff(config_a, config_b))
    return CheckpointDiff(arrays, facts, changed)


def _compare_array(a: Path, b: Path, name: str, in_a: dict[str, Any] | None, in_b: dict[str, Any] | None) -> ArrayDiff:
    group: Any = "parameters" if name.startswith("params.") else "optimizer" if name.startswith("opt_state") else "other"
    text_a, text_b = (None if leaf is None else f"{leaf['dtype']}[{','.join(map(str, leaf['shape']))}]" for leaf in (in_a, in_b))
    if in_a is None or in_b is None:
        return ArrayDiff(name, group, "only in B" if in_a is None else "only in A", text_a, text_b)
    if in_a["shape"] != in_b["shape"]:
        return ArrayDiff(name, group, "shape", text_a, text_b)
    found = _Difference()
    for x, y in _parts(open_array(a, name), open_array(b, name)):
        found.add(x, y)
    same_dtype = in_a["dtype"] == in_b["dtype"]
    change: Change = "dtype" if not same_dtype else "values" if found.changed else "equal"
    return ArrayDiff(name, group, change, text_a, text_b, found.max_abs, found.max_rel, found.changed, found.changed_bytes, found.elements)


def _parts(a: Any, b: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield both arrays in parts of at most about _PART_BYTES, cut along the first dim."""
    if not a.shape:
        yield np.asarray(a.read().result()).reshape(1), np.asarray(b.read().result()).reshape(1)
        return
    row_bytes = max(1, math.prod(a.shape[1:]) * max(a.dtype.numpy_dtype.itemsize, b.dtype.numpy_dtype.itemsize))
    rows = max(1, _PART_BYTES // row_bytes)
    for start in range(0, a.shape[0], rows):
        stop = min(start + rows, a.shape[0])
        yield np.asarray(a[start:stop].read().result()), np.asarray(b[start:stop].read().result())


@dataclass
class _Difference:
    """The difference of two arrays so far."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    changed: int = 0
    changed_bytes: int = 0
    elements: int = 0

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        """Compare two parts of the same shape."""
        self.elements += x.size
        if not x.size:
            return
        if x.dtype == y.dtype:
            bytes_x, bytes_y = (np.ascontiguousarray(part).reshape(-1).view(np.uint8).reshape(x.size, -1) for part in (x, y))
            other = bytes_x != bytes_y
            if not other.any():
                return
            self.changed_bytes += int(other.sum())
            chosen = other.any(axis=1)
        else:
            chosen = np.ones(x.size, bool)
            self.changed_bytes += max(x.nbytes, y.nbytes)
        self.changed += int(chosen.sum())
        p, q = (part.reshape(-1)[chosen].astype(np.float64) for part in (x, y))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            distance, scale = np.abs(p - q), np.maximum(np.abs(p), np.abs(q))
            relative = np.where(scale > 0, distance / scale, 0.0)
        distance[np.isnan(p) & np.isnan(q)] = 0.0
        self.max_abs = max(self.max_abs, float(np.nan_to_num(distance, nan=np.inf).max()))
        self.max_rel = max(self.max_rel, float(np.nan_to_num(relative, nan=np.inf).max()))
