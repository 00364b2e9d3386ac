"""`ridge init`: the file loads, explains its keys, fits its cluster, and is never written over another."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.cli.commands import init
from ridgeline.cli.commands.init import corpora, model_names
from ridgeline.configs.load import load
from ridgeline.configs.schema import Config
from tests.sampling import drawn

SMALL = ["gpt2", "llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b"]
CASES = [(model, ("dgx-h100", "gb200-nvl72")[index % 2]) for index, model in enumerate(model_names())]
CASES += [(model, "local") for model in SMALL]


def written(model: str, cluster: str, path: Path, *more: str) -> int:
    return cli.run(["init", "--model", model, "--data", "data/none", "--cluster", cluster, "-o", str(path), *more])


@pytest.mark.parametrize(("model", "cluster"), drawn(CASES, 5))
def test_the_file_loads_and_plans(model: str, cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.yaml"
    assert written(model, cluster, path) == 0
    nodes = capsys.readouterr().out.rsplit(" -N ", 1)[1].strip()
    config = load(str(path)).config
    assert config.model == load(f"models/{model}").config.model
    assert config.name == "my"
    assert cli.run(["plan", str(path), "--cluster", cluster, "--nodes", nodes, "--top", "1", "--no-compile"]) == 0


def test_comments_are_the_docstrings_of_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    assert written("llama-3.2-1b", "dgx-h100", path) == 0
    text = " ".join(path.read_text().replace("# ", " ").split())
    for section, key in (
        ("data", "batch_size"),
        ("trainer", "accumulation"),
        ("optimizer", "learning_rate"),
        ("evaluation", "max_batches"),
    ):
        fields = type(getattr(Config(), section)).model_fields
        assert " ".join(str(fields[key].description).split()) in text


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("mine")
    assert written("gpt2", "local", path) == 2
    assert str(path) in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "lama-3.2-1b", "--data", "x", "--cluster", "local"], "llama-3.2-1b"),
        (["--model", "gpt2", "--data", "x", "--cluster", "dgx-h10"], "dgx-h100"),
        (["--model", "gpt2", "--data", "x"], "--cluster"),
        (["--data", "x", "--cluster", "local"], "--model"),
        (["--model", "llama-3.1-405b", "--data", "x", "--cluster", "dgx-h100", "--nodes", "1"], "node"),
    ],
)
def test_errors_name_what_to_type(arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.yaml"
    assert cli.run(["init", *arguments, "-o", str(path)]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.strip().splitlines()) == 1
    assert not path.exists()


def test_a_corpus_and_its_parent_are_found(tmp_path: Path) -> None:
    for name in ("train", "validation"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    assert corpora(tmp_path) == (tmp_path / "train", tmp_path / "validation")
    assert corpora(tmp_path / "train") == (tmp_path / "train", None)


def test_missing_options_are_prompted_for_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"Model": "gpt2", "Prepared corpus (directory)": "data/none", "Cluster": "local"}
    monkeypatch.setattr(init, "_on_terminal", lambda: True)
    monkeypatch.setattr(init.click, "prompt", lambda text: answers.pop(text))
    assert cli.run(["init", "-o", str(tmp_path / "my.yaml")]) == 0
    assert not answers
    assert "base: [models/gpt2]" in (tmp_path / "my.yaml").read_text()
