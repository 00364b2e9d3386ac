"""Held-out sets: every row once, in order, split over the processes; the last batch is padded with weight 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grain
import numpy as np

from ridgeline.loaders.manifest import read_manifest
from ridgeline.loaders.rows import Rows, RowSource


class EvaluationSet:
    """One pass over a corpus in batches of `batch_size` global rows, of which this process reads `rows`."""

    def __init__(self, source: RowSource, batch_size: int, rows: np.ndarray) -> None:
        self._source, self._batch_size, self._rows = source, batch_size, np.asarray(rows, np.int64)
        self.tokenizer = source.manifest.tokenizer
        self.num_batches = -(-source.num_rows // batch_size)
        self.text_bytes = source.manifest.text_bytes
        self.gzip9_bytes = source.manifest.gzip9_bytes

    def __iter__(self) -> Iterator[Rows]:
        dataset = grain.MapDataset.range(self.num_batches).map(self.batch)
        return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))

    def batch(self, index: int) -> Rows:
        """Read this process's rows of batch `index`; rows past the end are zeros: segment 0, weight 0."""
        wanted = int(index) * self._batch_size + self._rows
        there = wanted < self._source.num_rows
        read = self._source.read(wanted[there])
        if there.all():
            return read
        return {name: self._padded(values, there) for name, values in read.items()}

    @staticmethod
    def _padded(values: np.ndarray, there: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(there), values.shape[1]), values.dtype)
        padded[there] = values
        return padded


def open_evaluation_set(path: Path, *, seq_len: int, batch_size: int, rows: np.ndarray, document_masking: bool = True) -> EvaluationSet:
    """Open a held-out set. Raises CorpusError when it is missing or damaged."""
    source = RowSource(path, seq_len, document_masking=document_masking, manifest=read_manifest(path))
    return EvaluationSet(source, batch_size, rows)
