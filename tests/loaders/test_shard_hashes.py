"""A shard is hashed at its first use and whenever its file has changed, and only then."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ridgeline.configs.schema import DataConfig
from ridgeline.loaders import shard_hashes
from ridgeline.loaders.loader import build_loader, open_evaluation_set
from ridgeline.loaders.manifest import CorpusError, Manifest
from ridgeline.loaders.shard_hashes import remember, verify
from tests.loaders.token_corpora import Doc, random_docs, write_corpus


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that were hashed."""
    names: list[str] = []
    real = shard_hashes.verify_shard

    def counted(path: Path, info: object) -> None:
        names.append(path.name)
        real(path, info)  # type: ignore[arg-type]

    monkeypatch.setattr(shard_hashes, "verify_shard", counted)
    return names


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, Manifest]:
    return tmp_path / "corpus", write_corpus(tmp_path / "corpus", [random_docs(0, 40), random_docs(1, 40)])


def rewrite_same_size(path: Path, directory: Path) -> None:
    """Replace the middle tokens of a shard: a valid file of the same size whose first and last record are unchanged."""
    docs = random_docs(0, 40)
    changed = [Doc(np.where((doc.tokens > 1) & (10 < number < 30), 51 - doc.tokens, doc.tokens)) for number, doc in enumerate(docs)]
    write_corpus(directory, [changed])
    data = (directory / "tokens-00000-of-00001.arrayrecord").read_bytes()
    assert len(data) == path.stat().st_size
    path.write_bytes(data)


def test_a_shard_rewritten_at_the_same_size_is_refused_before_a_batch(corpus: tuple[Path, Manifest], tmp_path: Path) -> None:
    directory, manifest = corpus
    data = DataConfig(train=[{"path": directory}], seq_len=16, batch_size=8)  # type: ignore[list-item]
    build_loader(data, seed=0, vocab_size=50, rows=np.arange(8)).close()
    first = directory / manifest.shards[0].name
    rewrite_same_size(first, tmp_path / "other")
    with pytest.raises(CorpusError, match=f"{first} does not have the sha256"):
        build_loader(data, seed=0, vocab_size=50, rows=np.arange(8))
    with pytest.raises(CorpusError, match=f"{first} does not have the sha256"):
        open_evaluation_set(directory, seq_len=16, batch_size=8, rows=np.arange(8))


def test_a_shard_is_hashed_once_and_again_when_it_changed(corpus: tuple[Path, Manifest], hashed: list[str]) -> None:
    directory, manifest = corpus
    first, second = (directory / shard.name for shard in manifest.shards)
    verify(directory, manifest)
    assert sorted(hashed) == [first.name, second.name]
    verify(directory, manifest)
    assert len(hashed) == 2
    os.utime(second, ns=(0, 0))
    verify(directory, manifest)
    assert hashed[2:] == [second.name]
    content = first.read_bytes()
    first.unlink()
    first.write_bytes(content)  # another inode or time
    verify(directory, manifest)
    assert hashed[3:] == [first.name]


def test_what_a_preparation_hashed_is_not_hashed_again(corpus: tuple[Path, Manifest], hashed: list[str]) -> None:
    directory, manifest = corpus
    remember(directory, manifest.shards)
    verify(directory, manifest)
    assert hashed == []


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b'[[1],2,3,4,5]\n{}\n[1]\n"x"\n', b"[" * 100_000 + b"\n"])
def test_a_damaged_or_unwritable_cache_only_costs_time(
    corpus: tuple[Path, Manifest], hashed: list[str], damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, manifest = corpus
    monkeypatch.setenv("RIDGE_CACHE", str(tmp_path / "cache"))
    verify(directory, manifest)
    (file,) = (tmp_path / "cache" / "shards").glob("*.jsonl")
    file.write_bytes(damage)
    verify(directory, manifest)
    verify(directory, manifest)
    assert len(hashed) == 4
    (tmp_path / "file").touch()
    monkeypatch.setenv("RIDGE_CACHE", str(tmp_path / "file"))
    verify(directory, manifest)
    assert len(hashed) == 6
