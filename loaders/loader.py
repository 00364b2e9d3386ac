"""The training loader: this process's rows of one step after another, read ahead by Grain.

Row r of step s is a pure function of (manifests, seed, s, r), so the batches do not depend on the number of processes, and the step is
all the state there is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import DataConfig
from ridgeline.loaders.manifest import CorpusError, Manifest, TokenizerInfo, check_tokenizer, read_manifest
from ridgeline.loaders.mixture import Order
from ridgeline.loaders.rows import Rows, RowSource
from ridgeline.loaders.workers import leave_signals_to_parent


class Loader:
    """Iterates over local batches from `start_step` on, without end. Made by `build_loader`.

    `wait_s` is the total time the caller has waited in `next`, `last_wait_s` that of the last batch.
    """

    def __init__(self, steps: StepRows, tokenizer: TokenizerInfo, data: DataConfig, start_step: int) -> None:
        self.tokenizer = tokenizer
        self._steps = steps
        self.rows_per_epoch = sum(source.num_rows for source in steps.sources)
        """Rows of all corpora together."""
        self.wait_s = self.last_wait_s = 0.0
        dataset: Any = steps[start_step:].to_iter_dataset(
            grain.ReadOptions(num_threads=data.threads if data.workers == 0 else 1, prefetch_buffer_size=data.prefetch)
        )
        if data.workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # Grain reads absl flags to start workers, which fails in a program that has none
            options = grain.MultiprocessingOptions(num_workers=data.workers, per_worker_buffer_size=data.prefetch)
            dataset = dataset.mp_prefetch(options, worker_init_fn=_start_worker)
        self._iterator: Any = iter(dataset)

    def __iter__(self) -> Iterator[Rows]:
        return self

    def __next__(self) -> Rows:
        start_s = time.perf_counter()
        try:
            rows: Rows = next(self._iterator)
        except CorpusError as error:
            # Without its traceback, whose frames would keep batches of the workers, and so their shared memory, until the process ends.
            raise error.with_traceback(None) from None
        self.last_wait_s = time.perf_counter() - start_s
        self.wait_s += self.last_wait_s
        return rows

    def epochs(self, step: int) -> dict[str, float]:
        """How often each corpus (by its path) has been gone through after `step` steps."""
        return self._steps.epochs(step)

    def close(self) -> None:
        """Stop the reader threads and worker processes."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class StepRows(grain.MapDataset):
    """Element s is this process's part of step s: one element reads all its rows with one call per shard."""

    def __init__(self, sources: Sequence[RowSource], order: Order, batch_size: int, rows: np.ndarray) -> None:
        super().__init__()
        self.sources, self._order = list(sources), order
        self._batch_size, self._rows = batch_size, np.asarray(rows, np.int64)

    def __len__(self) -> int:
        return sys.maxsize // self._batch_size

    def epochs(self, step: int) -> dict[str, float]:
        """Rows drawn from each corpus after `step` steps, in epochs."""
        drawn = step * self._batch_size
        return {
            str(source.directory): drawn * share / source.num_rows for source, share in zip(self.sources, self._order.shares, strict=True)
        }

    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return self.slice(step)
        corpora, rows = self._order.lookup(int(step) * self._batch_size + self._rows)
        if len(self.sources) == 1:
            return self.sources[0].read(rows)
        batch: Rows = {}
        for corpus in np.unique(corpora):
            at = corpora == corpus
            for name, values in self.sources[corpus].read(rows[at]).items():
                batch.setdefault(name, np.empty((len(rows), values.shape[1]), values.dtype))[at] = values
        return batch


def _start_worker(index: int, count: int) -> None:
    """Body of Grain's hook at the start of worker `index` of `count`."""
    leave_signals_to_parent()


def build_loader(data: DataConfig, *, seed: int, vocab_size: int, rows: np.ndarray, start_step: int = 0) -> Loader:
    """Open the mixture of `data.train`.

    Args:
      data: corpora, sequence length, global batch size, reader settings.
      seed: of the shuffle.
      vocab_size: of the model; a tokenizer with more ids is refused.
      rows: the rows of the global batch that this process owns (sorted, int64 [B_local]).
      start_step: first step to deliver.

    Raises UserError for missing data, different tokenizers or ids outside the vocabulary; CorpusError for missing or damaged shards, also
    while iterating.
    """
    manifests = read_manifests(data)
    tokenizer = check_tokenizer(manifests, vocab_size)
    sources = [RowSource(path, data.seq_len, document_masking=data.document_masking, manifest=manifest) for path, manifest in manifests]
    order = Order([source.num_rows for source in sources], [entry.weight for entry in data.train], seed=seed, shuffle=data.shuffle)
    return Loader(StepRows(sources, order, data.batch_size, rows), tokenizer, data, start_step)


def read_manifests(data: DataConfig) -> list[tuple[Path, Manifest]]:
    """Read the manifests of `data.train`. Raises UserError when there is none."""
    if not data.train:
        raise UserError("data.train is empty: name at least one prepared corpus, e.g. data.train='[{path: data/corpus}]'")
    return [(entry.path, read_manifest(entry.path)) for entry in data.train]
