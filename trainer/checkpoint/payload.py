"""The arrays of a checkpoint in Orbax's format, written by Orbax and read by TensorStore.

A flat dict of named arrays, so that the names on disk do not depend on Python classes: `params.layers.query` names a leaf by the keys on
its path. Typed PRNG keys are stored as their raw uint32 key data; everything else keeps its dtype, and shapes and dtypes are compared.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding
from orbax.checkpoint import v1 as ocp

from ridgeline.configs.errors import UserError
from ridgeline.models.params import STACKS
from ridgeline.sharding.host import HOST, shard_sharding

_TIMEOUT_S = 1200
"""Orbax's timeout for the processes of one save to wait for each other."""
_DATA_FILE_BYTES = 128 << 20
"""Approximate size of payload files. Verification runs in parallel over files."""
_LEAST_SLICE_BYTES = 4 << 20
"""Least bytes of an array's shard that its replicas write in parts. Orbax compiles a program for every part: of small arrays that takes
longer than writing them."""
_STACKED = tuple(f"params.{stack}" for stack in STACKS)
"""Parameters with a leading dim of layers (models/params.py)."""
_LAYER_CHUNKS_ABOVE_BYTES = 32 << 20
_READ_AHEAD_BYTES = 1 << 30
"""Bytes that are being read, and not yet on the devices."""
STATE = "state"
"""The directory in which Orbax stores a pytree."""
_MAX_NAMED = 5


def _is_not_reported_here(record: logging.LogRecord) -> bool:
    """Orbax logs the traceback of each of its threads that fails. The error also reaches `Checkpointer`, which reports it in one line."""
    return not (record.exc_info and "orbax" in record.pathname)


logging.getLogger("absl").addFilter(_is_not_reported_here)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by the dotted path of their keys."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the state have the same name"
    return named


def describe(tree: Any) -> dict[str, dict[str, Any]]:
    """Return name -> {"shape", "dtype"} of arrays or ShapeDtypeStructs, as metadata.json stores it."""
    return {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in named_leaves(tree).items()}


def check_matches(stored: Mapping[str, Mapping[str, Any]], wanted: Any, *, partial: bool, where: str) -> None:
    """Raise UserError, with the first differences, unless the stored arrays are those of `wanted`. `partial`: more may be stored."""
    expected = describe(wanted)
    lines = [f"{name} is missing in the checkpoint" for name in expected if name not in stored]
    if not partial:
        lines += [f"{name} is only in the checkpoint" for name in stored if name not in expected]
    for name, leaf in expected.items():
        if name in stored and dict(stored[name]) != leaf:
            lines.append(f"{name} is {_text(stored[name])} in the checkpoint, {_text(leaf)} in the config")
    if lines:
        more = f"; and {len(lines) - _MAX_NAMED} more" if len(lines) > _MAX_NAMED else ""
        raise UserError(f"{where} does not fit this config: " + "; ".join(lines[:_MAX_NAMED]) + more)


def save_async(path: Path, state: Any) -> ocp.AsyncResponse[None]:
    """Copy the state to the host and start writing it to `path`; the arrays may be donated as soon as this returns.

    (On the CPU platform there is no copy: the buffers stay referenced until they are written, and a donation makes XLA allocate.)
    """
    with _context():
        return ocp.save_async(path, {name: _kept(leaf) for name, leaf in raw_leaves(state).items()})


def _kept(leaf: jax.Array) -> jax.Array:
    """Return an array that the next step does not overwrite while it is written: what is in host memory, the step updates in place."""
    if leaf.sharding.memory_kind != HOST:
        return leaf
    pieces = [jax.device_put(np.array(shard.data), shard_sharding(leaf.sharding, shard.device)) for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)


def waits_after_failure() -> bool:
    """Return whether threads of Orbax are left of a failed save: they wait for each other for minutes, and would hold up the exit."""
    return any(type(thread).__name__ == "_SignalingThread" for thread in threading.enumerate())


def load(path: Path, abstract_state: Any) -> Any:
    """Read the state into the shapes, dtypes and shardings of `abstract_state` (ShapeDtypeStructs with NamedShardings).

    Each process reads the shards of its devices, each once, with TensorStore and not with Orbax, which takes about twice the CPU time per
    byte: beside the hashing of a verified restore, CPU time is what limits its speed. Raises ValueError for what cannot be read.
    """
    wanted, loaded = raw_abstract_leaves(abstract_state), dict[str, jax.Array]()
    context, waiting, waiting_bytes = reading_context(), deque[_Reading](), 0
    opened = {name: ts.open(array_spec(path, name), open=True, context=context) for name in wanted}
    for name, leaf in wanted.items():
        reading = _Reading.begin(name, leaf, opened.pop(name).result())
        waiting.append(reading)
        waiting_bytes += reading.size_bytes
        while waiting_bytes > _READ_AHEAD_BYTES or (waiting and len(loaded) + len(waiting) == len(wanted)):
            oldest = waiting.popleft()
            waiting_bytes -= oldest.size_bytes
            loaded[oldest.name] = oldest.finish()
    return from_raw(loaded, abstract_state)


