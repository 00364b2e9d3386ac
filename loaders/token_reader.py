"""Reading token shards: any window of a corpus's tokens, with every record verified.

Legend: N windows, W tokens per window.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from ridgeline.loaders.manifest import CorpusError, Manifest, ShardInfo
from ridgeline.loaders.token_record import TokenRecord, decode_record, edge_crc32

READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
READER_BUFFER_BYTES = 32768
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Pauses before further attempts to read a file that its file system does not give."""
_log = logging.getLogger("ridgeline")


class StoredFile(Protocol):
    """A file as its manifest lists it."""

    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def sha256(self) -> str: ...


class Shard:
    """One open shard. Safe to use from several threads."""

    def __init__(self, directory: Path, info: ShardInfo, manifest: Manifest) -> None:
        """Open the file and check that it is the one listed in the manifest. Raises CorpusError."""
        self.path, self.info = Path(directory) / info.name, info
        self._vocab_size, self._size, self._packed = manifest.tokenizer.vocab_size, manifest.record_tokens, manifest.pack_length is not None
        check_size(self.path, info)
        try:
            self._open()
            records = self._reader.num_records()
        except Exception as error:  # the library raises RuntimeError or ValueError, by version
            raise CorpusError(f"damaged shard: {self.path} cannot be opened ({_one_line(error)})") from error
        if records != info.records:
            raise CorpusError(f"damaged shard: {self.path} has {records} records; the manifest lists {info.records}")
        if edge_crc32(*self._read_bytes([0]), *self._read_bytes([records - 1])) != info.edge_crc32:
            raise CorpusError(f"wrong shard: {self.path} is not the file listed in the manifest (its first or last record differs)")

    def read(self, records: list[int]) -> list[TokenRecord]:
        """Read and verify records by number. Raises CorpusError naming file and record."""
        return [self._decode(index, data) for index, data in zip(records, self._read_bytes(records), strict=True)]

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def _decode(self, index: int, data: bytes) -> TokenRecord:
        try:
            record = decode_record(data)
        except ValueError as error:
            raise CorpusError(f"damaged record {index} of {self.path}: {error}") from error
        moved = not self._packed and record.first_token != index * self._size
        if moved or record.vocab_size != self._vocab_size:
            raise CorpusError(f"wrong record {index} of {self.path}: it belongs to another corpus or another position")
        expected = self._size if self._packed else min(self._size, self.info.tokens - index * self._size)
        if len(record.tokens) > expected or (len(record.tokens) < expected and not self._packed):
            raise CorpusError(f"wrong record {index} of {self.path}: it has {len(record.tokens)} tokens, expected {expected}")
        return record

    def _open(self) -> None:
        self._reader = ArrayRecordReader(str(self.path), options=READER_OPTIONS, file_reader_buffer_size=READER_BUFFER_BYTES)

    def _read_bytes(self, records: list[int]) -> list[bytes]:
        try:
            found: list[bytes] = self._reader.read(records)
        except Exception:
            self._await_file()
            try:
                self._open()  # another reader: the handle of the old one may be stale. Other threads may still use that one.
                found = self._reader.read(records)
            except Exception as error:
                self._raise_for_first_bad(records, error)
        if len(found) != len(records):
            raise CorpusError(f"damaged shard: {self.path} returned {len(found)} of {len(records)} requested records")
        return found

    def _await_file(self) -> None:
        """Wait until the file can be read, RETRY_S in total: a file system may be away for a while. Raises CorpusError after that."""
        for number, pause_s in enumerate((*RETRY_S, None)):
            try:
                with self.path.open("rb") as file:
                    file.read(1)
                    file.seek(-1, os.SEEK_END)
                    file.read(1)
                return
            except OSError as error:
                if pause_s is None:
                    raise CorpusError(f"cannot read {self.path} for {sum(RETRY_S):g} s: {error.strerror}") from error
                if number == 0:
                    _log.warning("cannot read %s: %s; trying again for %g s", self.path, error.strerror, sum(RETRY_S))
                time.sleep(pause_s)

    def _raise_for_first_bad(self, records: list[int], error: Exception) -> NoReturn:
        """Raise CorpusError for the first record that cannot be read; the library's message does not name it."""
        for index in records if len(records) > 1 else []:
            self._read_bytes([index])
        raise CorpusError(f"damaged record {records[0]} of {self.path}: {_one_line(error)}") from error


@dataclass(frozen=True)
class Windows:
    """Windows of a corpus's tokens; positions past the end are padding."""

    ids: np.ndarray
    """int32 [N, W], 0 on padding."""
    starts: np.ndarray
    """bool [N, W]: True where a document or padding starts."""
    padding: np.ndarray | None
    """bool [N, W]; None: there is no padding."""
    mask: np.ndarray | None
    """bool [N, W]: True where the token counts as a target; None: everywhere."""


