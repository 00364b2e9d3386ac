"""Token shards: what is written is read back at any offset; damage is detected."""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.loaders.manifest import CorpusError, Manifest
from ridgeline.loaders.token_reader import TokenReader, verify_shards
from ridgeline.loaders.token_record import TokenRecord, decode_record, encode_record
from ridgeline.loaders.token_writer import TokenWriter
from tests.loaders.token_corpora import Doc, random_docs, write_corpus

SHARDS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 12)), min_size=1, max_size=3)


def record(vocab_size: int, mask: bool) -> TokenRecord:
    source = np.random.default_rng(vocab_size)
    tokens = source.integers(0, vocab_size, 37).astype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    return TokenRecord(tokens, np.array([0, 5, 36], np.uint32), source.random(37) < 0.5 if mask else None, 4096, 12, vocab_size)


@pytest.mark.parametrize("vocab_size", [300, 1 << 16, (1 << 16) + 1, 128_256])
@pytest.mark.parametrize("mask", [False, True])
def test_a_record_survives_its_encoding(vocab_size: int, mask: bool) -> None:
    written = record(vocab_size, mask)
    read = decode_record(encode_record(written))
    assert (read.first_token, read.first_position, read.vocab_size) == (4096, 12, vocab_size)
    assert read.tokens.dtype == written.tokens.dtype
    np.testing.assert_array_equal(read.tokens, written.tokens)
    np.testing.assert_array_equal(read.doc_starts, written.doc_starts)
    if written.loss_mask is None:
        assert read.loss_mask is None
    else:
        np.testing.assert_array_equal(read.loss_mask, written.loss_mask)


@pytest.mark.parametrize("mask", [False, True])
def test_every_flipped_bit_and_every_truncation_of_a_record_is_detected(mask: bool) -> None:
    data = encode_record(record(300, mask))
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(ValueError, match=r"checksum|magic|version|flags|length"):
                decode_record(bytes(damaged))
        with pytest.raises(ValueError, match=r"checksum|shorter|length"):
            decode_record(data[:place])


@settings(max_examples=40, deadline=None)
@given(SHARDS, st.integers(1, 40), st.integers(1, 50), st.sampled_from([0.0, 0.5]))
def test_windows_equal_slices_of_the_concatenated_documents(
    shards: list[tuple[int, int]], record_tokens: int, length: int, masked: float
) -> None:
    documents = [random_docs(seed, count, masked_share=masked) for seed, count in shards]
    stream = [
        (int(token), place == 0, True if doc.mask is None else bool(doc.mask[place]))
        for docs in documents
        for doc in docs
        for place, token in enumerate(doc.tokens)
    ]
    with tempfile.TemporaryDirectory() as directory:
        manifest = write_corpus(Path(directory), documents, record_tokens=record_tokens)
        assert manifest.tokens == len(stream) == manifest.stream_length
        starts = np.random.default_rng(0).permutation(len(stream))[:20]
        windows = TokenReader(Path(directory), manifest, verify=True).read(starts, length)
    for row, start in enumerate(starts):
        expected = stream[start : start + length]
        filled = len(expected)
        assert windows.ids[row].tolist() == [token for token, _, _ in expected] + [0] * (length - filled)
        assert windows.starts[row].tolist() == [first for _, first, _ in expected] + [True, *[False] * length][: length - filled]
        padding = np.zeros(length, bool) if windows.padding is None else windows.padding[row]
        assert padding.tolist() == [False] * filled + [True] * (length - filled)
        mask = np.ones(length, bool) if windows.mask is None else windows.mask[row]
        assert mask.tolist() == [counts for _, _, counts in expected] + [True] * (length - filled)


def test_a_record_stores_the_position_of_its_first_token(tmp_path: Path) -> None:
    docs = random_docs(3, 9)
    manifest = write_corpus(tmp_path, [docs], record_tokens=7)
    positions = [place for doc in docs for place in range(len(doc.tokens))]
    reader = TokenReader(tmp_path, manifest)
    records = reader._shard(0).read(list(range(manifest.shards[0].records)))
    assert [record.first_position for record in records] == positions[::7]
    assert [record.first_token for record in records] == list(range(0, len(positions), 7))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(2, 40), st.sampled_from([0.0, 0.5]))
def test_packed_rows_hold_whole_documents_and_every_target_once(seed: int, count: int, length: int, masked: float) -> None:
    docs = random_docs(seed, count, masked_share=masked)
    with tempfile.TemporaryDirectory() as directory:
        manifest = write_corpus(Path(directory), [docs], pack_length=length)
        rows = manifest.stream_length // length
        windows = TokenReader(Path(directory), manifest).read(np.arange(rows) * length, length)
    assert manifest.padding_share == pytest.approx(0 if windows.padding is None else windows.padding.mean())
    pieces = []
    for row in range(rows):
        end = length if windows.padding is None else length - int(windows.padding[row].sum())
        bounds = [*np.flatnonzero(windows.starts[row, :end]), end]
        assert bounds[0] == 0
        mask = np.ones(length, bool) if windows.mask is None else windows.mask[row]
        pieces += [(tuple(windows.ids[row, a:b]), tuple(mask[a:b])) for a, b in itertools.pairwise(bounds)]
    expected = []
    for doc in docs:
        counted = np.ones(len(doc.tokens), bool) if doc.mask is None else doc.mask
        cuts = [slice(start, start + length) for start in range(0, len(doc.tokens) - 1, length - 1)]
        expected += [(tuple(doc.tokens[cut]), tuple(counted[cut])) for cut in cuts]
        assert [token for cut in cuts for token in doc.tokens[cut][1:]] == list(doc.tokens[1:])  # each target in one piece
    assert sorted(pieces) == sorted(expected)


