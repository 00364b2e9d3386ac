"""Hostile `KEY=VALUE` overrides: one line that names what is wrong and where, or a valid config (tests/configs/hostile_overrides.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load
from ridgeline.configs.yaml_tree import MAX_CONFIG_BYTES
from tests.configs import hostile_overrides as hostile
from tests.configs.hostile import bomb


def test_drawn_overrides_give_a_config_or_one_line() -> None:
    assert hostile.campaign(250, 0, hostile.CASES, hostile.problem) == {}


def test_long_values_are_read_or_refused_in_seconds() -> None:
    assert hostile.campaign(12, 0, hostile.LONG_CASES, hostile.problem) == {}


def test_a_misspelled_key_is_named_with_the_nearest_one() -> None:
    assert hostile.campaign(60, 0, hostile.TYPO_CASES, hostile.misspelling_problem) == {}


BAD = [
    (f"data.train.{'9' * 5000}.path=x", "data.train is a list; use an index"),
    ("data.train.²=x", "data.train is a list; use an index"),
    (f"name={'x' * MAX_CONFIG_BYTES}", f"at most {MAX_CONFIG_BYTES:,} are read"),
    (f"model.family={'x' * 5000}", "unknown model family 'xxx"),
    (f"{'a' * 5000}=1", "unknown key"),
    ("a\nb=1", r"override 'a\nb=1': a\nb: unknown key"),
    ("seed=*\udcff", r"override 'seed=*\udcff': not valid YAML"),
    (f"name=${{env:{'x' * 5000}}}", "is not allowed here"),
    (f"run_dir=${{env:{'x-' * 5000}}}", "unknown interpolation"),
    ("seed=!!python/object/apply:os.system ['true']", "the YAML tag"),
    ("seed=\0", "not valid YAML"),
    ("=1", "an override has the form section.key=value"),
    ("", "an override has the form section.key=value"),
    (" seed ", "an override has the form section.key=value"),
]


@pytest.mark.parametrize(("override", "expected"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_an_override_that_cannot_be_read_is_one_short_line(override: str, expected: str) -> None:
    with pytest.raises(UserError) as refused:
        load("models/gpt2", (override,), environment={})
    assert expected in str(refused.value)
    assert hostile.badly_refused(str(refused.value)) is None


def test_the_origin_of_a_value_is_one_comment(tmp_path: Path) -> None:
    case = ("models/gpt2", ("name=x # \n y: {",)), ("models/gpt2", ("run_dir=|\n  a\n  b",))
    for one in case:
        assert hostile.problem(one, tmp_path) is None


def test_aliases_that_multiply_are_refused_within_the_memory_limit(tmp_path: Path) -> None:
    override = f"mesh={bomb(9, 9)}"
    assert hostile.problem(("models/gpt2", (override,)), tmp_path) is None
    with pytest.raises(UserError, match=r"more than 50,000 values \(aliases expanded\)"):
        load("models/gpt2", (override,), environment={})
