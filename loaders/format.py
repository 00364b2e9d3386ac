"""Token files: ArrayRecord shards of fixed-size token records, so that any offset of the stream is found in O(1) at any sequence length.

A record is a header, the token ids, where documents start inside it, and (when a document has one) a loss mask:

    magic "RTOK" | version u8 | flags u8 | first_offset i64 | tokens u32 | starts u32 | crc32 u32 | ids | starts u32[] | mask bits

`first_offset` is how many tokens of its document precede the first token. A start with the top bit set begins padding. The checksum
covers header and payload and is verified at every read. Records are stored uncompressed: compression saves a third of the disk and
costs a third of the reading rate (docs/LOG.md).
"""

from __future__ import annotations

import hashlib
import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from configs.errors import UserError
from loaders.manifest import CorpusError, Manifest, ShardInfo
from loaders.packing import best_fit

RECORD_TOKENS = 8192
"""Measured best for rows of 2,048 tokens: larger records read too much, smaller ones too often."""
PACK_WINDOW_TOKENS = 1 << 22
"""Documents are packed among this many tokens at a time, which bounds the writer's memory."""
_MAGIC, _VERSION = b"RTOK", 1
_HEADER = struct.Struct("<4sBBqII")
_CRC = struct.Struct("<I")
_HAS_MASK = 1
_PADDING_BIT = np.uint32(1 << 31)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype ids are stored in."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class TokenWriter:
    """Writes one shard. The bytes depend only on what is added.

    Args:
      directory, name: the file; the directory is made.
      vocab_size: ids must be below it.
      pack_length: put whole documents into rows of this length instead of writing a continuous stream.
      pad_id: id stored where a row is padded.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        vocab_size: int,
        record_tokens: int = RECORD_TOKENS,
        pack_length: int | None = None,
        pad_id: int = 0,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / name
        self._vocab_size, self._dtype = vocab_size, token_dtype(vocab_size)
        self._record_tokens = records_of(pack_length, record_tokens)
        self._pack_length, self._pad_id = pack_length, pad_id
        self._writer = ArrayRecordWriter(str(self.path), "group_size:1,uncompressed,max_parallelism:1")
        self._buffer = _Buffer()
        self._window: list[tuple[np.ndarray, np.ndarray | None]] = []
        self._window_tokens = 0
        self._documents = self._tokens = self._text_bytes = self._records = self._padding = 0

    def add(self, tokens: np.ndarray, loss_mask: np.ndarray | None = None, text_bytes: int = 0) -> None:
        """Append a document: ids [n] with BOS and EOS, which of them the loss counts (bool [n]; None: all), bytes of its text."""
        if not len(tokens):
            raise UserError("a document without tokens")
        if int(tokens.max()) >= self._vocab_size or int(tokens.min()) < 0:
            worst = int(tokens.max()) if int(tokens.max()) >= self._vocab_size else int(tokens.min())
            raise UserError(f"token id {worst} is outside the vocabulary of {self._vocab_size}")
        self._documents += 1
        self._text_bytes += text_bytes
        if self._pack_length is None:
            self._append(tokens, loss_mask)
            return
        for start in range(0, len(tokens), self._pack_length):
            piece = slice(start, start + self._pack_length)
            self._window.append((tokens[piece], None if loss_mask is None else loss_mask[piece]))
        self._window_tokens += len(tokens)
        if self._window_tokens >= PACK_WINDOW_TOKENS:
            self._pack()

    def _pack(self) -> None:
        window, self._window, self._window_tokens = self._window, [], 0
        assert self._pack_length is not None
        for items in best_fit([len(tokens) for tokens, _ in window], self._pack_length):
            for item in items:
                self._append(*window[item])
            padding = self._pack_length - sum(len(window[item][0]) for item in items)
            if padding:
                self._append(np.full(padding, self._pad_id), None, padding=True)
                self._padding += padding

    def _append(self, tokens: np.ndarray, mask: np.ndarray | None, padding: bool = False) -> None:
        self._tokens += len(tokens)
        self._buffer.add(tokens.astype(self._dtype), mask, padding)
        while self._buffer.length >= self._record_tokens:
            self._write(self._record_tokens)

    def _write(self, count: int) -> None:
        self._writer.write(encode_record(*self._buffer.take(count)))
        self._records += 1

    def close(self) -> ShardInfo:
        """Write what is left and return the shard's description."""
        if self._window:
            self._pack()
        if self._buffer.length:
            self._write(self._buffer.length)
        self._writer.close()
        with self.path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return ShardInfo(
            name=self.path.name,
            sha256=digest,
            documents=self._documents,
            tokens=self._tokens,
            text_bytes=self._text_bytes,
            size_bytes=self.path.stat().st_size,
            records=self._records,
            padding_tokens=self._padding,
        )


