"""Hostile config files: one line that names the file, in seconds, within bounded memory (tests/configs/hostile.py)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from tests.configs import hostile


def test_mutated_configs_are_shown_or_refused_by_name(tmp_path: Path) -> None:
    source = random.Random(0)
    drawn = [hostile.mutated(source) for _ in range(60)]
    found = {f"{number}: {name}": hostile.problem(tmp_path, content) for number, (name, content) in enumerate(drawn)}
    assert {name: what for name, what in found.items() if what is not None} == {}


@pytest.mark.parametrize("name", ["alias bomb", "deep flow", "too large", "base outside", "base long"])
def test_a_bomb_is_refused_before_it_expands(tmp_path: Path, name: str) -> None:
    assert hostile.problem(tmp_path, hostile.WHOLE[name].encode()) is None
    with pytest.raises(UserError):
        load(tmp_path / "config.yaml")


def test_bases_that_double_are_refused(tmp_path: Path) -> None:
    """2 ** 20 files to read."""
    for number in range(20):
        (tmp_path / f"{number}.yaml").write_text(f"base: [./{number + 1}, ./{number + 1}]\n")
    (tmp_path / "20.yaml").write_text("name: x\n")
    with pytest.raises(UserError, match=r"\.yaml:1: base: more than 50 files"):
        load(tmp_path / "0.yaml")


@pytest.mark.parametrize("value", ["!!int x", "!!float ''", "!!bool x", '"\\U00110000"', '"\\ud800"', "9" * 5000])
def test_a_scalar_that_cannot_be_read_is_named_by_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "a.yaml").write_text(f"base: [models/gpt2]\nname: {value}\n")
    with pytest.raises(UserError, match=r"a\.yaml:[12]: ") as refused:
        load(tmp_path / "a.yaml")
    assert len(str(refused.value)) < 300
