"""Loading one file: what is refused, with which words, and from which line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.configs.compose import family_names
from ridgeline.configs.errors import UserError
from ridgeline.configs.load import load


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "x.yaml") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(write(text), overrides)
    return str(caught.value)


def test_every_leaf_has_its_source() -> None:
    resolved = load(write("trainer:\n  steps: 7\ndata:\n  train:\n    - path: a\n"), ["seed=3"])
    assert resolved.config.trainer.steps == 7
    assert str(resolved.sources["trainer.steps"]) == "x.yaml:2"
    assert str(resolved.sources["data.train.0.path"]) == "x.yaml:5"
    assert str(resolved.sources["data.train.0.weight"]) == "default"
    assert str(resolved.sources["seed"]) == "override 'seed=3'"
    assert str(resolved.sources["optimizer.kind"]) == "default"
    assert "families/llama.yaml:" in str(resolved.sources["model.norm_eps"])


def test_a_section_is_attributed_to_its_first_written_part() -> None:
    resolved = load(write("trainer:\n  log_every: 2\n  steps: 7\n"))
    assert str(resolved.source("trainer")) == "x.yaml:3"  # schema order: steps stands before log_every
    assert str(resolved.source("checkpoint")) == "default"


def test_unknown_key_names_file_line_and_nearest() -> None:
    message = refusal("name: a\ntrainer:\n  log_every: 5\n  stpes: 3\n")
    assert message == (
        "x.yaml:4: trainer.stpes: unknown key; did you mean 'steps'? "
        "(allowed: steps, accumulation, log_every, max_bad_steps, hang_timeout_s, deadlines, stop_after_s)"
    )


def test_key_of_another_section_is_found_there() -> None:
    assert refusal("warmup_steps: 3\n").startswith("x.yaml:1: warmup_steps: unknown key; did you mean 'schedule.warmup_steps'?")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer:\n  steps: many\n", "x.yaml:2: trainer.steps: must be an integer, got 'many'"),
        ("trainer:\n  steps: 1.5\n", "x.yaml:2: trainer.steps: must be an integer, got 1.5"),
        ("trainer:\n  steps: true\n", "x.yaml:2: trainer.steps: must be an integer, got true"),
        ("trainer:\n  steps: '12'\n", "x.yaml:2: trainer.steps: must be an integer, got '12'"),
        ("trainer:\n  steps: null\n", "x.yaml:2: trainer.steps: must be an integer, got null"),
        ("trainer:\n  steps: [1]\n", "x.yaml:2: trainer.steps: must be an integer, got a list"),
        ("optimizer:\n  learning_rate: fast\n", "x.yaml:2: optimizer.learning_rate: must be a number, got 'fast'"),
        ("optimizer:\n  learning_rate: true\n", "x.yaml:2: optimizer.learning_rate: must be a number, got true"),
        ("checkpoint:\n  final: yes\n", "x.yaml:2: checkpoint.final: must be true or false, got 'yes'"),
        ("model:\n  family: 3\n", "x.yaml:2: model.family: must be a string (quote it), got 3"),
        ("trainer: 3\n", "x.yaml:1: trainer: must be a section (a mapping of keys), got 3"),
        ("trainer:\n", "x.yaml:1: trainer: must be a section (a mapping of keys), got null"),
        ("data:\n  train: corpus\n", "x.yaml:2: data.train: must be a list, got 'corpus'"),
        ("data:\n  train:\n    - weight: 1\n", "x.yaml:3: data.train.0.path: required, but missing"),
        ("data:\n  train:\n    - path: 3\n", "x.yaml:3: data.train.0.path: must be a path, got 3"),
        ("evaluation:\n  sets: [a]\n", "x.yaml:2: evaluation.sets: must be a mapping of names, got a list"),
        ("precision:\n  compute: fp8\n", "x.yaml:2: precision.compute: must be 'float32', 'bfloat16' or 'float16', got 'fp8'"),
        (
            "name: a b\n",
            "x.yaml:1: name: must be a name of letters, digits, '.', '_' and '-', beginning with a letter or digit, got 'a b'",
        ),
        (
            "evaluation:\n  sets:\n    a/b: x\n",
            "x.yaml:3: evaluation.sets.a/b: a name of letters, digits, '.', '_' and '-', beginning with a letter or digit, got 'a/b'",
        ),
    ],
)
def test_wrong_type_names_file_line_and_what_is_expected(text: str, expected: str) -> None:
    assert refusal(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer:\n  steps: -5\n", "x.yaml:2: trainer.steps: must be at least 1, got -5"),
        ("trainer:\n  steps: 0\n", "x.yaml:2: trainer.steps: must be at least 1, got 0"),
        ("trainer:\n  steps: 99999999999\n", "x.yaml:2: trainer.steps: must be at most 2147483647, got 99999999999"),
        ("seed: -1\n", "x.yaml:1: seed: must be at least 0, got -1"),
        ("optimizer:\n  learning_rate: -1e-3\n", "x.yaml:2: optimizer.learning_rate: must be greater than 0.0, got -0.001"),
        ("optimizer:\n  learning_rate: .inf\n", "x.yaml:2: optimizer.learning_rate: must be a finite number, got inf"),
        ("optimizer:\n  learning_rate: .nan\n", "x.yaml:2: optimizer.learning_rate: must be a finite number, got nan"),
        ("optimizer:\n  b2: 1\n", "x.yaml:2: optimizer.b2: must be less than 1.0, got 1"),
        ("schedule:\n  final_fraction: 1.5\n", "x.yaml:2: schedule.final_fraction: must be at most 1.0, got 1.5"),
        ("mesh:\n  data: -2\n", "x.yaml:2: mesh.data: must be at least -1, got -2"),
    ],
)
def test_negative_and_absurd_numbers_are_refused(text: str, expected: str) -> None:
    assert refusal(text) == expected


def test_integers_pass_for_floats_and_yaml_1_2_exponents_are_numbers() -> None:
    config = load(write("optimizer:\n  learning_rate: 1e-4\n  clip_norm: 1\nmodel:\n  rope_theta: 500000\n")).config
    assert config.optimizer.learning_rate == 1e-4
    assert config.optimizer.clip_norm == 1.0
    assert isinstance(config.model.rope_theta, float)


def test_a_date_like_name_is_a_string() -> None:
    assert load(write("name: 2026-01-02\n")).config.name == "2026-01-02"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nname: a\nseed: 2\n", "x.yaml:3: seed: duplicate key (first at x.yaml:1)"),
        ("trainer:\n  steps: 1\n  steps: 2\n", "x.yaml:3: steps: duplicate key (first at x.yaml:2)"),
        ("- a\n- b\n", "x.yaml:1: ... mapping of sections ... a list"),
        ("just words\n", "x.yaml:1: ... mapping of sections ... 'just words'"),
        ("seed: !secret 3\n", "x.yaml:1: the YAML tag '!secret' is not supported"),
        ("? [a, b]\n: 3\n", "x.yaml:1: a key must be"),
        ("a: &x [*x]\n", "x.yaml:1: an alias contains itself"),
    ],
)
def test_malformed_documents_are_refused_with_their_line(text: str, expected: str) -> None:
    message = refusal(text)
    start, *facts = expected.split(" ... ")
    assert message.startswith(start) and all(fact in message for fact in facts)
    assert "\n" not in message


@pytest.mark.parametrize(("text", "line"), [("a: 1\nb: [1, 2\n", 3), ("name: a\n\tseed: 1\n", 2), ("name: a: b\n", 1), ("seed: *x\n", 1)])
def test_broken_yaml_names_its_line(text: str, line: int) -> None:
    message = refusal(text)
    assert message.startswith(f"x.yaml:{line}: not valid YAML: ")
    assert "\n" not in message


def test_files_that_are_no_text_are_refused() -> None:
    Path("x.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(UserError, match=r"^x.yaml: not a text file \(byte 6 is not UTF-8\)$"):
        load("x.yaml")
    Path("x.yaml").write_bytes(b"name: \x00\n")
    with pytest.raises(UserError, match=r"^x.yaml:1: not valid YAML: "):
        load("x.yaml")


def test_missing_config_names_the_nearest_file() -> None:
    write("", "exp/small.yaml")
    with pytest.raises(UserError, match=r"^config 'exp/smal.yaml' not found; did you mean 'exp/small.yaml'\?$"):
        load("exp/smal.yaml")
    with pytest.raises(UserError, match=r"^config 'models/gpt-2' not found; did you mean 'models/gpt2'\?$"):
        load("models/gpt-2")
    with pytest.raises(UserError, match=r"^config 'exp' is a directory; .*YAML file$"):
        load("exp")
    write("", "exp/config.yaml")
    with pytest.raises(UserError, match=r"^config 'exp' is a directory; .*'exp/config.yaml'$"):
        load("exp")


def test_an_empty_file_is_all_defaults() -> None:
    assert load(write("# nothing\n")).config.trainer.steps == 1000


def test_several_problems_are_one_line_in_file_order() -> None:
    message = refusal("trainer:\n  stpes: 1\nseed: -1\noptimizer:\n  learning_rate: 0\n")
    assert message.startswith("x.yaml:2: trainer.stpes: ")
    assert message.endswith(" (and 2 more: x.yaml:3: seed, x.yaml:5: optimizer.learning_rate)")
    many = refusal("trainer:\n" + "".join(f"  key{i}: 1\n" for i in range(9)))
    assert "\n" not in many
    assert many.endswith(
        "(and 8 more: x.yaml:3: trainer.key1, x.yaml:4: trainer.key2, x.yaml:5: trainer.key3, x.yaml:6: trainer.key4, ...)"
    )


def test_unknown_family_names_the_nearest() -> None:
    message = refusal("model:\n  family: lama\n")
    assert message == f"x.yaml:2: model.family: unknown model family 'lama'; did you mean 'llama'? (allowed: {', '.join(family_names())})"


def test_family_defaults_lie_under_the_config() -> None:
    model = load(write("model:\n  family: gpt2\n  norm_eps: 1e-6\n")).config.model
    assert (model.norm, model.position, model.tie_embeddings, model.norm_eps) == ("layernorm", "learned", True, 1e-6)
    assert load(write("model: {}\n")).config.model.max_seq_len == 4096
    assert load(write("")).config.model.max_seq_len == 4096


def test_environment_is_read_only_where_declared() -> None:
    text = (
        "run_dir: ${env:SCRATCH}/runs\ndata:\n  train:\n    - path: ${env:CORPUS,data/x}\nevaluation:\n  sets:\n    v: ${env:SCRATCH}/v\n"
    )
    config = load(write(text), environment={"SCRATCH": "/s"}).config
    assert (config.run_dir, config.data.train[0].path, config.evaluation.sets["v"]) == (Path("/s/runs"), Path("data/x"), Path("/s/v"))
    assert load("x.yaml", ["run_dir=${env:OTHER}"], environment={"SCRATCH": "/s", "OTHER": "/o"}).config.run_dir == Path("/o")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "name: ${env:USER}\n",
            "x.yaml:1: name: '${...}' is not allowed here "
            "(only in: run_dir, init_from, data.train[].path, data.train[].teacher, evaluation.sets, evaluation.tasks.directory, "
            "evaluation.samples.file, checkpoint.local.directory, runtime.compilation_cache)",
        ),
        (
            "run_dir: ${env:NOT_SET_ANYWHERE}\n",
            "x.yaml:1: run_dir: the environment variable NOT_SET_ANYWHERE is not set (give a default with ${env:NOT_SET_ANYWHERE,default})",
        ),
        (
            "run_dir: ${SCRATCH}/x\n",
            "x.yaml:1: run_dir: unknown interpolation in '${SCRATCH}/x' (allowed: ${env:NAME} and ${env:NAME,default})",
        ),
    ],
)
def test_other_interpolation_is_refused_by_name(text: str, expected: str) -> None:
    assert refusal(text) == expected


def test_paths_stay_relative_to_the_working_directory() -> None:
    path = write("data:\n  train:\n    - path: corpus/a\n", "deep/er/x.yaml")
    assert load(path).config.data.train[0].path == Path("corpus/a")
