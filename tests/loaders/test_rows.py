"""Rows against a plain-Python reference, on random documents."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.loaders.documents import PairSource
from ridgeline.loaders.manifest import Manifest, ShardInfo
from ridgeline.loaders.rows import Rows, RowSource
from ridgeline.loaders.token_record import TokenRecord, edge_crc32, encode_record
from ridgeline.loaders.token_writer import WRITER_OPTIONS
from tests.loaders.token_corpora import Doc, random_docs, tokenizer_info, write_corpus

NAMES = ("tokens", "targets", "positions", "segment_ids", "weights")
Token = tuple[int, int, bool]
"""Id, document number, whether it counts as a target."""


def stream_of(docs: list[Doc]) -> list[Token]:
    return [
        (int(token), number, True if doc.mask is None else bool(doc.mask[place]))
        for number, doc in enumerate(docs)
        for place, token in enumerate(doc.tokens)
    ]


def reference_row(inputs: list[Token], following: Token | None, seq_len: int, document_masking: bool) -> dict[str, list[float]]:
    """One row, written out token by token from the Batch contract."""
    row: dict[str, list[float]] = {name: [] for name in NAMES}
    segment, position, last_document = 0, 0, None
    for place in range(seq_len):
        if place >= len(inputs):
            for name in NAMES:
                row[name].append(0)
            continue
        token, document, _ = inputs[place]
        target = inputs[place + 1] if place + 1 < len(inputs) else following
        if document_masking and document != last_document:
            segment, position, last_document = segment + 1, 0, document
        row["tokens"].append(token)
        row["targets"].append(0 if target is None else target[0])
        row["segment_ids"].append(segment if document_masking else 1)
        row["positions"].append(position if document_masking else place)
        counts = target is not None and target[2] and (target[1] == document or not document_masking)
        row["weights"].append(1.0 if counts else 0.0)
        position += 1
    return row


def assert_rows_equal(rows: Rows, expected: list[dict[str, list[float]]]) -> None:
    assert set(rows) == set(NAMES)
    for name in NAMES:
        assert rows[name].dtype == (np.float32 if name == "weights" else np.int32)
        assert rows[name].flags.c_contiguous
    for index, row in enumerate(expected):
        for name in ("tokens", "positions", "segment_ids", "weights"):
            assert rows[name][index].tolist() == row[name], name
        counted = np.array(row["weights"]) > 0  # a target that does not count may be anything that is a valid id
        assert rows["targets"][index][counted].tolist() == np.array(row["targets"])[counted].tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 12)), min_size=1, max_size=3),
    st.integers(1, 70),
    st.integers(3, 40),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
)
def test_stream_rows_equal_the_reference(
    shards: list[tuple[int, int]], seq_len: int, record_tokens: int, document_masking: bool, masked: float
) -> None:
    documents = [random_docs(seed, count, masked_share=masked) for seed, count in shards]
    stream = stream_of([doc for docs in documents for doc in docs])
    with tempfile.TemporaryDirectory() as directory:
        write_corpus(Path(directory), documents, record_tokens=record_tokens)
        source = RowSource(Path(directory), seq_len, document_masking=document_masking)
        rows = source.read(np.arange(source.num_rows))
    expected = []
    for start in range(0, len(stream) - 1, seq_len):
        following = stream[start + seq_len] if start + seq_len < len(stream) else None  # the stream's last token has no target
        expected.append(reference_row(stream[start : start + seq_len], following, seq_len, document_masking))
    assert source.num_rows == len(expected)
    assert_rows_equal(rows, expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 25), st.integers(2, 60), st.sampled_from([0.0, 0.5]))
def test_every_countable_target_counts_once_whether_packed_or_not(seed: int, count: int, seq_len: int, masked: float) -> None:
    """Over all rows, each document's token after the first is a counted target exactly once, unless it is masked."""
    docs = random_docs(seed, count, masked_share=masked)
    expected = sorted(int(t) for doc in docs for i, t in enumerate(doc.tokens) if i and (doc.mask is None or doc.mask[i]))
    for pack_length in (None, seq_len):
        with tempfile.TemporaryDirectory() as directory:
            write_corpus(Path(directory), [docs], pack_length=pack_length)
            source = RowSource(Path(directory), seq_len)
            rows = source.read(np.arange(source.num_rows))
        assert sorted(rows["targets"][rows["weights"] > 0].tolist()) == expected


def test_packed_rows_hold_documents_as_segments(tmp_path: Path) -> None:
    docs = [Doc(np.array([0, 10, 11, 1])), Doc(np.array([0, 20, 1])), Doc(np.array([0, 30, 31, 32, 1]))]
    write_corpus(tmp_path, [docs], pack_length=8)
    source = RowSource(tmp_path, 8)
    rows = source.read(np.arange(source.num_rows))
    # 5 opens a row, 4 does not fit beside it, 3 fills the first to 8
    assert rows["tokens"].tolist() == [[0, 20, 1, 0, 30, 31, 32, 1], [0, 10, 11, 1, 0, 0, 0, 0]]
    assert rows["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert rows["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 0, 0, 0, 0]]
    assert rows["weights"].tolist() == [[1, 1, 0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0]]
    assert rows["targets"][0, :2].tolist() == [20, 1]


def test_rows_are_read_in_the_requested_order(tmp_path: Path) -> None:
    write_corpus(tmp_path, [random_docs(seed, 20) for seed in range(3)])
    source = RowSource(tmp_path, 16)
    everything = source.read(np.arange(source.num_rows))
    wanted = np.random.default_rng(0).permutation(source.num_rows)
    for name, values in source.read(wanted).items():
        np.testing.assert_array_equal(values, everything[name][wanted])


def test_a_stored_token_outside_the_vocabulary_is_refused_when_read(tmp_path: Path) -> None:
    """The record is whole and its checksum right, so only the look at the ids themselves can find it."""
    data = encode_record(TokenRecord(np.array([0, 5, 50, 1], np.uint16), np.array([0, 2], np.uint32), None, 0, 0, vocab_size=50))
    shard = tmp_path / "tokens.arrayrecord"
    writer = ArrayRecordWriter(str(shard), WRITER_OPTIONS)
    writer.write(data)
    writer.close()
    content = shard.read_bytes()
    info = ShardInfo(shard.name, 1, 4, 1, 2, len(content), hashlib.sha256(content).hexdigest(), edge_crc32(data, data))
    manifest = Manifest(tokenizer_info(50), "uint16", 64, None, (info,))
    manifest.write(tmp_path)
    pairs = PairSource(tmp_path, 16, replace(manifest, parameters={"chat": {"pairs": True}}))
    for source in (RowSource(tmp_path, 16), pairs):
        with pytest.raises(UserError, match=rf"{tmp_path} has token id 50; its tokenizer has 50"):
            source.read(np.arange(source.num_rows))


def test_a_packed_corpus_needs_its_own_row_length_and_document_masking(tmp_path: Path) -> None:
    write_corpus(tmp_path, [random_docs(0, 10)], pack_length=64)
    with pytest.raises(UserError, match=r"packed in rows of 64 tokens: set data\.seq_len=64 \(it is 32\)"):
        RowSource(tmp_path, 32)
    with pytest.raises(UserError, match=r"data\.document_masking=false"):
        RowSource(tmp_path, 64, document_masking=False)
