"""A resume with a changed config: what it says, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.loaders.manifest import check_same_tokenizer
from ridgeline.trainer.start import check_resume


def dump(**sections: Any) -> dict[str, Any]:
    return Config(**sections).model_dump(mode="json")


def test_an_unchanged_config_lists_nothing() -> None:
    assert check_resume(dump(), dump()) == []


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ({"model": {"embed_dim": 128}}, {"model": {"embed_dim": 256}}, "model.embed_dim: 128 -> 256"),
        ({"model": {"num_layers": 2}}, {"model": {"num_layers": 3}}, "model.num_layers: 2 -> 3"),
        ({"model": {"vocab_size": 512}}, {"model": {"vocab_size": 513}}, "model.vocab_size: 512 -> 513"),
        ({"optimizer": {"kind": "adamw"}}, {"optimizer": {"kind": "lion"}}, "optimizer.kind: 'adamw' -> 'lion'"),
        ({}, {"precision": {"params": "bfloat16"}}, "precision.params: 'float32' -> 'bfloat16'"),
    ],
)
def test_what_makes_the_checkpoint_wrong_is_refused_with_both_values(old: dict[str, Any], new: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        check_resume(dump(**old), dump(**new))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_every_refused_change_is_named_at_once() -> None:
    with pytest.raises(UserError, match=r"model\.embed_dim.*optimizer\.kind"):
        check_resume(dump(), dump(model={"embed_dim": 512}, optimizer={"kind": "sgd"}))


@pytest.mark.parametrize(
    "new",
    [
        {"trainer": {"steps": 77}},
        {"mesh": {"fsdp": 4}},
        {"compute": {"loss_chunk": 64}},
        {"optimizer": {"learning_rate": 0.5}},
        {"checkpoint": {"every": 3}},
        {"trainer": {"accumulation": 2}},
    ],
)
def test_the_rest_is_allowed_and_listed_with_both_values(new: dict[str, Any]) -> None:
    ((section, fields),) = new.items()
    ((field, value),) = fields.items()
    before = dump()[section][field]
    (line,) = check_resume(dump(), dump(**new))
    assert line.startswith(f"resuming with {section}.{field}: {before!r} -> {value!r}")


@pytest.mark.parametrize(
    ("runtime", "changes_numbers"),
    [
        ({"compilation_cache": "cache"}, False),
        ({"rendezvous_timeout_s": 5.0}, False),
        ({"platform": "cpu"}, True),
        ({"cpu_devices": 4}, True),
    ],
)
def test_other_rounding_is_reported_only_of_settings_that_change_numbers(runtime: dict[str, Any], changes_numbers: bool) -> None:
    (line,) = check_resume(dump(), dump(runtime=runtime))
    assert ("not bitwise equal" in line) == changes_numbers


def test_another_tokenizer_is_refused() -> None:
    check_same_tokenizer("a" * 64, "a" * 64, "the checkpoint")
    check_same_tokenizer(None, "a" * 64, "the checkpoint")
    with pytest.raises(UserError, match=r"tokenizer.*bbbbbbbbbbbb.*the checkpoint.*aaaaaaaaaaaa"):
        check_same_tokenizer("a" * 64, "b" * 64, "the checkpoint")


def test_a_derived_value_may_be_left_out_or_spelt_out() -> None:
    old = Config.model_validate({"model": {"embed_dim": 64, "num_heads": 4, "head_dim": 16, "num_kv_heads": 4}}).model_dump(mode="json")
    new = Config.model_validate({"model": {"embed_dim": 64, "num_heads": 4}}).model_dump(mode="json")
    assert all("given or derived" in line for line in check_resume(old, new))
    with pytest.raises(UserError, match=r"model\.head_dim"):
        check_resume(old, Config.model_validate({"model": {"embed_dim": 64, "num_heads": 4, "head_dim": 32}}).model_dump(mode="json"))
