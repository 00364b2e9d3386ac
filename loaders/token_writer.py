"""Writing token shards, document by document; loaders/token_reader.py reads them at any offset.

A corpus is a directory of ArrayRecord shards and a manifest (loaders/manifest.py). Documents arrive as [BOS] t1..tn [EOS].
*Stream* corpora split the concatenated documents of a shard into records of `record_tokens`: token k is in record k // record_tokens, and
the sequence length is chosen by the training run. *Packed* corpora (`pack_length`) store one row of whole documents per record.

Record size and compression were measured (2 cores, warm page cache, random rows of 2,048 tokens, 32 rows per read, crc32 verified;
Zipf-distributed uint16 tokens): 4,096 tokens with zstd:1 read 92 M tokens/s from 40 % smaller files; uncompressed 135 M; 2,048 with
zstd:1 84 M; 16,384 with zstd:1 52 M. All are far above what training consumes, so the smaller files win.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from ridgeline.configs.errors import UserError
from ridgeline.loaders.manifest import CorpusError, ShardInfo
from ridgeline.loaders.token_record import TokenRecord, edge_crc32, encode_record, token_dtype

RECORD_TOKENS = 4096
WRITER_OPTIONS = "group_size:1,zstd:1,max_parallelism:1"
PACK_DOCUMENTS = 8192
"""Documents packed together; more gives less padding and needs more memory."""
PACK_TOKENS = 1 << 22
"""Documents are also packed when this many tokens are buffered, which bounds the writer's memory."""