class TokenReader:
    """Reads windows of a corpus: the tokens of its shards one after another, packed rows with their padding.

    Safe to use from several threads. Picklable: shards are opened on first use, also in worker processes.
    """

    def __init__(self, directory: Path, manifest: Manifest, *, verify: bool = False) -> None:
        """Check the size of every shard (with `verify` also its sha256). Raises CorpusError naming the file."""
        self.directory, self.manifest = Path(directory), manifest
        self._bases = np.concatenate([[0], np.cumsum([manifest.shard_length(shard) for shard in manifest.shards], dtype=np.int64)])
        self._shards: list[Shard | None] = [None] * len(manifest.shards)
        self._lock = threading.Lock()
        for info in manifest.shards:
            check_size(self.directory / info.name, info)
        if verify:
            verify_shards(self.directory, manifest)

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(self, starts: Sequence[int] | np.ndarray, length: int) -> Windows:
        """Read the windows [start, start + length) with one call per shard. In a packed corpus a window must not cross rows.

        Raises CorpusError naming file and record.
        """
        packed = self.manifest.pack_length
        assert packed is None or all(int(start) % packed + length <= packed for start in starts), "a window crosses packed rows"
        pieces = [piece for row, start in enumerate(starts) for piece in self._pieces(row, int(start), length)]
        wanted: dict[int, set[int]] = {}
        for piece in pieces:
            wanted.setdefault(piece.shard, set()).add(piece.record)
        records: dict[tuple[int, int], TokenRecord] = {}
        for shard, numbers in wanted.items():
            order = sorted(numbers)
            records.update(zip([(shard, number) for number in order], self._shard(shard).read(order), strict=True))
        windows = _WindowBuffer(len(starts), length)
        for piece in pieces:
            windows.put(piece, records[piece.shard, piece.record])
        return windows.finish()

    def records(self, wanted: Sequence[tuple[int, int]]) -> Iterator[TokenRecord]:
        """Yield records, each given as its shard and its number there, shard by shard. Raises CorpusError naming file and record."""
        numbers: dict[int, list[int]] = {}
        for shard, number in wanted:
            numbers.setdefault(shard, []).append(number)
        for shard, mine in numbers.items():
            yield from self._shard(shard).read(sorted(mine))

    def close(self) -> None:
        """Close the open shards."""
        with self._lock:
            for shard in self._shards:
                if shard is not None:
                    shard.close()
            self._shards = [None] * len(self._shards)

    def _shard(self, index: int) -> Shard:
        with self._lock:
            shard = self._shards[index]
            if shard is None:
                shard = self._shards[index] = Shard(self.directory, self.manifest.shards[index], self.manifest)
            return shard

    def _pieces(self, row: int, start: int, length: int) -> Iterator[_Piece]:
        """Split a window at the ends of records and shards."""
        size, place = self.manifest.record_tokens, 0
        stop = min(length, int(self._bases[-1]) - start)
        shard = int(np.searchsorted(self._bases, start, side="right")) - 1
        while place < stop:
            base, end = int(self._bases[shard]), int(self._bases[shard + 1])
            record, begin = divmod(start + place - base, size)
            count = min(stop - place, size - begin, end - start - place)
            yield _Piece(row, place, shard, record, begin, begin + count)
            place += count
            shard += start + place == end


class _Piece(NamedTuple):
    """Tokens [begin, end) of a record, at position `place` of window `row`."""

    row: int
    place: int
    shard: int
    record: int
    begin: int
    end: int


class _WindowBuffer:
    """Windows being filled."""

    def __init__(self, rows: int, length: int) -> None:
        self._ids = np.zeros((rows, length), np.int32)
        self._starts = np.zeros((rows, length), bool)
        self._mask: np.ndarray | None = None
        self._filled = np.zeros(rows, np.int64)

    def put(self, piece: _Piece, record: TokenRecord) -> None:
        """Copy a piece; where a packed record ends before the piece, the rest is padding."""
        end = min(piece.end, len(record.tokens))
        place = slice(piece.place, piece.place + end - piece.begin)
        self._ids[piece.row, place] = record.tokens[piece.begin : end]
        first, last = record.doc_starts.searchsorted((piece.begin, end))
        self._starts[piece.row, record.doc_starts[first:last].astype(np.int64) + (piece.place - piece.begin)] = True
        if record.loss_mask is not None:
            if self._mask is None:
                self._mask = np.ones_like(self._starts)
            self._mask[piece.row, place] = record.loss_mask[piece.begin : end]
        self._filled[piece.row] = place.stop

    def finish(self) -> Windows:
        """Return the windows with their padding marked."""
        length = self._ids.shape[1]
        short = np.flatnonzero(self._filled < length)
        padding = None
        if len(short):
            self._starts[short, self._filled[short]] = True
            padding = np.arange(length) >= self._filled[:, None]
        return Windows(self._ids, self._starts, padding, self._mask)


def check_size(path: Path, info: StoredFile) -> None:
    """Raise CorpusError when the shard is missing or its size differs from the manifest."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise CorpusError(f"missing shard: {path} (listed in the manifest of {path.parent})") from error
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CorpusError(f"damaged shard: {path} is not a regular file")
    if found.st_size != info.bytes:
        raise CorpusError(f"damaged shard: {path} has {found.st_size} bytes; the manifest lists {info.bytes}")


def verify_shards(directory: Path, manifest: Manifest) -> None:
    """Compare size and sha256 of every shard with the manifest. Raises CorpusError naming the first that differs."""
    for info in manifest.shards:
        verify_shard(Path(directory) / info.name, info)


def verify_shard(path: Path, info: StoredFile) -> None:
    """Compare size and sha256 of a shard with its entry in the manifest. Raises CorpusError naming it."""
    check_size(path, info)
    try:
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from error
    if sha256 != info.sha256:
        raise CorpusError(f"damaged shard: {path} does not have the sha256 of the manifest")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