def records_of(pack_length: int | None, record_tokens: int = RECORD_TOKENS) -> int:
    """Return the tokens per record: whole rows where rows are packed."""
    return record_tokens if pack_length is None else pack_length * max(1, record_tokens // pack_length)


class _Buffer:
    """Tokens waiting to become records."""

    def __init__(self) -> None:
        self._pieces: list[tuple[np.ndarray, np.ndarray | None, bool, int]] = []  # ids, mask, padding, offset in the document
        self.length = 0

    def add(self, tokens: np.ndarray, mask: np.ndarray | None, padding: bool) -> None:
        self._pieces.append((tokens, mask, padding, 0))
        self.length += len(tokens)

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray, int, np.ndarray | None]:
        """Remove the first `count` tokens; return ids, starts, first_offset, mask."""
        first_offset = self._pieces[0][3]
        ids, masks, starts = [], [], []
        at = 0
        while at < count:
            tokens, mask, padding, offset = self._pieces.pop(0)
            used = min(len(tokens), count - at)
            if offset == 0:
                starts.append(np.uint32(at) | (_PADDING_BIT if padding else np.uint32(0)))
            ids.append(tokens[:used])
            masks.append(None if mask is None else mask[:used])
            if used < len(tokens):
                self._pieces.insert(0, (tokens[used:], None if mask is None else mask[used:], padding, offset + used))
            at += used
        self.length -= count
        whole = None
        if any(mask is not None for mask in masks):
            whole = np.concatenate([np.ones(len(i), bool) if m is None else m for i, m in zip(ids, masks, strict=True)])
        return np.concatenate(ids), np.array(starts, np.uint32), first_offset, whole


def encode_record(ids: np.ndarray, starts: np.ndarray, first_offset: int, mask: np.ndarray | None) -> bytes:
    """Return a record's bytes."""
    header = _HEADER.pack(_MAGIC, _VERSION, 0 if mask is None else _HAS_MASK, first_offset, len(ids), len(starts))
    payload = ids.tobytes() + starts.tobytes() + (b"" if mask is None else np.packbits(mask).tobytes())
    return header + _CRC.pack(zlib.crc32(payload, zlib.crc32(header))) + payload


@dataclass(frozen=True)
class Record:
    """A decoded record of n tokens."""

    ids: np.ndarray
    """[n], as stored."""
    starts: np.ndarray
    """int64: where documents and padding start."""
    padding_starts: np.ndarray
    """int64: the starts that begin padding."""
    first_offset: int
    """Tokens of its document before the first token."""
    mask: np.ndarray | None
    """bool [n]: the loss counts this token; None: all."""


def decode_record(data: bytes, dtype: np.dtype[Any]) -> Record:
    """Decode and verify a record. Raises ValueError saying what is wrong."""
    head = _HEADER.size + _CRC.size
    if len(data) < head:
        raise ValueError(f"{len(data)} bytes are less than a header")
    magic, version, flags, first_offset, tokens, num_starts = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError("not a token record of this version")
    if _CRC.unpack_from(data, _HEADER.size)[0] != zlib.crc32(memoryview(data)[head:], zlib.crc32(data[: _HEADER.size])):
        raise ValueError("checksum does not match")
    ids = np.frombuffer(data, dtype, tokens, head)
    starts = np.frombuffer(data, np.uint32, num_starts, head + ids.nbytes)
    mask = None
    if flags & _HAS_MASK:
        bits = np.frombuffer(data, np.uint8, offset=head + ids.nbytes + starts.nbytes)
        mask = np.unpackbits(bits, count=tokens).astype(bool)
    plain = (starts & ~_PADDING_BIT).astype(np.int64)
    return Record(ids, plain, plain[(starts & _PADDING_BIT) != 0], first_offset, mask)


@dataclass(frozen=True)
class Windows:
    """Several windows of W stream tokens. What lies past the end of the stream is padding."""

    ids: np.ndarray
    """int32 [N, W]."""
    starts: np.ndarray
    """bool [N, W]: a document or padding starts here."""
    padding: np.ndarray | None
    """bool [N, W]: padding; None where there is none."""
    mask: np.ndarray | None
    """bool [N, W]: the loss counts this token; None: all."""


