"""The training loader and the evaluation set: the rows of each batch that this process reads, prefetched by Grain.

Row r of step s is a pure function of (manifests, seed, left-out batches, s, r): element g = b * B + r of a Grain `MapDataset` of row
indices, where b is s, or with batches that are left out the one of `SkippedBatches.batch_of`. So batches do not depend on the number of
processes, and the step is the whole state of the loader.

Legend: B global batch size in rows, N rows of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags

from ridgeline.configs.curriculum import phases
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import DataConfig, DataSource
from ridgeline.configs.tuning_schema import DistillationConfig
from ridgeline.loaders.documents import PairSource
from ridgeline.loaders.manifest import CorpusError, Manifest, TokenizerInfo, check_tokenizer, read_manifest
from ridgeline.loaders.mixture import Mixture
from ridgeline.loaders.rows import Rows, RowSource, with_future_targets
from ridgeline.loaders.shard_hashes import verify
from ridgeline.loaders.teacher import open_teacher
from ridgeline.loaders.workers import leave_signals_to_parent
from ridgeline.rundir.skipped_batches import NOTHING_SKIPPED, SkippedBatches

Source = RowSource | PairSource
"""What rows are read from."""
_WORKER, _PR_SET_NAME = "loader-", 15
"""Name of a worker process, before its number; prctl(2)."""
MAX_ROWS = 2**32 - 1
"""Grain's shuffle uses 32-bit indices."""


