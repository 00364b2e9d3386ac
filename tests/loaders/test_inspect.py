"""Inspection of a corpus: document statistics and sample rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ridgeline.loaders.inspect import length_statistics, load_corpus_tokenizer, sample_rows
from ridgeline.loaders.manifest import CorpusError, Manifest
from ridgeline.loaders.tokenizers import ByteTokenizer
from tests.loaders.token_corpora import Doc, random_docs, write_corpus

TEXTS = ["first document", "zweites größeres Dokument", "3", "def four():\n    return 4\n" * 5]


def text_corpus(directory: Path, pack_length: int | None = None) -> Manifest:
    """A corpus of TEXTS as bytes."""
    tokenizer = ByteTokenizer()
    docs = [Doc(np.array([tokenizer.bos_id, *text.encode(), tokenizer.eos_id])) for text in TEXTS]
    written = write_corpus(directory, [docs], vocab_size=tokenizer.vocab_size, sha256=tokenizer.sha256, pack_length=pack_length)
    tokenizer.save_copy(directory / "tokenizer")
    return written


@pytest.mark.parametrize("pack_length", [None, 64])
def test_length_statistics_are_those_of_the_documents(tmp_path: Path, pack_length: int | None) -> None:
    docs = random_docs(0, 90, masked_share=0.3)
    manifest = write_corpus(tmp_path, [docs[:50], docs[50:]], pack_length=pack_length)
    lengths = np.array([len(doc.tokens) for doc in docs])
    found = length_statistics(tmp_path, manifest)
    assert (found.shards, found.documents, found.shortest, found.longest) == (2, 90, lengths.min(), lengths.max())
    assert found.mean == pytest.approx(lengths.mean())
    assert found.percentiles == {q: pytest.approx(np.percentile(lengths, q)) for q in (5, 25, 50, 75, 95)}
    counted = sum(len(doc.tokens) if doc.mask is None else int(doc.mask.sum()) for doc in docs)
    assert found.counted_share == pytest.approx(counted / lengths.sum())


def test_statistics_of_a_large_corpus_stop_after_whole_shards(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, [random_docs(seed, 10) for seed in range(4)])
    found = length_statistics(tmp_path, manifest, limit_tokens=manifest.shards[0].tokens + 1)
    assert (found.shards, found.documents) == (2, 20)


def test_sample_rows_show_the_text_split_at_documents(tmp_path: Path) -> None:
    manifest = text_corpus(tmp_path, pack_length=192)
    (row,) = sample_rows(tmp_path, manifest, seq_len=192, count=5)
    assert [segment.text for segment in row.segments] == TEXTS
    assert [segment.counted for segment in row.segments] == [len(text.encode()) + 1 for text in TEXTS]
    assert sum(segment.tokens for segment in row.segments) + row.padding == 192


def test_sample_rows_of_a_stream_are_random_but_the_same_for_a_seed(tmp_path: Path) -> None:
    manifest = text_corpus(tmp_path)
    rows = [[row.row for row in sample_rows(tmp_path, manifest, seq_len=8, count=3, seed=seed)] for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]
    whole = "".join(segment.text for row in sample_rows(tmp_path, manifest, seq_len=8, count=1000) for segment in row.segments)
    assert whole.startswith("first documentzweites gr")
    assert whole.endswith(TEXTS[-1])


def test_another_tokenizer_in_the_corpus_is_refused(tmp_path: Path) -> None:
    manifest = text_corpus(tmp_path)
    other = replace(manifest, tokenizer=replace(manifest.tokenizer, sha256="f" * 64))
    with pytest.raises(CorpusError, match=r"tokenizer is not .* sha256 .* ffffffffffff"):
        load_corpus_tokenizer(tmp_path, other)
