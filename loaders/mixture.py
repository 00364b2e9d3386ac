"""Which row of which corpus is row r of step s: a pure function, built from Grain's index transformations.

Element g = s*B + r of a Grain `MapDataset` of row indices: per corpus a global shuffle (anew each epoch) repeated without end, then a
deterministic weighted mix, in which every corpus has its share of the rows from the first rows on. Grain holds weights in hundredths of
the smallest, so shares differ from the weights by at most 1 %. Only indices flow through it: a process looks up just its own rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from ridgeline.configs.errors import UserError

MAX_ROWS = 2**32 - 1
"""Grain's shuffle works on 32-bit indices."""


class Order:
    """Global row order over a weighted mixture of corpora with `num_rows` rows each."""

    def __init__(self, num_rows: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        for count in num_rows:
            if count > MAX_ROWS:
                raise UserError(f"a corpus of {count} rows is more than the shuffle's {MAX_ROWS}: split it into several in data.train")
        kept = [int(weight * (100 / min(weights))) for weight in weights]  # as Grain's mix does
        self.shares = tuple(weight / sum(kept) for weight in kept)
        """Share of each corpus in the rows."""
        sources = [self._endless(count, index, seed, shuffle) for index, count in enumerate(num_rows)]
        self._dataset: Any = sources[0] if len(sources) == 1 else grain.MapDataset.mix(sources, weights=list(weights))

    @staticmethod
    def _endless(count: int, index: int, seed: int, shuffle: bool) -> Any:
        """One corpus as (corpus, row) pairs without end; every corpus has a shuffle of its own."""
        rows: Any = grain.MapDataset.range(count)
        if shuffle:
            rows = rows.shuffle(seed=corpus_seed(seed, index))
        return rows.repeat().map(_Tag(index))

    def lookup(self, elements: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return corpus and row of global elements g [N]."""
        pairs = [self._dataset[int(g)] for g in elements]
        return np.array([corpus for corpus, _ in pairs]), np.array([row for _, row in pairs], np.int64)


class _Tag(grain.transforms.Map):
    """Pairs a row with its corpus."""

    def __init__(self, corpus: int) -> None:
        self.corpus = corpus

    def map(self, row: int) -> tuple[int, int]:
        return self.corpus, int(row)


def corpus_seed(seed: int, index: int) -> int:
    """Derive a corpus's 32-bit shuffle seed. Grain adds the epoch to it, so seeds of neighbours must not be neighbours."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "little")
