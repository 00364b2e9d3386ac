"""Showing, dumping and comparing resolved configs, and the JSON Schema."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from ridgeline.configs.compose import CLUSTERS, FAMILIES, PACKAGE, shipped_names
from ridgeline.configs.diff import MISSING, classify_changes, diff
from ridgeline.configs.dump import to_commented_yaml, to_json, to_yaml
from ridgeline.configs.errors import UserError
from ridgeline.configs.fields import schema_keys
from ridgeline.configs.json_schema import json_schema
from ridgeline.configs.load import from_resolved, load
from ridgeline.configs.schema import MESH_AXES, Config

TEXT = st.text(min_size=1, max_size=12)
NAMES = st.builds(
    str.__add__, st.sampled_from(string.ascii_letters + string.digits), st.text(string.ascii_letters + string.digits + "._-", max_size=8)
)
POSITIVE = st.floats(min_value=0, max_value=1e12, exclude_min=True)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "name": NAMES | st.sampled_from(["null", "true", "1e5", "0x1F", "1_000", "2026-01-02", "12", "1.5", "no", "0o17"]),
        "seed": st.integers(0, 2**31 - 1),
        "run_dir": st.none() | TEXT,
        "optimizer": st.fixed_dictionaries({"learning_rate": POSITIVE, "clip_norm": st.none() | POSITIVE}),
        "schedule": st.fixed_dictionaries({"final_fraction": st.floats(0, 1)}),
        "evaluation": st.fixed_dictionaries({"sets": st.dictionaries(NAMES, TEXT, max_size=3)}),
        "data": st.fixed_dictionaries(
            {"train": st.lists(st.fixed_dictionaries({"path": TEXT}, optional={"weight": POSITIVE}), max_size=3), "shuffle": st.booleans()}
        ),
        "compute": st.fixed_dictionaries({"remat": st.fixed_dictionaries({"names": st.lists(TEXT, max_size=3)})}),
        "model": st.fixed_dictionaries({}, optional={"rope_scaling": st.none() | st.fixed_dictionaries({"factor": st.floats(1, 64)})}),
        "mesh": st.fixed_dictionaries({"rules": st.dictionaries(TEXT, st.lists(st.sampled_from(MESH_AXES), max_size=2), max_size=3)}),
    },
)


@settings(max_examples=150, deadline=None)
@given(values=CONFIGS)
def test_a_dumped_config_loads_back_equal(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    config = Config.model_validate(values)
    path = tmp_path_factory.getbasetemp() / "roundtrip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert from_resolved(path) == config


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_config_survives_dump_and_load(name: str, tmp_path: Path) -> None:
    config = load(name).config
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert from_resolved(path) == config
    assert load(path).config == config  # family defaults underneath change nothing: every key is written


def test_the_dump_is_plain_yaml_of_every_setting() -> None:
    config = load("models/llama-3.2-1b", ["data.train=[{path: a}]"]).config
    assert YAML(typ="safe", pure=True).load(to_yaml(config)) == config.model_dump(mode="json")


def test_reading_a_resolved_config_interpolates_nothing_and_names_bad_keys(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run_dir: ${env:X}\n")
    assert str(from_resolved(path).run_dir) == "${env:X}"
    path.write_text("trainer:\n  stpes: 1\n")
    with pytest.raises(UserError, match=r"config.yaml:2: trainer.stpes: unknown key; did you mean 'steps'"):
        from_resolved(path)


def test_show_prints_the_source_of_each_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("data:\n  train:\n    - path: a\ntrainer:\n  steps: 5\n")
    shown = to_commented_yaml(load("x.yaml", ["seed=3"]))
    lines = {line.split("#")[0].strip(): line.split("# ")[-1] for line in shown.splitlines() if "#" in line}
    assert lines["steps: 5"] == "x.yaml:5"
    assert lines["- path: a"] == "x.yaml:3"
    assert lines["weight: 1.0"] == "default"
    assert lines["seed: 3"] == "override 'seed=3'"
    Path("shown.yaml").write_text(shown)
    assert from_resolved("shown.yaml") == load("x.yaml", ["seed=3"]).config


def test_show_can_leave_the_defaults_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("model:\n  rope_scaling:\n    factor: 2.0\ntrainer:\n  steps: 5\n")
    shown = to_commented_yaml(load("x.yaml"), only_set=True)
    values = YAML(typ="safe", pure=True).load(shown)
    assert values["trainer"] == {"steps": 5}
    assert values["model"]["rope_scaling"] == {"factor": 2.0}
    assert set(values) == {"model", "trainer"}


def test_json_holds_values_and_sources() -> None:
    shown = json.loads(json.dumps(to_json(load("models/gpt2", ["seed=3"]))))
    assert shown["config"]["model"]["num_layers"] == 12
    assert shown["sources"]["seed"] == "override 'seed=3'"
    assert shown["sources"]["model.num_layers"].endswith("gpt2.yaml:4")


def test_diff_lists_only_what_differs_in_schema_order() -> None:
    a = load("models/gpt2").config
    b = load("models/gpt2", ["trainer.steps=5", "seed=1", "evaluation.sets.v=x"]).config
    assert diff(a, b) == [
        ("seed", 0, 1),
        ("evaluation.sets", {}, MISSING),
        ("evaluation.sets.v", MISSING, "x"),
        ("trainer.steps", 1000, 5),
    ]
    assert diff(a, a) == []


@pytest.mark.parametrize(
    ("override", "allowed", "why"),
    [
        ("model.num_layers=6", False, "parameters"),
        ("model.tie_embeddings=true", False, "parameters"),
        ("model.rope_scaling={factor: 4}", False, "parameters"),
        ("optimizer.kind=lion", False, "optimizer"),
        ("precision.params=bfloat16", False, "dtype"),
        ("precision.moments=bfloat16", False, "dtype"),
        ("model.init_std=0.01", True, "initialization"),
        ("model.max_seq_len=8192", True, "positions"),
        ("seed=1", True, "data order"),
        ("data.seed=1", True, "data order"),
        ("data.train=[{path: x}]", True, "data order"),
        ("data.batch_size=16", True, "data order"),
        ("precision.compute=float32", True, "rounding"),
        ("mesh.tensor=2", True, "rounding"),
        ("trainer.accumulation=2", True, "rounding"),
        ("trainer.steps=2000", True, "schedule"),
        ("optimizer.learning_rate=1e-3", True, ""),
        ("checkpoint.every=10", True, ""),
        ("data.workers=2", True, ""),
    ],
)
def test_a_resume_lists_changed_settings_and_refuses_some(override: str, allowed: bool, why: str) -> None:
    old = load("models/llama-2-7b").config.model_dump(mode="json")
    new = load("models/llama-2-7b", [override]).config.model_dump(mode="json")
    changes = classify_changes(old, new)
    assert changes
    for change in changes:
        assert change.allowed == allowed
        assert why in change.why
        assert change.key.startswith(override.partition("=")[0])


def test_a_learned_position_table_ties_the_checkpoint_to_its_length() -> None:
    old = load("models/gpt2").config.model_dump(mode="json")
    (change,) = classify_changes(old, load("models/gpt2", ["model.max_seq_len=2048"]).config.model_dump(mode="json"))
    assert not change.allowed


VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def test_the_json_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize(
    "path",
    sorted(path for path in PACKAGE.rglob("*.yaml") if CLUSTERS not in path.parents),
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_shipped_files_satisfy_the_json_schema(path: Path) -> None:
    VALIDATOR.validate(YAML(typ="safe", pure=True).load(path.read_text()))


@pytest.mark.parametrize(
    "values",
    [
        {"trainer": {"stpes": 1}},
        {"trainer": {"steps": "many"}},
        {"trainer": {"steps": 0}},
        {"base": "models/gpt2"},
        {"optimizer": {"kind": "adam"}},
        {"compute": {"attention": {"backend": "flash"}}},
        {"model": {"family": "lama"}},
        {"data": {"train": [{"weight": 1}]}},
    ],
)
def test_the_json_schema_refuses_what_the_loader_refuses(values: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(values)


def test_every_setting_is_described_for_editors() -> None:
    schema = json_schema()
    text = json.dumps(schema)
    assert "env_interpolation" not in text
    for name, definition in schema["$defs"].items():
        assert definition["description"], name
        assert definition["additionalProperties"] is False, name
        for key, value in definition["properties"].items():
            described = value.get("description") or "$ref" in value
            assert described, f"{name}.{key}"


def test_shipped_presets_set_the_model_only() -> None:
    for path in (PACKAGE / "models").rglob("*.yaml"):
        assert set(YAML(typ="safe", pure=True).load(path.read_text())) == {"model"}, path
    assert {path.stem for path in FAMILIES.glob("*.yaml")} == {load(name).config.model.family for name in shipped_names()}


def test_the_schema_can_be_walked() -> None:
    keys = dict(schema_keys())
    assert {"trainer.steps", "data.train[].path", "model.rope_scaling.factor", "mesh.rules"} <= set(keys)