class TokenReader:
    """Reads windows of a corpus's stream, the shards one after another. Safe to use from threads; picklable (files reopen on use)."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self._dtype = np.dtype(np.uint16 if manifest.token_bytes == 2 else np.uint32)
        self._bases = np.concatenate([[0], np.cumsum([shard.tokens for shard in manifest.shards])])
        self._local = threading.local()
        for shard in manifest.shards:
            path = directory / shard.name
            if not path.is_file():
                raise CorpusError(f"{path} is missing (named in {directory / 'manifest.json'})")
            if path.stat().st_size != shard.size_bytes:
                raise CorpusError(f"{path} has {path.stat().st_size} bytes, {shard.size_bytes} were written: truncated or overwritten")

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(self, starts: Sequence[int] | np.ndarray, length: int) -> Windows:
        """Read the windows [start, start + length) of the stream. Raises CorpusError naming file and record."""
        pieces = [self._pieces(int(start), length) for start in starts]
        wanted: dict[int, set[int]] = {}
        for window in pieces:
            for _, shard, index, _, _ in window:
                wanted.setdefault(shard, set()).add(index)
        records = {shard: self._records(shard, sorted(indices)) for shard, indices in wanted.items()}
        ids = np.zeros((len(pieces), length), np.int32)
        is_start = np.zeros((len(pieces), length), bool)
        padding: np.ndarray | None = None
        mask: np.ndarray | None = None
        for row, window in enumerate(pieces):
            covered = 0
            for at, shard, index, begin, end in window:
                record = records[shard][index]
                if len(record.ids) < end:
                    raise self._damaged(shard, index, f"holds {len(record.ids)} tokens, {end} were expected")
                ids[row, at : at + end - begin] = record.ids[begin:end]
                here = record.starts[(record.starts >= begin) & (record.starts < end)]
                is_start[row, at + here - begin] = True
                if record.mask is not None:
                    mask = np.ones(ids.shape, bool) if mask is None else mask
                    mask[row, at : at + end - begin] = record.mask[begin:end]
                if len(record.padding_starts):
                    padding = np.zeros(ids.shape, bool) if padding is None else padding
                    _mark_padding(padding[row, at : at + end - begin], record, begin, end)
                covered = at + end - begin
            if covered < length:
                padding = np.zeros(ids.shape, bool) if padding is None else padding
                padding[row, covered:] = True
                is_start[row, covered] = True
        return Windows(ids, is_start, padding, mask)

    def _pieces(self, start: int, length: int) -> list[tuple[int, int, int, int, int]]:
        """Return (place in the window, shard, record, first and last token in the record) of every piece of a window."""
        pieces = []
        at, size = 0, self.manifest.record_tokens
        shard = int(np.searchsorted(self._bases, start, side="right")) - 1
        while at < length and shard < len(self.manifest.shards):
            offset = start + at - int(self._bases[shard])
            left = self.manifest.shards[shard].tokens - offset
            if left <= 0:
                shard += 1
                continue
            record, begin = divmod(offset, size)
            count = min(length - at, size - begin, left)
            pieces.append((at, shard, record, begin, begin + count))
            at += count
        return pieces

    def _records(self, shard: int, indices: list[int]) -> dict[int, Record]:
        reader = self._reader(shard)
        try:
            blobs = reader.read(indices)
        except (ValueError, IndexError, RuntimeError, OSError):
            blobs = [self._single(reader, shard, index) for index in indices]
        if len(blobs) != len(indices):
            blobs = [self._single(reader, shard, index) for index in indices]
        decoded = {}
        for index, blob in zip(indices, blobs, strict=True):
            try:
                decoded[index] = decode_record(blob, self._dtype)
            except ValueError as error:
                raise self._damaged(shard, index, str(error)) from error
        return decoded

    def _single(self, reader: Any, shard: int, index: int) -> bytes:
        """Read one record by itself, to find out which of several is damaged."""
        try:
            (blob,) = reader.read([index])
        except (ValueError, IndexError, RuntimeError, OSError) as error:
            raise self._damaged(shard, index, " ".join(str(error).split())[:200]) from error
        return bytes(blob)

    def _reader(self, shard: int) -> Any:
        readers: dict[int, Any] = self._local.__dict__.setdefault("readers", {})
        if shard not in readers:
            info = self.manifest.shards[shard]
            path = self.directory / info.name
            try:
                reader = ArrayRecordReader(str(path), options="readahead_buffer_size:0,max_parallelism:0", file_reader_buffer_size=32768)
                count = reader.num_records()
            except (ValueError, RuntimeError, OSError) as error:
                raise CorpusError(f"{path} is not a readable token file: {' '.join(str(error).split())[:200]}") from error
            if count != info.records:
                raise CorpusError(f"{path} has {count} records, {info.records} were written")
            readers[shard] = reader
        return readers[shard]

    def _damaged(self, shard: int, record: int, why: str) -> CorpusError:
        return CorpusError(f"{self.directory / self.manifest.shards[shard].name}, record {record} is damaged: {why}")


def _mark_padding(target: np.ndarray, record: Record, begin: int, end: int) -> None:
    """Mark the padding of record tokens [begin, end): from each padding start to the next start."""
    bounds = np.append(record.starts, len(record.ids))
    for start in record.padding_starts:
        stop = int(bounds[np.searchsorted(bounds, start, side="right")])
        target[max(int(start), begin) - begin : max(min(stop, end) - begin, 0)] = True


def verify_shards(directory: Path, manifest: Manifest) -> list[str]:
    """Compare every shard's sha256 with the manifest; return one line per difference."""
    problems = []
    for shard in manifest.shards:
        path = directory / shard.name
        try:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if digest != shard.sha256:
            problems.append(f"{path}: sha256 is {digest[:12]}.., the manifest says {shard.sha256[:12]}..")
    return problems