class Loader:
    """Endless iterator over local batches from `start_step` on. Created by `build_loader`.

    `wait_s` is the total time spent in `next`, `last_wait_s` the time for the last batch.
    """

    def __init__(self, steps: StepRows, tokenizer: TokenizerInfo, data: DataConfig, start_step: int) -> None:
        self.tokenizer = tokenizer
        self._steps = steps
        self._workers, self._taken, self._waiting = data.workers, 0, False
        self.rows_per_epoch = sum(source.num_rows for source in steps.sources)
        """Rows of all corpora."""
        self.wait_s = self.last_wait_s = 0.0
        dataset: Any = steps[start_step:].to_iter_dataset(
            grain.ReadOptions(num_threads=data.threads if data.workers == 0 else 1, prefetch_buffer_size=data.prefetch)
        )
        if data.workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # Grain reads absl flags when it starts workers, which fails in a program without them
            options = grain.MultiprocessingOptions(num_workers=data.workers, per_worker_buffer_size=data.prefetch)
            dataset = dataset.mp_prefetch(options, worker_init_fn=_start_worker)
        self._iterator: Any = iter(dataset)

    def __iter__(self) -> Iterator[Rows]:
        return self

    def __next__(self) -> Rows:
        start_s, self._waiting = time.perf_counter(), True
        try:
            rows: Rows = next(self._iterator)
        except CorpusError as error:
            # Without the traceback: its frames would keep the workers' batches, and so their shared memory, until the process exits.
            raise error.with_traceback(None) from None
        finally:
            self._waiting = False
        self._taken += 1
        self.last_wait_s = time.perf_counter() - start_s
        self.wait_s += self.last_wait_s
        return rows

    def awaited_worker(self) -> tuple[int, int] | None:
        """Return the number and the process id of the worker process that is to give the next batch; None where nothing waits for one."""
        if not self._waiting or not self._workers:
            return None
        number = self._taken % self._workers  # Grain takes batches from its workers in turn
        for process in multiprocessing.active_children():
            with contextlib.suppress(OSError):
                if process.pid is not None and Path(f"/proc/{process.pid}/comm").read_text().strip() == f"{_WORKER}{number}":
                    return number, process.pid
        return None

    def epochs(self, step: int) -> dict[str, float]:
        """Return corpus path -> epochs read after `step` steps."""
        return self._steps.epochs(step)

    def close(self) -> None:
        """Stop the reader threads and worker processes."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class StepRows(grain.MapDataset):
    """Element s is this process's rows of step s, read with one call per shard."""

    def __init__(
        self,
        sources: Sequence[Source],
        order: Order,
        batch_size: int,
        rows: np.ndarray,
        skipped: SkippedBatches = NOTHING_SKIPPED,
        mtp_layers: int = 0,
    ) -> None:
        """`order`: of the units of the sources: rows, or pairs of rows."""
        super().__init__()
        self._skipped, self._mtp_layers = skipped, mtp_layers
        self.sources, self._order, self._unit = list(sources), order, sources[0].unit
        self._batch_size, self._rows = batch_size, np.asarray(rows, np.int64)

    def __len__(self) -> int:
        return sys.maxsize // self._batch_size

    def epochs(self, step: int) -> dict[str, float]:
        """Return corpus path -> rows drawn after `step` steps, in epochs."""
        drawn = self._order.counts(self._skipped.batch_of(step) * self._batch_size // self._unit)
        return {str(source.directory): self._unit * count / source.num_rows for source, count in zip(self.sources, drawn, strict=True)}

    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return self.slice(step)
        corpora, units = self._order.lookup((self._skipped.batch_of(int(step)) * self._batch_size + self._rows) // self._unit)
        rows = units * self._unit + self._rows % self._unit
        if len(self.sources) == 1:
            return with_future_targets(self.sources[0].read(rows), self._mtp_layers)
        batch: Rows = {}
        for corpus in np.unique(corpora):
            at = corpora == corpus
            for name, values in self.sources[corpus].read(rows[at]).items():
                batch.setdefault(name, np.empty((len(rows), *values.shape[1:]), values.dtype))[at] = values
        return with_future_targets(batch, self._mtp_layers)


def _start_worker(index: int, count: int) -> None:
    """Grain's hook at the start of worker `index` of `count`. Names it (in `top` and `ps`, and for awaited_worker)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{_WORKER}{index}".encode(), 0, 0, 0)
    leave_signals_to_parent()


class Order:
    """Global row order over a weighted mixture of corpora with `num_rows` rows each.

    Each corpus has a global shuffle, new in each epoch and repeated without end. A deterministic weighted mix follows, in which every
    corpus has its share from the first rows on (loaders/mixture.py). Only indices are processed: a process looks up its own rows.
    """

    def __init__(
        self,
        num_rows: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        """`changes`: (element, weights from it on), ascending."""
        for count in num_rows:
            if count > MAX_ROWS:
                raise UserError(f"a corpus has {count} rows; the shuffle supports {MAX_ROWS}: split it into several entries of data.train")
        self._mixture = Mixture([(0, weights), *changes])
        self._corpora = [self._endless(count, index, seed, shuffle) for index, count in enumerate(num_rows)]

    @staticmethod
    def _endless(count: int, index: int, seed: int, shuffle: bool) -> Any:
        """Return the rows of one corpus without end, with its own shuffle."""
        rows: Any = grain.MapDataset.range(count)
        if shuffle:
            rows = rows.shuffle(seed=corpus_seed(seed, index))
        return rows.repeat()

    def lookup(self, elements: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus and the row of global elements [N], int64 each."""
        found = [self._mixture.find(int(g)) for g in elements]
        rows = [self._corpora[corpus][number] for corpus, number in found]
        return np.array([corpus for corpus, _ in found], np.int64), np.array(rows, np.int64)

    def counts(self, elements: int) -> list[int]:
        """Return how many of the first `elements` are of each corpus."""
        return self._mixture.counts(elements)


def corpus_seed(seed: int, index: int) -> int:
    """Return a corpus's 32-bit shuffle seed. Grain adds the epoch to it, so seeds of different corpora must not be consecutive."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "little")


def build_loader(
    data: DataConfig,
    *,
    seed: int,
    vocab_size: int,
    rows: np.ndarray,
    start_step: int = 0,
    pairs: Mapping[Path, PairSource] | None = None,
    distillation: DistillationConfig | None = None,
    mtp_layers: int = 0,
    skipped: SkippedBatches = NOTHING_SKIPPED,
) -> Loader:
    """Open the mixture of `data.train` with its `data.curriculum`.

    Args:
      data: corpora, sequence length, global batch size, reader settings.
      seed: of the shuffle.
      vocab_size: of the model; a tokenizer with more ids raises an error.
      rows: the rows of the global batch that this process reads (sorted, int64 [N]).
      start_step: step of the first batch.
      pairs: path -> source of each corpus, to draw preference pairs: rows 2k and 2k + 1 of a batch are a pair. None: to draw rows.
      distillation: of the config; None: without the predictions of a teacher.
      mtp_layers: of the model: with the targets of its modules of multi-token prediction.
      skipped: batches that are left out. A curriculum follows the batches.

    Raises UserError for missing data, different tokenizers or ids outside the vocabulary; CorpusError for missing or damaged shards, also
    while iterating.
    """
    manifests = read_manifests(data)
    tokenizer = check_tokenizer(manifests, vocab_size)
    for path, manifest in manifests:
        verify(path, manifest)

    def open_rows(entry: DataSource, manifest: Manifest) -> RowSource:
        teacher = open_teacher(entry, manifest, data, distillation or DistillationConfig())
        return RowSource(entry.path, data.seq_len, document_masking=data.document_masking, manifest=manifest, teacher=teacher)

    sources: list[Source] = [
        open_rows(entry, manifest) if pairs is None else pairs[path] for entry, (path, manifest) in zip(data.train, manifests, strict=True)
    ]
    unit = sources[0].unit
    (_, weights), *later = phases(data)
    changes = [(step * data.batch_size // unit, changed) for step, changed in later]
    order = Order([source.num_rows // unit for source in sources], weights, seed=seed, shuffle=data.shuffle, changes=changes)
    return Loader(StepRows(sources, order, data.batch_size, rows, skipped, mtp_layers), tokenizer, data, start_step)


def read_manifests(data: DataConfig) -> list[tuple[Path, Manifest]]:
    """Read the manifests of `data.train`. Raises UserError when there is none."""
    if not data.train:
        raise UserError("data.train is empty; set at least one prepared corpus, such as data.train='[{path: data/corpus}]'")
    return [(entry.path, read_manifest(entry.path)) for entry in data.train]


class EvaluationSet:
    """One pass over a corpus in order, in batches of `batch_size` global rows, of which this process reads `rows`.

    The last batch is padded with rows of weight 0, so that every process has the same number of batches.
    """

    def __init__(self, source: Source, batch_size: int, rows: np.ndarray) -> None:
        """`batch_size`: even for preference pairs."""
        self.pairs = source.unit == 2
        """Whether rows 2k and 2k + 1 are a preference pair."""
        self._source, self._batch_size, self._rows = source, batch_size, np.asarray(rows, np.int64)
        self.tokenizer = source.manifest.tokenizer
        self.num_batches = -(-source.num_rows // batch_size)
        masked = source.manifest.masked
        self.text_bytes = source.manifest.counted_bytes if masked or source.document_masking else source.manifest.text_bytes
        """UTF-8 bytes of the text of the target tokens; None: unknown."""
        self.gzip9_bytes = None if masked else source.manifest.gzip9_bytes
        """Summed `gzip -9` size of the documents; None: not measured, or (fine-tuning) of other text than the targets'."""

    def __iter__(self) -> Iterator[Rows]:
        dataset = grain.MapDataset.range(self.num_batches).map(self.batch)
        return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))

    def batch(self, index: int) -> Rows:
        """Read this process's rows of batch `index`; rows past the end are zero: segment 0, weight 0."""
        wanted = int(index) * self._batch_size + self._rows
        exists = wanted < self._source.num_rows
        read = self._source.read(wanted[exists])
        if exists.all():
            return read
        return {name: self._padded(values, exists) for name, values in read.items()}

    @staticmethod
    def _padded(values: np.ndarray, exists: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(exists), values.shape[1]), values.dtype)
        padded[exists] = values
        return padded


def open_evaluation_set(
    path: Path, *, seq_len: int, batch_size: int, rows: np.ndarray, document_masking: bool = True, pairs: PairSource | None = None
) -> EvaluationSet:
    """Open a held-out set. `pairs`: its source if it has preference pairs. Raises CorpusError when it is missing or damaged."""
    manifest = read_manifest(path)
    verify(path, manifest)
    if pairs is not None:
        return EvaluationSet(pairs, batch_size, rows)
    source = RowSource(path, seq_len, document_masking=document_masking, manifest=manifest)
    return EvaluationSet(source, batch_size, rows)
