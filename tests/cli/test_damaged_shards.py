"""Damaged token shards: a training and `ridge data inspect` refuse them with one line that names them (tests/cli/damaged_shards.py)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.cli import damaged_shards


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shards") / "root"
    damaged_shards.make(directory)
    return directory


def test_the_undamaged_corpus_is_read(root: Path) -> None:
    for command in damaged_shards.commands(root):
        assert damaged_shards.problem(root, damaged_shards.Case("none", lambda corpus: None, False, command)) is None, command


@pytest.mark.parametrize("seed", range(2))
def test_a_damaged_shard_is_refused_by_name(root: Path, seed: int) -> None:
    drawn = list(itertools.islice(damaged_shards.cases(root, seed, training=0), 50))
    found = {f"{case.damage}: {case.command}": damaged_shards.problem(root, case) for case in drawn}
    assert {case: what for case, what in found.items() if what is not None} == {}


def test_no_training_starts_on_a_file_that_the_manifest_does_not_list(root: Path) -> None:
    drawn = {
        case.damage.partition(", ")[2]: case for case in itertools.islice(damaged_shards.cases(root, 0, training=1), 400) if not case.listed
    }
    assert {"bit", "swapped", "outside", "longer", "FIFO", "endless device", "huge", "directory", "empty", "cut"} <= set(drawn)
    assert {name: damaged_shards.problem(root, case) for name, case in drawn.items()} == dict.fromkeys(drawn)
    assert not (root / "run").exists()
