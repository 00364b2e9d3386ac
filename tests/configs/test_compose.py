"""Bases and overrides: who wins over whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def refusal(name: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(name, overrides)
    return str(caught.value)


def test_later_bases_win_and_the_file_wins_over_its_bases() -> None:
    write("a.yaml", "seed: 1\ntrainer:\n  steps: 10\n  log_every: 11\n  accumulation: 2\n")
    write("b.yaml", "seed: 2\ntrainer:\n  steps: 20\n")
    write("x.yaml", "base: [a.yaml, b]\ntrainer:\n  steps: 30\n")
    resolved = load("x.yaml")
    trainer = resolved.config.trainer
    assert (resolved.config.seed, trainer.steps, trainer.log_every, trainer.accumulation) == (2, 30, 11, 2)
    assert [str(resolved.sources[key]) for key in ("seed", "trainer.steps", "trainer.log_every")] == ["b.yaml:1", "x.yaml:3", "a.yaml:4"]


def test_bases_are_found_beside_the_file_then_among_the_shipped_ones() -> None:
    write("exp/models/gpt2.yaml", "model:\n  family: gpt2\n  num_layers: 1\n")
    write("exp/x.yaml", "base: [models/gpt2]\n")
    write("x.yaml", "base: [models/gpt2]\n")
    assert load("exp/x.yaml").config.model.num_layers == 1
    assert load("x.yaml").config.model.num_layers == 12


def test_a_preset_name_with_dots_needs_no_suffix() -> None:
    write("x.yaml", "base: [models/llama-3.2-1b]\n")
    assert load("x.yaml").config == load("models/llama-3.2-1b").config == load("models/llama-3.2-1b.yaml").config


def test_bases_of_bases_are_resolved_relative_to_their_own_file() -> None:
    write("shared/root.yaml", "seed: 5\n")
    write("shared/mid.yaml", "base: [root]\n")
    write("x.yaml", "base: [shared/mid]\n")
    assert load("x.yaml").config.seed == 5


def test_a_base_may_serve_two_files_but_not_itself() -> None:
    write("root.yaml", "seed: 5\n")
    write("a.yaml", "base: [root]\n")
    write("b.yaml", "base: [root]\n")
    write("x.yaml", "base: [a, b]\n")
    assert load("x.yaml").config.seed == 5
    write("root.yaml", "name: r\nbase: [x]\n")
    assert refusal("x.yaml") == "root.yaml:2: base: files include each other: x.yaml -> a.yaml -> root.yaml -> x.yaml"
    write("x.yaml", "base: [x.yaml]\n")
    assert refusal("x.yaml") == "x.yaml:1: base: files include each other: x.yaml -> x.yaml"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base: models/gpt2\n", "x.yaml:1: base: must be a list of files, as in [models/gpt2], got 'models/gpt2'"),
        ("base: [3]\n", "x.yaml:1: base: must be a list of files, got 3"),
        ("seed: 1\nbase:\n  - nowhere\n", "x.yaml:3: base: 'nowhere' not found"),
        ("base: [models/gtp2]\n", "x.yaml:1: base: 'models/gtp2' not found; did you mean 'models/gpt2'?"),
        ("base: [models/lama-3.2-1b]\n", "x.yaml:1: base: 'models/lama-3.2-1b' not found; did you mean 'models/llama-3.2-1b'?"),
    ],
)
def test_bad_bases_are_refused_with_their_line(text: str, expected: str) -> None:
    write("x.yaml", text)
    assert refusal("x.yaml") == expected


def test_an_error_in_a_base_names_the_base() -> None:
    write("a.yaml", "trainer:\n  stpes: 1\n")
    write("x.yaml", "base: [a]\n")
    assert refusal("x.yaml").startswith("a.yaml:2: trainer.stpes: unknown key")


def test_mappings_merge_lists_are_replaced_and_an_empty_mapping_clears() -> None:
    write("a.yaml", "data:\n  train: [{path: p}, {path: q}]\nevaluation:\n  sets: {v: x, w: y}\n")
    write("x.yaml", "base: [a]\ndata:\n  train: [{path: r}]\nevaluation:\n  sets: {z: t}\n")
    config = load("x.yaml").config
    assert [source.path.name for source in config.data.train] == ["r"]
    assert list(config.evaluation.sets) == ["v", "w", "z"]
    assert load("x.yaml", ["evaluation.sets={}"]).config.evaluation.sets == {}


def test_null_takes_back_what_a_base_set() -> None:
    write("x.yaml", "base: [models/llama-3.2-1b]\nmodel:\n  rope_scaling: null\n")
    assert load("x.yaml").config.model.rope_scaling is None
    assert load("x.yaml", ["model.rope_scaling.factor=4"]).config.model.rope_scaling.factor == 4.0


def test_overrides_win_over_files_and_later_ones_over_earlier() -> None:
    write("x.yaml", "trainer:\n  steps: 10\n")
    resolved = load("x.yaml", ["trainer.steps=20", "mesh.fsdp=4", "trainer.steps=30"])
    assert (resolved.config.trainer.steps, resolved.config.mesh.fsdp) == (30, 4)
    assert str(resolved.sources["trainer.steps"]) == "override 'trainer.steps=30'"


def test_override_values_are_yaml() -> None:
    write("x.yaml", "")
    overrides = [
        "data.train=[{path: x, weight: 2}]",
        "optimizer.learning_rate=1e-4",
        "optimizer.clip_norm=null",
        "run_dir=runs/a=b",
        "model={embed_dim: 512, num_heads: 8}",
    ]
    config = load("x.yaml", overrides).config
    assert (str(config.data.train[0].path), config.data.train[0].weight) == ("x", 2.0)
    assert (config.optimizer.learning_rate, config.optimizer.clip_norm, str(config.run_dir)) == (1e-4, None, "runs/a=b")
    assert (config.model.embed_dim, config.model.norm_eps) == (512, 1e-5)


def test_override_reaches_list_elements_and_names_with_dots() -> None:
    write("x.yaml", "data:\n  train: [{path: a}, {path: b}]\n")
    config = load("x.yaml", ["data.train.1.path=c", "data.train.0.weight=3", "evaluation.sets.wiki.v2=d"]).config
    assert [(str(source.path), source.weight) for source in config.data.train] == [("a", 3.0), ("c", 1.0)]
    assert {name: str(path) for name, path in config.evaluation.sets.items()} == {"wiki.v2": "d"}


def test_an_override_may_choose_the_family() -> None:
    write("x.yaml", "")
    assert load("x.yaml", ["model.family=qwen3"]).config.model.qk_norm


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.steps", "override 'trainer.steps': ... section.key=value"),
        ("=3", "override '=3': ... section.key=value"),
        (
            "trainer.stpes=3",
            "override 'trainer.stpes=3': trainer.stpes: unknown key; did you mean 'steps'? "
            "(allowed: steps, accumulation, log_every, max_bad_steps, hang_timeout_s, deadlines, stop_after_s)",
        ),
        ("trainer.steps=abc", "override 'trainer.steps=abc': trainer.steps: must be an integer, got 'abc'"),
        ("trainer.steps=", "override 'trainer.steps=': trainer.steps: must be an integer, got null"),
        ("trainer.steps=-1", "override 'trainer.steps=-1': trainer.steps: must be at least 1, got -1"),
        ("trainer.steps.x=1", "override 'trainer.steps.x=1': trainer.steps ... 'x'"),
        ("trainer=3", "override 'trainer=3': trainer: must be a section (a mapping of keys), got 3"),
        ("data.train.path=x", "override 'data.train.path=x': data.train is a list ... data.train.0"),
        ("data.train.1.path=x", "override 'data.train.1.path=x': data.train has 1 elements"),
        ("data.train=[{path: x", "override 'data.train=[{path: x': not valid YAML: "),
        ("base=[models/gpt2]", "override 'base=[models/gpt2]': 'base' ... file"),
    ],
)
def test_bad_overrides_are_refused_by_their_text(override: str, expected: str) -> None:
    write("x.yaml", "data:\n  train: [{path: a}]\n")
    message = refusal("x.yaml", override)
    start, *facts = expected.split(" ... ")
    assert message.startswith(start) and all(fact in message for fact in facts)
    assert "\n" not in message