class TokenWriter:
    """Writes one shard. The same calls give the same bytes."""

    def __init__(
        self, directory: Path, name: str, *, vocab_size: int, record_tokens: int = RECORD_TOKENS, pack_length: int | None = None
    ) -> None:
        """Start the shard `directory/name`, replacing what is there.

        With `pack_length` whole documents are placed into rows of that many tokens (a longer document is split into pieces that overlap by
        one token, so no target is lost). Raises OSError when the file cannot be created.
        """
        assert vocab_size > 0
        assert record_tokens > 0
        assert pack_length is None or pack_length > 1
        self.path = Path(directory) / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.open("wb").close()  # raises a clear OSError now; the library would raise its own later
        self._writer = ArrayRecordWriter(str(self.path), WRITER_OPTIONS)
        self._vocab_size, self._pack_length = vocab_size, pack_length
        self._row = _Row(pack_length or record_tokens, token_dtype(vocab_size))
        self._buffered: list[tuple[np.ndarray, np.ndarray | None, int]] = []  # tokens, mask, position in document
        self._buffered_tokens = 0
        self._records = self._tokens = self._documents = self._text_bytes = self._counted_bytes = 0
        self._counts_differ = False
        self._edges = [b"", b""]

    def add(self, tokens: np.ndarray, loss_mask: np.ndarray | None = None, text_bytes: int = 0, counted_bytes: int | None = None) -> None:
        """Append one document: ids [n] with its EOS, n >= 2; loss_mask bool [n], True where the token counts as a target.

        text_bytes: of its text; counted_bytes: of the text of the tokens that count (None: all).
        Raises UserError for an id outside the vocabulary.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or len(tokens) < 2:
            raise ValueError(f"a document is a vector of at least two tokens, got shape {tokens.shape}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise UserError(
                f"{self.path}: document {self._documents} has token id {bad}; the largest id of the vocabulary is {self._vocab_size - 1}"
            )
        if loss_mask is not None and len(loss_mask) != len(tokens):
            raise ValueError(f"loss mask of {len(loss_mask)} for {len(tokens)} tokens")
        mask = None if loss_mask is None else np.asarray(loss_mask, bool)
        self._documents += 1
        self._text_bytes += text_bytes
        self._counted_bytes += text_bytes if counted_bytes is None else counted_bytes
        self._counts_differ |= mask is not None or counted_bytes not in (None, text_bytes)
        if self._pack_length is None:
            self._append(tokens, mask)
        else:
            self._buffer(tokens, mask, self._pack_length)

    def close(self) -> ShardInfo:
        """Finish the file and return its entry for the manifest.

        Raises CorpusError for a shard without documents and OSError on a failed write.
        """
        self._pack()
        self._flush()
        self._close_file()
        if not self._records:
            raise CorpusError(f"{self.path}: empty shard, no document was written")
        with self.path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return ShardInfo(
            name=self.path.name,
            records=self._records,
            tokens=self._tokens,
            documents=self._documents,
            text_bytes=self._text_bytes,
            counted_bytes=self._counted_bytes if self._counts_differ else None,
            bytes=self.path.stat().st_size,
            sha256=sha256,
            edge_crc32=edge_crc32(*self._edges),
        )

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer.is_open():
            self._close_file()

    def _append(self, tokens: np.ndarray, mask: np.ndarray | None, position: int = 0) -> None:
        """Add tokens to the current row and write each row that becomes full."""
        done = 0
        while done < len(tokens):
            done += self._row.fill(tokens[done:], None if mask is None else mask[done:], position + done)
            if self._row.full:
                self._flush()

    def _buffer(self, tokens: np.ndarray, mask: np.ndarray | None, pack_length: int) -> None:
        """Buffer a document, in pieces when it is longer than a row, until there are enough to pack."""
        for start in range(0, len(tokens) - 1, pack_length - 1):
            piece = slice(start, start + pack_length)
            self._buffered.append((tokens[piece], None if mask is None else mask[piece], start))
            self._buffered_tokens += len(tokens[piece])
        if len(self._buffered) >= PACK_DOCUMENTS or self._buffered_tokens >= PACK_TOKENS:
            self._pack()

    def _pack(self) -> None:
        for pieces in best_fit([len(tokens) for tokens, _, _ in self._buffered], self._row.size, len(self._buffered) or 1):
            for index in pieces:
                tokens, mask, _ = self._buffered[index]
                self._append(tokens, mask)
            self._flush()
        self._buffered, self._buffered_tokens = [], 0

    def _flush(self) -> None:
        """Write the current row unless it is empty."""
        if not self._row.used:
            return
        data = encode_record(self._row.take(self._tokens, self._vocab_size))
        try:
            self._writer.write(data)
        except Exception as error:  # the library raises RuntimeError or ValueError, by version
            raise OSError(f"cannot write {self.path}: {error}") from error
        self._edges = [self._edges[0] or data, data]
        self._records += 1
        self._tokens += self._row.used
        self._row.clear()

    def _close_file(self) -> None:
        try:
            self._writer.close()
        except Exception as error:
            raise OSError(f"cannot write {self.path}: {error}") from error


class _Row:
    """The record being filled."""

    def __init__(self, size: int, dtype: np.dtype) -> None:
        self.size = size
        self._tokens = np.empty(size, dtype)
        self._mask = np.empty(size, bool)
        self.clear()

    def clear(self) -> None:
        """Start an empty record."""
        self.used = 0
        self._starts: list[int] = []
        self._masked = False
        self._first_position = 0

    @property
    def full(self) -> bool:
        """Whether the record is full."""
        return self.used == self.size

    def fill(self, tokens: np.ndarray, mask: np.ndarray | None, position: int) -> int:
        """Append the tokens of a document from its token `position` on that fit; return their number."""
        count = min(len(tokens), self.size - self.used)
        place = slice(self.used, self.used + count)
        self._tokens[place] = tokens[:count]
        self._mask[place] = True if mask is None else mask[:count]
        self._masked |= mask is not None
        if position == 0:
            self._starts.append(self.used)
        if self.used == 0:
            self._first_position = position
        self.used += count
        return count

    def take(self, first_token: int, vocab_size: int) -> TokenRecord:
        """Return the record filled so far."""
        return TokenRecord(
            tokens=self._tokens[: self.used],
            doc_starts=np.array(self._starts, np.uint32),
            loss_mask=self._mask[: self.used] if self._masked else None,
            first_token=first_token,
            first_position=self._first_position,
            vocab_size=vocab_size,
        )


def best_fit(lengths: Sequence[int], capacity: int, window: int = PACK_DOCUMENTS) -> list[list[int]]:
    """Place items into rows by best-fit decreasing within windows of `window` consecutive items; returns item indices per row.

    Every item is in exactly one row and no row exceeds `capacity`. Items keep their input order inside a row. An item goes to the fullest
    row it fits (the lowest-numbered of equals), so the result is deterministic. Raises ValueError for an item above `capacity`.
    """
    rows: list[list[int]] = []
    for start in range(0, len(lengths), window):
        rows += _pack_window(range(start, min(start + window, len(lengths))), lengths, capacity)
    return rows


def _pack_window(indices: range, lengths: Sequence[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"item {index} of length {length} does not fit a row of {capacity}")
        place = bisect_left(free, (length, -1))
        if place < len(free):
            left, row = free.pop(place)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if left > length:
            insort(free, (left - length, row))
    return [sorted(row) for row in rows]
