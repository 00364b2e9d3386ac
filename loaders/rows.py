"""The rows of a batch, from windows of a corpus's tokens.

Row i of a corpus has the tokens [i*T, i*T + T) as inputs, and the tokens one further as targets. Documents are split at the end of a row
and continue in the next one: nothing is dropped, every token is a target once per epoch, and only the last row may be padded. In a packed
corpus a row is one packed row, and no document is split.

Legend: N rows, T tokens per row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.loaders.manifest import Manifest, read_manifest
from ridgeline.loaders.teacher import TeacherReader
from ridgeline.loaders.token_reader import TokenReader, Windows

Rows = dict[str, np.ndarray]
"""tokens, targets, positions, segment_ids (int32) and weights (float32), each [N, T]; of pairs also reference (float32) [N, 1]; with a
teacher also its arrays (loaders/teacher.py); for multi-token prediction those of `with_future_targets`."""


class RowSource:
    """The rows of one corpus at one sequence length."""

    unit = 1
    """Rows that stay together."""

    def __init__(
        self,
        directory: Path,
        seq_len: int,
        *,
        document_masking: bool = True,
        manifest: Manifest | None = None,
        teacher: TeacherReader | None = None,
    ) -> None:
        self.directory, self.seq_len, self.document_masking, self.teacher = directory, seq_len, document_masking, teacher
        self.manifest = read_manifest(directory) if manifest is None else manifest
        if self.manifest.has_pairs:
            raise UserError(
                f"{directory} has preference pairs: next-token training would learn the rejected answers too; set preference.loss=dpo"
            )
        packed = self.manifest.pack_length
        if packed is not None and packed != seq_len:
            raise UserError(f"{directory} is packed in rows of {packed} tokens: set data.seq_len={packed} (it is {seq_len})")
        if packed is not None and not document_masking:
            raise UserError(f"{directory} is packed in rows of whole documents: data.document_masking=false is not supported")
        self.reader = TokenReader(directory, self.manifest)
        length = self.manifest.stream_length
        self.num_rows = length // packed if packed is not None else -(-(length - 1) // seq_len)

    def read(self, rows: np.ndarray) -> Rows:
        """Read rows by index [N]. Raises CorpusError naming file and record."""
        overlap = 0 if self.manifest.pack_length is not None else 1
        windows = self.reader.read(rows * self.seq_len, self.seq_len + overlap)
        if not overlap:
            windows = _with_padded_target(windows)
        check_ids(self.directory, self.manifest, windows.ids)
        found = rows_of(windows, self.document_masking)
        return found if self.teacher is None else {**found, **self.teacher.read(rows)}


def with_future_targets(rows: Rows, modules: int) -> Rows:
    """Return rows with the targets of modules of multi-token prediction; the same rows for none.

    mtp_targets int32 and mtp_weights float32, [N, T, modules]: of token i and module k (from 1) those of token i + k. The weight is 0 where
    token i + k is not in the row, or in another document.
    """
    if not modules:
        return rows

    def ahead(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, [(0, 0), (0, modules)])
        return np.stack([padded[:, k : k + x.shape[1]] for k in range(1, modules + 1)], axis=-1)

    segments = rows["segment_ids"]
    same = (ahead(segments) == segments[..., None]) & (segments[..., None] > 0)
    return {**rows, "mtp_targets": ahead(rows["targets"]), "mtp_weights": np.where(same, ahead(rows["weights"]), np.float32(0))}


def check_ids(directory: Path, manifest: Manifest, ids: np.ndarray) -> None:
    """Raise UserError for ids that the tokenizer of a corpus does not have."""
    vocab = manifest.tokenizer.vocab_size
    if int(ids.max(initial=0)) >= vocab:
        raise UserError(f"{directory} has token id {int(ids.max())}; its tokenizer has {vocab} ids")


def _with_padded_target(windows: Windows) -> Windows:
    """Append one padding token: the last token of a packed row has no target."""

    def widen(x: np.ndarray, value: object) -> np.ndarray:
        return np.concatenate([x, np.full((len(x), 1), value, x.dtype)], axis=1)

    padding = np.zeros(windows.ids.shape, bool) if windows.padding is None else windows.padding
    mask = None if windows.mask is None else widen(windows.mask, True)
    return Windows(widen(windows.ids, 0), widen(windows.starts, True), widen(padding, True), mask)


def rows_of(windows: Windows, document_masking: bool) -> Rows:
    """Return the rows of windows of T + 1 tokens.

    Segments number the documents of a row from 1; padding is segment 0. Positions restart in each segment. A target has weight 0 when it
    is the first token of another document, padding, or masked; without `document_masking` a row is one segment.
    """
    ids, starts = windows.ids, windows.starts
    N, T = ids.shape[0], ids.shape[1] - 1
    index = np.arange(T, dtype=np.int32)
    if document_masking:
        starts = starts.copy()
        starts[:, 0] = True
        segments = np.cumsum(starts[:, :-1], axis=1, dtype=np.int32)
        positions = index - np.maximum.accumulate(np.where(starts[:, :-1], index, 0), axis=1)
        counted = ~starts[:, 1:]
    else:
        segments = np.ones((N, T), np.int32)
        positions = np.broadcast_to(index, (N, T)).copy()
        counted = np.ones((N, T), bool)
    if windows.padding is not None:
        segments[windows.padding[:, :-1]] = 0
        positions[windows.padding[:, :-1]] = 0
        counted &= ~windows.padding[:, 1:] & ~windows.padding[:, :-1]
    if windows.mask is not None:
        counted &= windows.mask[:, 1:]
    return {
        "tokens": ids[:, :-1].copy(),
        "targets": ids[:, 1:].copy(),
        "positions": positions.astype(np.int32, copy=False),
        "segment_ids": segments,
        "weights": counted.astype(np.float32),
    }
