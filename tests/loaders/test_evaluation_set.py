"""Held-out sets: every row once, in order, for any number of processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ridgeline.loaders.loader import open_evaluation_set
from ridgeline.loaders.manifest import CorpusError
from tests.loaders.token_corpora import random_docs, write_corpus


@pytest.mark.parametrize("pack_length", [None, 24])
def test_the_whole_set_once_and_padding_counts_nothing(tmp_path: Path, pack_length: int | None) -> None:
    docs = random_docs(0, 37)
    manifest = write_corpus(tmp_path, [docs[:20], docs[20:]], pack_length=pack_length)
    held_out = open_evaluation_set(tmp_path, seq_len=24, batch_size=7, rows=np.arange(7))
    batches = list(held_out)
    assert len(batches) == held_out.num_batches
    assert all(batch["tokens"].shape == (7, 24) for batch in batches)
    counted = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches])
    assert sorted(counted.tolist()) == sorted(int(token) for doc in docs for token in doc.tokens[1:])
    assert held_out.text_bytes == manifest.text_bytes == sum(len(doc.tokens) - 2 for doc in docs)
    assert all(not np.any(batch["weights"][batch["segment_ids"] == 0]) for batch in batches)


def test_the_set_comes_in_order_and_again_the_same(tmp_path: Path) -> None:
    docs = random_docs(1, 12)
    write_corpus(tmp_path, [docs])
    held_out = open_evaluation_set(tmp_path, seq_len=8, batch_size=3, rows=np.arange(3))
    stream = np.concatenate([doc.tokens for doc in docs])
    for _ in range(2):
        tokens = np.concatenate([batch["tokens"].ravel() for batch in held_out])
        np.testing.assert_array_equal(tokens[: len(stream) - 1], stream[:-1])
        assert not tokens[len(stream) :].any()


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_processes_share_the_rows_of_each_batch(tmp_path: Path, processes: int) -> None:
    """Some batches leave processes without a real row: these still deliver every batch, so that all stay in step."""
    write_corpus(tmp_path, [random_docs(2, 9, longest=20)])

    def read(rows: np.ndarray) -> list[dict[str, np.ndarray]]:
        return list(open_evaluation_set(tmp_path, seq_len=32, batch_size=8, rows=rows))

    whole = read(np.arange(8))
    parts = [read(rows) for rows in np.array_split(np.arange(8), processes)]
    for index, batch in enumerate(whole):
        for name, values in batch.items():
            np.testing.assert_array_equal(np.concatenate([part[index][name] for part in parts]), values)


def test_a_missing_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="corpus not found"):
        open_evaluation_set(tmp_path / "nowhere", seq_len=8, batch_size=2, rows=np.arange(2))
