"""How many documents of one corpus are in another, by content: the corpora may differ in paths, shards and order.

Both are sampled, within a number of tokens and a time. A document is compared by the hash of its first PREFIX tokens without BOS; those
shorter than SHORTEST, and those whose end is in another record, are left out.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

import numpy as np

from ridgeline.loaders.manifest import Manifest
from ridgeline.loaders.token_reader import TokenReader
from ridgeline.loaders.token_record import TokenRecord

PREFIX, SHORTEST = 512, 16
"""Tokens."""
LIMIT_TOKENS = 16_000_000
"""Most that is read of a corpus."""
BATCH = 16
"""Records read at once."""


@dataclass(frozen=True)
class Sample:
    """Hashes of documents of a corpus."""

    hashes: frozenset[bytes]
    read_share: float
    """Share of the corpus that was read."""


@dataclass(frozen=True)
class Overlap:
    """Documents of a sample that are in another corpus."""

    documents: int
    """Different ones in the sample."""
    found: int
    """Those that are in the part of the other corpus that was read."""
    read_share: float
    """That part."""

    @property
    def share(self) -> float:
        """Estimate of the share of the documents that are in the whole other corpus, each once."""
        return min(1.0, self.found / (self.documents * self.read_share)) if self.documents else 0.0


def sample(
    directory: Path, manifest: Manifest, limit_s: float, *, limit_tokens: int = LIMIT_TOKENS, clock: Callable[[], float] = time.monotonic
) -> Sample:
    """Hash the documents of random records, the same ones at every call, within the limits. Raises CorpusError."""
    ends = list(accumulate(shard.records for shard in manifest.shards))
    chosen = random.Random(0).sample(range(ends[-1]), min(ends[-1], max(1, limit_tokens // manifest.record_tokens)))
    hashes: set[bytes] = set()
    reader, end_s, read = TokenReader(directory, manifest), clock() + limit_s, 0
    try:
        for start in range(0, len(chosen), BATCH):
            shards = [(bisect_right(ends, number), number) for number in chosen[start : start + BATCH]]
            for record in reader.records([(shard, number - ends[shard] + manifest.shards[shard].records) for shard, number in shards]):
                hashes.update(_hashes(record, manifest.tokenizer.bos_id, manifest.tokenizer.eos_id))
                read += len(record.tokens)
            if clock() > end_s:
                break
    finally:
        reader.close()
    return Sample(frozenset(hashes), read / manifest.tokens if manifest.tokens else 1.0)


def overlap(held: Sample, other: Sample) -> Overlap:
    """Compare the documents of a sample with those of another corpus."""
    return Overlap(len(held.hashes), len(held.hashes & other.hashes), other.read_share)


def _hashes(record: TokenRecord, bos_id: int, eos_id: int) -> Iterator[bytes]:
    tokens, starts = record.tokens, record.doc_starts.tolist()
    complete = bool(len(tokens)) and int(tokens[-1]) == eos_id
    for start, end in zip(starts, [*starts, len(tokens)][1:], strict=True):
        begin = start + (int(tokens[start]) == bos_id and bos_id != eos_id)
        cut = min(end, begin + PREFIX)
        if cut - begin >= SHORTEST and (end < len(tokens) or complete or cut - begin == PREFIX):
            yield blake2b(tokens[begin:cut].astype(np.uint32).tobytes(), digest_size=8).digest()
