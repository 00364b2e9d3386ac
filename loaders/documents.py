"""The documents of a corpus by number, and preference pairs.

A corpus of preference pairs (`ridge data prepare --chat` of records with chosen and rejected answers) stores pair k as the documents 2k,
the chosen conversation, and 2k + 1, the rejected one. Both begin with the tokens of the prompt, which the loss does not count.

Legend: N rows, T tokens per row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.loaders.manifest import Manifest, read_manifest
from ridgeline.loaders.rows import Rows, check_ids, rows_of
from ridgeline.loaders.token_reader import TokenReader, Windows

READ_RECORDS = 256


def document_bounds(reader: TokenReader, limit_tokens: int | None = None) -> np.ndarray:
    """Return the ranges [start, stop) of the documents of a corpus, int64 [documents, 2], as `TokenReader.read` takes positions.

    Reads and verifies every record, or whole shards until `limit_tokens`. In a packed corpus a document longer than a row is several.
    """
    manifest, base = reader.manifest, 0
    found: list[np.ndarray] = []
    for number, info in enumerate(manifest.shards):
        starts: list[np.ndarray] = []
        ends: list[int] = []  # of the tokens of each record
        for first in range(0, info.records, READ_RECORDS):
            wanted = [(number, record) for record in range(first, min(first + READ_RECORDS, info.records))]
            for (_, record), content in zip(wanted, reader.records(wanted), strict=True):
                begin = base + record * manifest.record_tokens
                starts.append(content.doc_starts.astype(np.int64) + begin)
                ends.append(begin + len(content.tokens))
        begins = np.concatenate(starts)
        if manifest.pack_length is None:
            stops = np.append(begins[1:], ends[-1])
        else:
            stops = np.concatenate([np.append(of[1:], end) for of, end in zip(starts, ends, strict=True)])
        found.append(np.stack([begins, stops], axis=1))
        base += manifest.shard_length(info)
        if limit_tokens is not None and base >= limit_tokens:
            break
    return np.concatenate(found)


class PairSource:
    """The pairs of a preference corpus as rows of one conversation each: rows 2k and 2k + 1 are the chosen and rejected one of pair k."""

    unit = 2
    """Rows that stay together."""
    document_masking = True

    def __init__(self, directory: Path, seq_len: int, manifest: Manifest | None = None) -> None:
        """Raises UserError for a corpus without pairs, and where no pair fits rows of `seq_len` tokens."""
        self.directory = directory
        self.manifest = read_manifest(directory) if manifest is None else manifest
        if not self.manifest.has_pairs:
            raise UserError(f"{directory} has no preference pairs; prepare records with 'chosen' and 'rejected' with --chat")
        self.seq_len, self.reader = seq_len, TokenReader(directory, self.manifest)
        bounds = document_bounds(self.reader).reshape(-1, 2, 2)
        fits = (bounds[..., 1] - bounds[..., 0] <= seq_len).all(axis=1)
        self.bounds = bounds[fits]
        self.num_pairs = len(self.bounds)
        self.num_rows = 2 * self.num_pairs
        self.reference = np.zeros((self.num_pairs, 2), np.float32)
        """Log-probabilities of the counted tokens of both sides by the model before training; the trainer sets them."""
        self.too_long = int(len(bounds) - self.num_pairs)
        """Pairs left out because one of their conversations is longer than `seq_len`."""
        if not self.num_pairs:
            raise UserError(f"{directory}: none of its {len(bounds)} pairs fits data.seq_len={seq_len}")

    def read(self, rows: np.ndarray) -> Rows:
        """Read rows by index [N], one conversation each, with their `reference` [N, 1] beside the arrays [N, T]. Raises CorpusError."""
        bounds = self.bounds.reshape(-1, 2)[rows]
        windows = self.reader.read(bounds[:, 0], self.seq_len + 1)
        check_ids(self.directory, self.manifest, windows.ids)
        lengths = bounds[:, 1] - bounds[:, 0]
        index = np.arange(self.seq_len + 1)
        padding = index >= lengths[:, None]
        starts = (index == 0) | (index == lengths[:, None])
        read = rows_of(Windows(np.where(padding, 0, windows.ids), starts, padding, windows.mask), document_masking=True)
        return {**read, "reference": self.reference.reshape(-1, 1)[rows]}
