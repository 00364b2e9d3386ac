"""Safetensors files read and written one tensor (or one block of rows) at a time.

Format (huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
tensors' bytes in C order. The library maps or loads whole files; here plain reads and writes bound the memory by the requested block.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeGuard

import ml_dtypes
import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import open_regular
from ridgeline.configs.foreign import parse_object, read_object, shortened

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
BLOCK_BYTES = 64 * 2**20
"""Largest buffer for rows when only some of their columns are requested."""
MAX_HEADER_BYTES = 32 << 20
"""Largest header and index that is read: names and places of 200,000 tensors. (The reference implementation stops at 100 MB.)"""
MAX_DIMS = 8
_LONGEST_NAME = 255
_CHECKED = 1 << 20
"""Elements checked at once."""

FLOAT_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Safetensors name -> supported dtype of weights."""
READABLE_DTYPES = FLOAT_DTYPES | {
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""Safetensors name -> dtype of what can be read: weights, and the parts of quantized ones."""
DTYPE_NAMES = {dtype: name for name, dtype in READABLE_DTYPES.items()}
_EXPONENTS: dict[np.dtype, tuple[type[np.unsignedinteger[Any]], int]] = {
    FLOAT_DTYPES["F64"]: (np.uint64, 0x7FF0_0000_0000_0000),
    FLOAT_DTYPES["F32"]: (np.uint32, 0x7F80_0000),
    FLOAT_DTYPES["F16"]: (np.uint16, 0x7C00),
    FLOAT_DTYPES["BF16"]: (np.uint16, 0x7F80),
}
"""dtype -> the type of its bits, and those of the exponent: all set in NaN and infinity."""


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor in a file."""

    file: Path
    dtype: str
    """Safetensors dtype name."""
    shape: tuple[int, ...]
    start_byte: int
    """Offset of the first byte in the file."""
    num_bytes: int

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return the tensor, or the block that `index` (one unit-step slice per dim) selects, in its stored dtype.

        Only the selected rows (dim 0) are read from the file; a selection of columns passes through a buffer of BLOCK_BYTES.
        """
        dtype = READABLE_DTYPES[self.dtype]
        if not self.shape:
            return self._read_rows(0, 1, dtype, ()).reshape(())
        bounds = [s.indices(dim) for s, dim in zip(index or (slice(None),) * len(self.shape), self.shape, strict=True)]
        assert all(step == 1 for _, _, step in bounds)
        first, last, _ = bounds[0]
        columns = tuple(slice(start, stop) for start, stop, _ in bounds[1:])
        row_shape = self.shape[1:]
        if all(s.start == 0 and s.stop == dim for s, dim in zip(columns, row_shape, strict=True)):
            return self._read_rows(first, last, dtype, row_shape)
        out = np.empty((last - first, *(s.stop - s.start for s in columns)), dtype)
        rows_per_block = max(1, BLOCK_BYTES // (int(np.prod(row_shape)) * dtype.itemsize))
        for row in range(first, last, rows_per_block):
            end = min(last, row + rows_per_block)
            out[row - first : end - first] = self._read_rows(row, end, dtype, row_shape)[(slice(None), *columns)]
        return out

    def _read_rows(self, first: int, last: int, dtype: np.dtype, row_shape: tuple[int, ...]) -> np.ndarray:
        rows = np.empty((last - first, *row_shape), dtype)
        buffer = _bytes_of(rows)
        row_bytes = int(np.prod(row_shape, dtype=np.int64)) * dtype.itemsize
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start_byte + first * row_bytes)
            done = 0
            while done < len(buffer):
                count = file.readinto(buffer[done:])
                if not count:
                    raise UserError(f"{self.file} is truncated: it ends before its tensors")
                done += count
        return rows


def all_finite(tensor: np.ndarray) -> bool:
    """Return whether no element is NaN or infinite, a bounded block at a time."""
    bits, exponent = _EXPONENTS[tensor.dtype]
    flat = tensor.reshape(-1).view(bits)
    blocks = (flat[at : at + _CHECKED] for at in range(0, len(flat), _CHECKED))
    return not any(((block & exponent) == exponent).any() for block in blocks)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file, checked against the file's size and each other.

    Raises UserError for a file that is missing, truncated or not safetensors, and for tensors that overlap or whose size contradicts their
    shape and dtype.
    """
    if not path.exists():
        raise UserError(f"cannot read weights file {path}: no such file")
    with open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > file_bytes - 8:
            raise UserError(
                f"{path} is truncated or not a safetensors file: its header has {header_bytes:,} bytes, the file {file_bytes:,}"
            )
        if header_bytes > MAX_HEADER_BYTES:
            raise UserError(f"{path}: its header has {header_bytes:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
        header = parse_object(file.read(header_bytes), path)
    data_start = 8 + header_bytes
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _stored_tensor(path, shortened(name), entry, data_start, file_bytes)
    _check_overlap(path, tensors)
    return tensors


def _stored_tensor(path: Path, name: str, entry: Any, data_start: int, file_bytes: int) -> StoredTensor:
    bad = UserError(f"{path} is not a safetensors file: bad header entry for tensor '{name}'")
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise bad
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(shape) > MAX_DIMS or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad
    begin, end = offsets
    if data_start + end > file_bytes:
        raise UserError(f"{path} is truncated: tensor '{name}' ends at byte {data_start + end:,} of a file of {file_bytes:,}")
    tensor = StoredTensor(path, entry["dtype"], tuple(shape), data_start + begin, end - begin)
    dtype = READABLE_DTYPES.get(tensor.dtype)
    if dtype is not None and tensor.num_bytes != math.prod(shape) * dtype.itemsize:
        raise UserError(f"{path}: tensor '{name}' of shape {tensor.shape} and dtype {tensor.dtype} cannot have {tensor.num_bytes:,} bytes")
    return tensor


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**63 for one in value)


def _check_overlap(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    ordered = sorted((tensor.start_byte, tensor.num_bytes, name) for name, tensor in tensors.items() if tensor.num_bytes)
    for (start, size, one), (following, _, other) in itertools.pairwise(ordered):
        if start + size > following:
            raise UserError(f"{path} is damaged: tensors '{shortened(one)}' and '{shortened(other)}' overlap")


def read_directory(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a Hugging Face directory, from one file or from the shards in its index.

    Raises UserError when there are no safetensors weights, a shard is missing, or the index and the shards disagree.
    """
    index_path = directory / INDEX_NAME
    if not index_path.exists():
        if (directory / SINGLE_NAME).exists():
            return read_header(directory / SINGLE_NAME)
        other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.h5", "*.gguf") for path in directory.glob(pattern))
        hint = f"; found {other[0]} in another format: convert it to safetensors first" if other else ""
        raise UserError(f"no weights in {directory}: neither {SINGLE_NAME} nor {INDEX_NAME}{hint}")
    weight_map = read_object(index_path, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"{index_path} is not a safetensors index (a JSON object with weight_map)")
    shards = sorted(set(weight_map.values()))
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        if not shard or Path(shard).name != shard or "\0" in shard or len(os.fsencode(shard)) > _LONGEST_NAME:
            raise UserError(f"{index_path} lists a shard outside its directory: '{shortened(shard)}'")
        found = read_header(directory / shard)
        if twice := sorted(set(found) & set(tensors)):
            raise UserError(f"{directory / shard} has a tensor that another shard has too: '{shortened(twice[0])}'")
        tensors.update(found)
    absent = sorted(map(shortened, set(weight_map) - set(tensors)))
    if absent:
        raise UserError(
            f"{index_path} lists tensors that its shards do not have: {', '.join(absent[:5])}{' ...' if len(absent) > 5 else ''}"
        )
    return tensors


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class SafetensorsWriter:
    """Writes planned tensors in order into `directory`, in shards of at most `max_shard_bytes` (one tensor may exceed it)."""

    def __init__(self, directory: Path, tensors: Iterable[PlannedTensor], max_shard_bytes: int | None, name: str = SINGLE_NAME) -> None:
        """Plan the files. max_shard_bytes: None: one file, called `name`."""
        self._directory = directory
        self._shards = [list(tensors)] if max_shard_bytes is None else _into_shards(list(tensors), max_shard_bytes)
        self._names = [name] if max_shard_bytes is None else _shard_names(len(self._shards))
        self._queue = [(shard, tensor) for shard, members in enumerate(self._shards) for tensor in members]
        self._position = 0
        self._file: BinaryIO | None = None
        self._file_shard = -1

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._close()
        if error is None:
            assert self._position == len(self._queue), "fewer tensors written than planned"
            self._write_index()

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Append the next tensor; name, shape and dtype must be those planned at this position."""
        shard, planned = self._queue[self._position]
        assert (planned.name, planned.shape, planned.dtype) == (name, tensor.shape, tensor.dtype), (
            planned,
            name,
            tensor.shape,
            tensor.dtype,
        )
        if shard != self._file_shard:
            self._open(shard)
        assert self._file is not None
        self._file.write(_bytes_of(np.ascontiguousarray(tensor)))
        self._position += 1

    def _open(self, shard: int) -> None:
        if self._file is not None:
            self._close()
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in self._shards[shard]:
            end = offset + tensor.num_bytes
            header[tensor.name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = (self._directory / self._names[shard]).open("wb")
        self._file_shard = shard
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _close(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None

    def _write_index(self) -> None:
        if len(self._shards) == 1:
            return
        total_bytes = sum(tensor.num_bytes for _, tensor in self._queue)
        weight_map: Mapping[str, str] = {tensor.name: self._names[shard] for shard, tensor in self._queue}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (self._directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _bytes_of(array: np.ndarray) -> memoryview:
    """Return a view of a contiguous array's bytes, also of dtypes without buffer protocol (bfloat16)."""
    return array.reshape(-1).view(np.uint8).data


def _into_shards(tensors: list[PlannedTensor], max_shard_bytes: int) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{shard:05d}-of-{count:05d}.safetensors" for shard in range(1, count + 1)]
