"""Token shards: written document by document here, read at any offset by loaders/token_reader.py.

A corpus is a directory of ArrayRecord shards and a manifest (loaders/manifest.py). Documents arrive as [BOS] t1..tn [EOS].
*Stream* corpora cut the concatenated documents of a shard into records of `record_tokens`, so token k lies in record k // record_tokens
and the sequence length stays a choice of the training run. *Packed* corpora (`pack_length`) hold one row of whole documents per record.

Record size and compression by measurement (2 cores, warm page cache, random rows of 2,048 tokens, 32 rows per read, crc32 checked;
Zipf-distributed uint16 tokens): 4,096 tokens with zstd:1 give 92 M tokens/s and 40 % smaller files; uncompressed 135 M; 2,048 with
zstd:1 84 M; 16,384 with zstd:1 52 M. All are far above what training eats, so the smaller files win.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from ridgeline.configs.errors import UserError
from ridgeline.loaders.manifest import CorpusError, Manifest, ShardInfo, TokenizerInfo
from ridgeline.loaders.packing import WINDOW, best_fit
from ridgeline.loaders.record_codec import TokenRecord, edge_crc32, encode_record, token_dtype
from ridgeline.loaders.token_reader import Shard, TokenReader, Windows, verify_shards

__all__ = ["CorpusError", "Manifest", "Shard", "ShardInfo", "TokenReader", "TokenWriter", "TokenizerInfo", "Windows", "verify_shards"]

RECORD_TOKENS = 4096
WRITER_OPTIONS = "group_size:1,zstd:1,max_parallelism:1"
PACK_WINDOW_TOKENS = 1 << 22
"""Packing also stops collecting documents here, which bounds the writer's memory."""


class TokenWriter:
    """Writes one shard. Same calls, same bytes."""

    def __init__(
        self, directory: Path, name: str, *, vocab_size: int, record_tokens: int = RECORD_TOKENS, pack_length: int | None = None
    ) -> None:
        """Start the shard `directory/name`, replacing what is there.

        With `pack_length` documents are placed whole into rows of that many tokens (a longer document is cut into pieces that overlap by
        one token, so no target is lost). Raises OSError when the file cannot be made.
        """
        assert vocab_size > 0
        assert record_tokens > 0
        assert pack_length is None or pack_length > 1
        self.path = Path(directory) / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.open("wb").close()  # a clear OSError now, where the library would give its own later
        self._writer = ArrayRecordWriter(str(self.path), WRITER_OPTIONS)
        self._vocab_size, self._pack_length = vocab_size, pack_length
        self._row = _Row(pack_length or record_tokens, token_dtype(vocab_size))
        self._waiting: list[tuple[np.ndarray, np.ndarray | None, int]] = []  # pieces not yet packed: tokens, mask, position in document
        self._waiting_tokens = 0
        self._records = self._tokens = self._documents = self._text_bytes = 0
        self._edges = [b"", b""]

    def add(self, tokens: np.ndarray, loss_mask: np.ndarray | None = None, text_bytes: int = 0) -> None:
        """Append one document: ids [n] with its BOS and EOS, n >= 2; loss_mask bool [n], True where the token counts as a target.

        Raises UserError for an id outside the vocabulary.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or len(tokens) < 2:
            raise ValueError(f"a document is a vector of at least BOS and EOS, not of shape {tokens.shape}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise UserError(f"{self.path}: document {self._documents} holds token id {bad}, the vocabulary ends at {self._vocab_size - 1}")
        if loss_mask is not None and len(loss_mask) != len(tokens):
            raise ValueError(f"loss mask of {len(loss_mask)} for {len(tokens)} tokens")
        mask = None if loss_mask is None else np.asarray(loss_mask, bool)
        self._documents += 1
        self._text_bytes += text_bytes
        if self._pack_length is None:
            self._append(tokens, mask)
        else:
            self._wait(tokens, mask, self._pack_length)

    def close(self) -> ShardInfo:
        """Finish the file and return what it holds. Raises CorpusError for a shard without documents and OSError on a failed write."""
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
        """Add tokens to the current row, writing each row that fills up."""
        done = 0
        while done < len(tokens):
            done += self._row.fill(tokens[done:], None if mask is None else mask[done:], position + done)
            if self._row.full:
                self._flush()

    def _wait(self, tokens: np.ndarray, mask: np.ndarray | None, pack_length: int) -> None:
        """Queue a document, in pieces when it is longer than a row, until enough wait to be packed well."""
        for start in range(0, len(tokens) - 1, pack_length - 1):
            piece = slice(start, start + pack_length)
            self._waiting.append((tokens[piece], None if mask is None else mask[piece], start))
            self._waiting_tokens += len(tokens[piece])
        if len(self._waiting) >= WINDOW or self._waiting_tokens >= PACK_WINDOW_TOKENS:
            self._pack()

    def _pack(self) -> None:
        for pieces in best_fit([len(tokens) for tokens, _, _ in self._waiting], self._row.size, len(self._waiting) or 1):
            for index in pieces:
                tokens, mask, _ = self._waiting[index]
                self._append(tokens, mask)
            self._flush()
        self._waiting, self._waiting_tokens = [], 0

    def _flush(self) -> None:
        """Write the current row, if it holds anything."""
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
    """The record that is being filled."""

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
        """Nothing more fits."""
        return self.used == self.size

    def fill(self, tokens: np.ndarray, mask: np.ndarray | None, position: int) -> int:
        """Take what fits of a document from its token `position` on; returns how many tokens that was."""
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
        """Return the record as filled so far."""
        return TokenRecord(
            tokens=self._tokens[: self.used],
            doc_starts=np.array(self._starts, np.uint32),
            loss_mask=self._mask[: self.used] if self._masked else None,
            first_token=first_token,
            first_position=self._first_position,
            vocab_size=vocab_size,
        )
