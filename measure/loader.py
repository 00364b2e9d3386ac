"""Time the loader alone, and how long a training step of a given duration would wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import DataConfig
from ridgeline.loaders.documents import PairSource
from ridgeline.loaders.loader import build_loader, read_manifests
from ridgeline.loaders.manifest import check_tokenizer


@dataclass(frozen=True)
class LoaderResult:
    """One measurement of one process."""

    step_s: float
    """Duration of the simulated step between two batches; 0: no step, the loader's own speed."""
    batches: int
    rows_per_batch: int
    """Rows of this process."""
    seq_len: int
    first_batch_s: float
    """From opening the corpora to the first batch."""
    wall_s: float
    """All batches after the warm-up, steps included."""
    wait_s: float
    """Part of `wall_s` spent waiting for the loader."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of this process."""
        return self.batches * self.rows_per_batch * self.seq_len / self.wall_s

    @property
    def wait_share(self) -> float:
        """Share of `wall_s` spent waiting."""
        return self.wait_s / self.wall_s


def measure_loader(
    data: DataConfig,
    *,
    step_s: float = 0.0,
    batches: int = 200,
    processes: int = 1,
    seed: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> LoaderResult:
    """Read `batches` batches as process 0 of `processes`, sleeping `step_s` after each to simulate a training step.

    The batches that the loader prefetches are read before the clock starts.
    Raises UserError for a batch size that does not divide over the processes, and for whatever `build_loader` rejects.
    """
    if data.batch_size % processes:
        raise UserError(f"data.batch_size={data.batch_size} does not divide over {processes} processes")
    manifests = read_manifests(data)
    vocab_size = check_tokenizer(manifests).vocab_size
    pairs = {path: PairSource(path, data.seq_len, manifest) for path, manifest in manifests if manifest.has_pairs}
    rows = np.arange(data.batch_size // processes)
    opened_s = time.perf_counter()
    loader = build_loader(data, seed=seed, vocab_size=vocab_size, rows=rows, pairs=pairs or None)
    try:
        next(loader)
        first_batch_s = time.perf_counter() - opened_s
        for _ in range(data.prefetch * max(1, data.workers)):
            next(loader)
        waited_s, start_s = loader.wait_s, time.perf_counter()
        for _ in range(batches):
            next(loader)
            if step_s:
                sleep(step_s)
        wall_s = time.perf_counter() - start_s
        return LoaderResult(step_s, batches, len(rows), data.seq_len, first_batch_s, wall_s, loader.wait_s - waited_s)
    finally:
        loader.close()
