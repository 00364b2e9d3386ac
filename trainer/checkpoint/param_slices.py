"""Read and write the parameters of a checkpoint one layer at a time, so that a conversion never holds a whole model in memory.

A checkpoint's arrays are zarr3 arrays on disk (Orbax's format, documented by TensorStore). Large stacked parameters are stored in chunks of
one layer (`storage_options`), so that a layer can be read on its own. For a parameters-only checkpoint Orbax writes arrays of
one element, which are then recreated with their real shapes and filled slice by slice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from ridgeline.configs.errors import UserError
from ridgeline.models.params import STACKS
from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.identity import misplaced, run_id
from ridgeline.trainer.checkpoint.payload import array_spec
from ridgeline.trainer.checkpoint.seal import DamagedError, read_metadata, seal

PARAMS_ONLY = "params"
"""metadata["kind"] of a checkpoint without optimizer state: a run can start from it, but not resume it."""
_PREFIX = "params."
_KEPT = 3
"""Cached chunks: as many parameters as one Hugging Face tensor can fuse."""


def write_params_only(
    checkpoints: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, np.dtype],
    slices: Iterable[tuple[str, int | None, np.ndarray]],
    metadata: Mapping[str, Any],
) -> int:
    """Write step 0 of a run with only parameters, sealed like any checkpoint; return its size in bytes.

    shapes, dtypes: dotted path -> shape, dtype; slices: (path, layer, values) covering every parameter, layer None for a whole one.
    Single-process. Raises UserError when the directory cannot be written.
    """
    checkpoints = checkpoints.absolute()  # Orbax requires it
    root = checkpoint_dirs.step_dir(checkpoints, 0)
    try:
        checkpoint_dirs.create(checkpoints)
        _lay_out(root, shapes, dtypes)
        arrays = {path: _create(root, path, shape) for path, shape in shapes.items()}
        for path, layer, values in slices:
            (arrays[path] if layer is None else arrays[path][layer]).write(values).result()
        described = {_PREFIX + path: {"shape": list(shape), "dtype": dtypes[path].name} for path, shape in shapes.items()}
        content = {**metadata, "kind": PARAMS_ONLY, "format": 1, "step": 0, "process_count": 1, "arrays": described}
        return seal(root, content, Agreement("convert"))
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot write the checkpoint {root}: {' '.join(str(error).split('[tensorstore_spec')[0].split())}") from error


class ParamReader:
    """Reads the parameters of the newest good checkpoint of a run by path and layer."""

    def __init__(self, checkpoints: Path, step: int | None = None) -> None:
        """Open and verify a checkpoint without changing the directory. Raises UserError when it is missing or damaged."""
        self.step = newest_good(checkpoints, step)
        self._root = checkpoint_dirs.step_dir(checkpoints, self.step)
        self.metadata: dict[str, Any] = read_metadata(self._root)
        stored = {name.removeprefix(_PREFIX): leaf for name, leaf in self.metadata["arrays"].items() if name.startswith(_PREFIX)}
        self.shapes: dict[str, tuple[int, ...]] = {path: tuple(leaf["shape"]) for path, leaf in stored.items()}
        self.dtypes: dict[str, str] = {path: leaf["dtype"] for path, leaf in stored.items()}
        self._arrays: dict[str, ts.TensorStore] = {}
        self._chunks: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()

    def read(self, path: str, layer: int | None) -> np.ndarray:
        """Return a whole parameter (layer None) or one layer of a stacked one. The chunk is cached for the layers in it."""
        if path not in self._arrays:
            self._arrays[path] = open_array(self._root, _PREFIX + path)
        array = self._arrays[path]
        if layer is None:
            return np.asarray(array.read().result())
        layers = (array.chunk_layout.read_chunk.shape or (1,))[0] or 1
        first = layer // layers * layers
        key = (path, first)
        if key not in self._chunks:
            while len(self._chunks) >= _KEPT:
                self._chunks.popitem(last=False)
            self._chunks[key] = np.asarray(array[first : min(first + layers, array.shape[0])].read().result())
        self._chunks.move_to_end(key)
        return self._chunks[key][layer - first]


def open_array(root: Path, name: str) -> ts.TensorStore:
    """Open an array of a step by its name in metadata.json. A PRNG key is its raw uint32 data. Raises ValueError for damage."""
    return ts.open(array_spec(root, name), open=True, context=_context()).result()


def newest_good(checkpoints: Path, wanted: int | None) -> int:
    """Return the newest undamaged step, or the wanted one. Raises UserError with the damage of the others."""
    checkpoint_dirs.check_ours(checkpoints)
    complete = checkpoint_dirs.complete_steps(checkpoints)
    if wanted is not None:
        checkpoint_dirs.check_complete(checkpoints, wanted)
    problems = []
    for step in [wanted] if wanted is not None else complete[::-1]:
        path = checkpoint_dirs.step_dir(checkpoints, step)
        damage = integrity.verify(path)
        try:
            problem = damage[0] if damage else misplaced(read_metadata(path), step, run_id(checkpoints))
        except DamagedError as error:
            problem = error.damage[0]
        if problem is None:
            return step
        problems.append(f"step {step}: {problem}")
    raise UserError(f"no good checkpoint in {checkpoints}" + (f": {'; '.join(problems)}" if problems else ""))


def _context() -> ts.Context:
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}, "data_copy_concurrency": {"limit": 2}})


def _lay_out(root: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype]) -> None:
    context = ocp.Context()
    context.array_options.saving.use_compression = False
    with context:
        ocp.save(root, {_PREFIX + path: np.zeros((1,) * len(shape), dtypes[path]) for path, shape in shapes.items()})


def _create(root: Path, path: str, shape: tuple[int, ...]) -> ts.TensorStore:
    """Recreate the array with Orbax's encoding, `shape`, and chunks of one layer where it is stacked."""
    chunk = [1, *shape[1:]] if path.startswith(STACKS) else list(shape)
    spec = ts.open(array_spec(root, _PREFIX + path), open=True).result().spec().to_json()
    spec.pop("transform", None)
    metadata = spec["metadata"]
    metadata["shape"] = list(shape)
    metadata["chunk_grid"]["configuration"]["chunk_shape"] = chunk
    for codec in metadata["codecs"]:
        if codec["name"] == "sharding_indexed":
            codec["configuration"]["chunk_shape"] = chunk
    return ts.open(spec, create=True, delete_existing=True, context=_context()).result()
