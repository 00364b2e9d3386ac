"""Inspection of a prepared corpus: document lengths, and rows as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ridgeline.loaders.documents import document_bounds
from ridgeline.loaders.manifest import CorpusError, Manifest, ShardInfo
from ridgeline.loaders.rows import Rows, RowSource
from ridgeline.loaders.token_reader import Shard, TokenReader
from ridgeline.loaders.tokenizers import Tokenizer, load_tokenizer

STATISTICS_TOKENS = 1 << 26
"""Length statistics read whole shards until they have this many tokens."""
READ_RECORDS = 256
PERCENTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths of documents in tokens, including BOS and EOS. In packed corpora, documents longer than a row count as their pieces."""

    shards: int
    """Shards read, from the first on."""
    documents: int
    mean: float
    shortest: int
    percentiles: dict[int, float]
    longest: int
    counted_share: float
    """Share of the tokens that count as targets."""


@dataclass(frozen=True)
class Segment:
    """A document, or a part of one, in a row."""

    text: str
    tokens: int
    counted: int
    """Targets with weight 1."""


@dataclass(frozen=True)
class SampleRow:
    """One row of a batch, or one conversation of a fine-tuning corpus."""

    row: int
    """Number of the row, or of the conversation."""
    segments: tuple[Segment, ...]
    padding: int
    """Padding tokens."""
    tokens: tuple[int, ...]
    """Ids, without padding."""
    weights: tuple[float, ...]
    """Of each token as a target: 1.0 if the loss counts it, else 0.0."""
    text: str
    """Decoded tokens, special tokens included."""
    runs: tuple[tuple[str, bool], ...]
    """The text in runs of tokens with equal weight: (text, whether the loss counts it)."""
    side: str | None = None
    """Of a preference pair: chosen or rejected."""


def length_statistics(directory: Path, manifest: Manifest, limit_tokens: int = STATISTICS_TOKENS) -> LengthStatistics:
    """Read shards from the first on until `limit_tokens` is reached, verifying every record.

    Raises CorpusError naming file and record.
    """
    lengths: list[np.ndarray] = []
    shards = tokens = counted = 0
    for info in manifest.shards:
        shard_lengths, shard_counted = _lengths(directory, info, manifest)
        lengths.append(shard_lengths)
        shards, tokens, counted = shards + 1, tokens + info.tokens, counted + shard_counted
        if tokens >= limit_tokens:
            break
    found = np.concatenate(lengths)
    return LengthStatistics(
        shards=shards,
        documents=len(found),
        mean=float(found.mean()),
        shortest=int(found.min()),
        percentiles={q: float(value) for q, value in zip(PERCENTILES, np.percentile(found, PERCENTILES), strict=True)},
        longest=int(found.max()),
        counted_share=counted / tokens,
    )


def _lengths(directory: Path, info: ShardInfo, manifest: Manifest) -> tuple[np.ndarray, int]:
    """Return the document lengths of a shard, int64 [documents], and the number of its tokens that count as targets."""
    shard = Shard(directory, info, manifest)
    starts: list[np.ndarray] = []
    counted = end = 0
    for first in range(0, info.records, READ_RECORDS):
        for record in shard.read(list(range(first, min(first + READ_RECORDS, info.records)))):
            starts.append(record.doc_starts.astype(np.int64) + end)  # stored tokens only: the padding of a packed row adds no length
            end += len(record.tokens)
            counted += len(record.tokens) if record.loss_mask is None else int(record.loss_mask.sum())
    shard.close()
    return np.diff(np.concatenate([*starts, [end]])), counted


def load_corpus_tokenizer(directory: Path, manifest: Manifest) -> Tokenizer:
    """Load the corpus's copy of its tokenizer. Raises CorpusError when its sha256 is not that of the manifest."""
    tokenizer = load_tokenizer(Path(directory) / manifest.tokenizer.path, manifest.tokenizer.kind)
    if tokenizer.sha256 != manifest.tokenizer.sha256:
        raise CorpusError(
            f"{Path(directory) / manifest.tokenizer.path} is not the tokenizer of {directory} "
            f"(its sha256 is {tokenizer.sha256[:12]}; the manifest lists {manifest.tokenizer.sha256[:12]})"
        )
    return tokenizer


def sample_rows(directory: Path, manifest: Manifest, *, seq_len: int, count: int, seed: int = 0) -> Iterator[SampleRow]:
    """Yield up to `count` random rows of `seq_len` tokens, split into segments and decoded."""
    source = RowSource(directory, seq_len, manifest=manifest)
    tokenizer = load_corpus_tokenizer(directory, manifest)
    chosen = np.sort(np.random.default_rng(seed).choice(source.num_rows, min(count, source.num_rows), replace=False))
    rows = source.read(chosen)
    for index, row in enumerate(chosen):
        real = rows["segment_ids"][index] > 0
        ids = rows["tokens"][index, real]
        counts = np.append(False, rows["weights"][index, :-1] > 0)[: len(ids)]  # the weight of a target is that of the next token
        yield _sample(tokenizer, int(row), ids, counts, tuple(_segments(rows, index, tokenizer)), int((~real).sum()))


def sample_conversations(directory: Path, manifest: Manifest, *, count: int, seed: int = 0) -> Iterator[SampleRow]:
    """Yield up to `count` random conversations of a chat corpus (of the first shards, if it is large), in order, each as a whole.

    Of preference pairs the chosen and the rejected conversation, until there are `count` in all.
    """
    reader, tokenizer = TokenReader(directory, manifest), load_corpus_tokenizer(directory, manifest)
    bounds = document_bounds(reader, STATISTICS_TOKENS)
    step = 2 if manifest.has_pairs else 1
    number = len(bounds) // step
    chosen = np.sort(np.random.default_rng(seed).choice(number, min(-(-count // step), number), replace=False))
    numbers = [int(first) * step + offset for first in chosen for offset in range(step)][:count]
    for document in numbers:
        start, stop = (int(place) for place in bounds[document])
        windows = reader.read([start], stop - start)
        counts = np.ones(stop - start, bool) if windows.mask is None else windows.mask[0]
        counts = counts & (np.arange(stop - start) > 0)  # nothing predicts the first token
        side = ("chosen", "rejected")[document % 2] if manifest.has_pairs else None
        segment = Segment(tokenizer.decode(windows.ids[0].tolist()), stop - start, int(counts.sum()))
        yield _sample(tokenizer, document // step, windows.ids[0], counts, (segment,), 0, side)


def _sample(
    tokenizer: Tokenizer,
    row: int,
    ids: np.ndarray,
    counts: np.ndarray,
    segments: tuple[Segment, ...],
    padding: int,
    side: str | None = None,
) -> SampleRow:
    tokens = ids.tolist()
    edges = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(tokens)]
    runs = [(tokenizer.decode_all(tokens[a:b]), bool(counts[a])) for a, b in itertools.pairwise(edges) if b > a]
    weights = tuple(counts.astype(float).tolist())
    return SampleRow(row, segments, padding, tuple(tokens), weights, tokenizer.decode_all(tokens), tuple(runs), side)


def _segments(rows: Rows, index: int, tokenizer: Tokenizer) -> Iterator[Segment]:
    ids = rows["segment_ids"][index]
    for segment in range(1, int(ids.max()) + 1):
        inside = ids == segment
        text = tokenizer.decode(rows["tokens"][index, inside].tolist())
        yield Segment(text, int(inside.sum()), int(rows["weights"][index, inside].sum()))