@pytest.mark.parametrize("token", [50, 1 << 40, -1])
@pytest.mark.parametrize("pack_length", [None, 8])
def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, token: int, pack_length: int | None) -> None:
    with TokenWriter(tmp_path, "a", vocab_size=50, pack_length=pack_length) as writer:
        writer.add(np.array([0, 49, 1]))
        with pytest.raises(UserError, match=rf"document 1 .*token id {token}\b.* 49"):
            writer.add(np.array([0, token, 1]))
        assert writer.close().documents == 1


def test_a_shard_without_documents_is_refused(tmp_path: Path) -> None:
    with TokenWriter(tmp_path, "a", vocab_size=50) as writer, pytest.raises(CorpusError, match="empty shard"):
        writer.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_naming_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/dev/full")
    writer = TokenWriter(tmp_path, "a", vocab_size=50)
    with pytest.raises(OSError, match="cannot write"):  # noqa: PT012 (where it surfaces depends on buffering)
        for _ in range(100):
            writer.add(np.zeros(4096, np.int64))
        writer.close()


def read_everything(directory: Path) -> np.ndarray:
    manifest = Manifest.read(directory)
    reader = TokenReader(directory, manifest)
    windows = reader.read(np.arange(0, manifest.stream_length, 16), 16)
    reader.close()
    return np.concatenate([windows.ids, windows.starts], axis=1)


def test_a_changed_byte_anywhere_is_found_by_verify_and_never_read_as_data(tmp_path: Path) -> None:
    """Damage in the padding between ArrayRecord's blocks leaves the records intact: reads may succeed then, but only with right data."""
    manifest = write_corpus(tmp_path, [random_docs(5, 200, longest=200)], record_tokens=256)
    path = tmp_path / manifest.shards[0].name
    data, right = path.read_bytes(), read_everything(tmp_path)
    source = np.random.default_rng(0)
    payload = source.choice(np.flatnonzero(np.frombuffer(data, np.uint8)), 150, replace=False)
    refused: list[str] = []
    for place in [*range(64), *payload, *source.integers(0, len(data), 30)]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(source.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(CorpusError, match="sha256"):
            verify_shards(tmp_path, manifest)
        try:
            np.testing.assert_array_equal(read_everything(tmp_path), right)
        except CorpusError as error:
            refused.append(str(error))
    assert all(path.name in message for message in refused)
    assert len(refused) > 150


def test_a_damaged_record_is_named_and_the_records_around_it_are_read(tmp_path: Path) -> None:
    docs = [Doc(np.random.default_rng(0).integers(0, 60000, 40960))]
    manifest = write_corpus(tmp_path, [docs], vocab_size=60000, record_tokens=4096)
    path = tmp_path / manifest.shards[0].name
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)
    reader = TokenReader(tmp_path, manifest)
    refused = {}
    for number in range(10):
        try:
            reader.read([number * 4096], 4096)
        except CorpusError as error:
            refused[number] = str(error)
    assert len(refused) == 1
    (number, message), *_ = refused.items()
    assert f"damaged record {number} of {path}" in message
    with pytest.raises(CorpusError, match=f"damaged record {number} of"):
        reader.read(np.arange(10) * 4096, 4096)  # one call for all of them names the same one


def test_missing_truncated_and_wrong_shards_are_named(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, [random_docs(6, 30), random_docs(7, 30)])
    first, second = (tmp_path / shard.name for shard in manifest.shards)
    data = {path: path.read_bytes() for path in (first, second)}

    second.unlink()
    with pytest.raises(CorpusError, match=f"missing shard: {second}"):
        TokenReader(tmp_path, manifest)
    second.write_bytes(data[second][:-10])
    with pytest.raises(CorpusError, match=rf"damaged shard: {second} has \d+ bytes; the manifest lists \d+"):
        TokenReader(tmp_path, manifest)
    assert len(data[first]) == len(data[second])  # ArrayRecord files grow in blocks: sizes alone do not distinguish shards
    second.write_bytes(data[first])
    with pytest.raises(CorpusError, match=rf"(wrong|damaged) shard: {second}"):
        TokenReader(tmp_path, manifest).read([manifest.shards[0].tokens], 4)
    second.write_bytes(os.urandom(len(data[second])))
    with pytest.raises(CorpusError, match=rf"damaged shard: {second} (cannot be opened|has \d+ records; the manifest lists \d+)"):
        TokenReader(tmp_path, manifest).read([manifest.shards[0].tokens], 4)
    second.write_bytes(data[second])
    TokenReader(tmp_path, manifest, verify=True).read([manifest.shards[0].tokens], 4)


def test_threads_and_copies_read_the_same(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, [random_docs(seed, 40) for seed in range(3)])
    reader = TokenReader(tmp_path, manifest)
    starts = np.arange(0, manifest.stream_length - 8, 5)
    right = reader.read(starts, 8).ids
    copy = pickle.loads(pickle.dumps(reader))
    with ThreadPoolExecutor(8) as pool:
        for ids in pool.map(lambda part: copy.read(part, 8).ids, [starts] * 24):
            np.testing.assert_array_equal(ids, right)
