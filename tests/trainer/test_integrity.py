"""The integrity manifest: what it catches and what it costs nothing to catch."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.trainer.checkpoint import integrity
from ridgeline.trainer.checkpoint.integrity import FileDigest


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    root = tmp_path / "step"
    (root / "deep" / "er").mkdir(parents=True)
    rng = random.Random(0)
    for name, size in {"a": 1, "empty": 0, "deep/b": 100_000, "deep/er/c": 5 << 20}.items():
        (root / name).write_bytes(rng.randbytes(size))
    seal(root)
    return root


def seal(root: Path) -> None:
    sizes = integrity.list_files(root)
    digests = integrity.digest_files(root, sizes, threads=2)
    integrity.write_manifest(root, {name: FileDigest(sizes[name], digests[name]) for name in sizes})


def reasons(root: Path) -> set[tuple[str, str]]:
    return {(damage.reason, damage.file) for damage in integrity.verify(root)}


def test_untouched_directory_is_good(sealed: Path) -> None:
    assert integrity.verify(sealed) == []


def test_digests_are_those_of_coreutils(sealed: Path) -> None:
    manifest = integrity.read_manifest(sealed)
    for name, entry in manifest.items():
        expected = subprocess.run(["sha256sum", sealed / name], capture_output=True, text=True, check=True).stdout.split()[0]
        assert entry == FileDigest((sealed / name).stat().st_size, expected)


def test_each_kind_of_damage_is_named_with_its_file(sealed: Path) -> None:
    (sealed / "a").unlink()
    (sealed / "deep" / "new").write_text("?")
    (sealed / "deep" / "b").write_bytes(b"short")
    assert reasons(sealed) == {("missing", "a"), ("extra", "deep/new"), ("size", "deep/b")}


def test_changed_content_of_the_same_size_is_caught(sealed: Path) -> None:
    (sealed / "a").write_bytes(bytes([(sealed / "a").read_bytes()[0] ^ 1]))
    assert reasons(sealed) == {("sha256", "a")}


def test_a_file_that_became_a_directory_is_caught(sealed: Path) -> None:
    (sealed / "a").unlink()
    (sealed / "a").mkdir()
    assert reasons(sealed) == {("missing", "a")}


def test_missing_manifest_is_damage(sealed: Path) -> None:
    (sealed / integrity.MANIFEST).unlink()
    assert reasons(sealed) == {("manifest", integrity.MANIFEST)}


def test_every_single_bit_of_the_manifest_is_guarded(tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    (root / "a").write_text("content")
    seal(root)
    whole = (root / integrity.MANIFEST).read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (root / integrity.MANIFEST).write_bytes(damaged)
        assert integrity.verify(root), f"bit {bit}"


def test_every_truncation_of_the_manifest_is_caught(tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    (root / "a").write_text("content")
    seal(root)
    whole = (root / integrity.MANIFEST).read_bytes()
    for length in range(len(whole)):
        (root / integrity.MANIFEST).write_bytes(whole[:length])
        assert integrity.verify(root), f"length {length}"


def test_a_manifest_that_lists_less_but_is_consistent_is_still_caught_by_the_extra_file(sealed: Path) -> None:
    manifest = integrity.read_manifest(sealed)
    integrity.write_manifest(sealed, {name: entry for name, entry in manifest.items() if name != "a"})
    assert reasons(sealed) == {("extra", "a")}


@given(st.dictionaries(st.text("abc/", min_size=1), st.integers(0, 1 << 40)), st.integers(1, 9))
def test_shares_partition_the_files_and_balance_the_bytes(sizes: dict[str, int], count: int) -> None:
    shares = [integrity.share(sizes, index, count) for index in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0) + 4096 * len(sizes)