@dataclass(frozen=True)
class _Reading:
    """An array that is being read."""

    name: str
    leaf: Any
    parts: dict[str, Any]
    """Text of an index -> future of its values."""

    @classmethod
    def begin(cls, name: str, leaf: Any, array: ts.TensorStore) -> _Reading:
        """Begin to read the shards of this process."""
        if tuple(array.shape) != tuple(leaf.shape) or array.dtype.numpy_dtype != leaf.dtype:
            raise ValueError(f"{name} is stored as {array.dtype.name}{list(array.shape)}")
        indices = {str(index): index for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}
        return cls(name, leaf, {text: array[index].read() for text, index in indices.items()})

    @property
    def size_bytes(self) -> int:
        """Bytes that are read."""
        return len(self.parts) * math.prod(self.leaf.sharding.shard_shape(self.leaf.shape)) * self.leaf.dtype.itemsize

    def finish(self) -> jax.Array:
        """Wait for the values, and put them on the devices."""
        values = {text: np.asarray(part.result()) for text, part in self.parts.items()}
        devices = self.leaf.sharding.addressable_devices_indices_map(self.leaf.shape)
        pieces = [jax.device_put(values[str(index)], shard_sharding(self.leaf.sharding, device)) for device, index in devices.items()]
        return jax.make_array_from_single_device_arrays(self.leaf.shape, self.leaf.sharding, pieces)


def reading_context() -> ts.Context:
    """Return how TensorStore reads: without a cache, since everything is read once."""
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}, "data_copy_concurrency": {"limit": len(os.sched_getaffinity(0))}})


def array_spec(path: Path, name: str) -> dict[str, Any]:
    """Return the TensorStore spec of an array of a step."""
    state = os.fspath((path / STATE).absolute()) + "/"
    if (path / STATE / "manifest.ocdbt").exists():
        store: dict[str, Any] = {"driver": "ocdbt", "base": f"file://{state}", "path": name + "/"}
    else:
        store = {"driver": "file", "path": f"{state}{name}/"}
    return {"driver": "zarr3", "kvstore": store}


def raw_leaves(state: Any) -> dict[str, jax.Array]:
    """Return the arrays of a state by name as they are stored: PRNG keys as their data."""
    return {name: _raw(leaf) for name, leaf in named_leaves(state).items()}


def raw_abstract_leaves(abstract_state: Any) -> dict[str, Any]:
    """Return the ShapeDtypeStructs of a state by name as they are stored."""
    return {name: _raw_abstract(leaf) for name, leaf in named_leaves(abstract_state).items()}


def from_raw(loaded: Mapping[str, jax.Array], abstract_state: Any) -> Any:
    """Return the state of which `loaded` are the stored arrays."""
    wanted = named_leaves(abstract_state)
    leaves = [
        jax.random.wrap_key_data(loaded[name], impl=_key_impl(leaf)) if _is_key(leaf) else loaded[name] for name, leaf in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def _context() -> ocp.Context:
    context = ocp.Context()
    # Trained weights barely compress, and compression is slower than most disks.
    context.array_options.saving.use_compression = False
    context.array_options.saving.ocdbt_target_data_file_size = _DATA_FILE_BYTES
    context.array_options.saving.min_slice_bytes_for_replica_parallel = _LEAST_SLICE_BYTES
    context.array_options.saving.scoped_storage_options_creator = _storage
    context.async_options.timeout_secs = _TIMEOUT_S
    # The checkpointer has made sure that the step does not exist; Orbax would synchronize all processes to check it.
    context.file_options.skip_sync_file_validations = True
    return context


def _storage(keys: Any, leaf: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions | None:
    """Store large stacked parameters in chunks of one layer: an export reads one layer at a time."""
    shard = leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape
    stacked = jax.tree_util.keystr(keys, simple=True, separator=".").startswith(_STACKED)
    large = math.prod(shard) * leaf.dtype.itemsize > _LAYER_CHUNKS_ABOVE_BYTES
    return ocp.options.ArrayOptions.Saving.StorageOptions(shard_axes=(0,)) if stacked and large else None


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: Any) -> Any:
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)  # key_impl accepts tracers, but not ShapeDtypeStructs
    return found[0]


def _raw(leaf: Any) -> jax.Array:
    assert isinstance(leaf, jax.Array), f"a checkpoint contains jax.Arrays, not {type(leaf).__name__}"
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _raw_abstract(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    data = jax.eval_shape(jax.random.key_data, leaf)
    assert isinstance(leaf.sharding, NamedSharding)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _text(leaf: Mapping[str, Any]) -> str:
    return f"{leaf['dtype']}[{','.join(map(str, leaf['shape']))}]"
