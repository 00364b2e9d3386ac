"""`ridge evaluate` on a run directory, and on the same model as a Hugging Face directory."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from ridgeline.cli.main import run
from ridgeline.launch.exit_codes import DONE, USAGE
from ridgeline.loaders.prepare import PrepareSettings, prepare
from ridgeline.loaders.train_tokenizer import TokenizerSettings, train_tokenizer

SOURCES = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on a BPE corpus with a held-out set."""
    directory = tmp_path_factory.mktemp("evaluate")
    texts = directory / "texts"
    texts.mkdir()
    for source in SOURCES:
        (texts / f"{source.stem}.txt").write_text(source.read_text()[:1200])
    tokenizer = directory / "tokenizer" / "tokenizer.json"
    train_tokenizer(TokenizerSettings((texts,), tokenizer, 300))
    held = {"held": 0.3}
    prepare(PrepareSettings((texts,), directory / "sets", str(tokenizer), holdouts=held, gzip_baseline=True), workers=1)
    config = {
        "name": "evaluated",
        "run_dir": str(directory / "run"),
        "model": {"vocab_size": 300, "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_seq_len": 64},
        "precision": {"compute": "float32"},
        "data": {"train": [{"path": str(directory / "sets" / "train")}], "seq_len": 64, "batch_size": 8},
        "evaluation": {"sets": {"held": str(directory / "sets" / "held")}},
        "trainer": {"steps": 2, "log_every": 1},
        "logging": {"tensorboard": False},
    }
    with (directory / "config.yaml").open("w") as stream:
        YAML().dump(config, stream)
    assert run(["train", str(directory / "config.yaml")]) == DONE
    return directory


def test_greedy_text_is_the_same_on_one_device_and_on_several(trained: Path, capsys: pytest.CaptureFixture) -> None:
    """The same checkpoint on another mesh: on 8 devices `tensor` and `fsdp` shard every matmul."""
    texts = {}
    for mesh, devices in (
        (["mesh.fsdp=1"], "1 CPU device of 8"),
        (["mesh.tensor=2", "mesh.fsdp=4"], "8 CPU devices (mesh fsdp=4 x tensor=2)"),
    ):
        capsys.readouterr()
        prompts = ["--prompt", "import os", "--prompt", "def f(x):\n    return"]
        assert run(["generate", str(trained / "run"), *mesh, *prompts, "--temperature", "0", "--max-tokens", "24", "--json"]) == DONE
        rows = json.loads(capsys.readouterr().out)
        assert rows[0]["devices"] == devices
        texts[devices] = [row["text"] for row in rows]
    one, several = texts.values()
    assert one == several
    assert all(one)


def test_meshes_that_do_not_fit_are_refused(trained: Path, capsys: pytest.CaptureFixture) -> None:
    for command, overrides, expected in (
        ("generate", ["mesh.fsdp=16"], "does not match 8 devices; set mesh.fsdp=8"),
        ("generate", ["mesh.tensor=4", "mesh.fsdp=2"], "model.num_heads=2 does not divide by mesh.tensor=4"),
        ("evaluate", ["mesh.fspd=4"], "did you mean 'fsdp'"),
        ("evaluate", ["trainer.steps=4"], "only keys of `mesh`"),
        ("evaluate", ["mesh.fsdp=two"], "mesh.fsdp"),
    ):
        capsys.readouterr()
        assert run([command, str(trained / "run"), *overrides]) == USAGE
        error = capsys.readouterr().err.strip()
        assert expected in error
        assert len(error.splitlines()) == 1


def answer(capsys: pytest.CaptureFixture, *arguments: str) -> dict:
    capsys.readouterr()
    assert run(["evaluate", *arguments, "--json"]) == DONE
    (row,) = json.loads(capsys.readouterr().out)
    return row


def test_a_run_and_its_export_give_the_figures_of_training(trained: Path, capsys: pytest.CaptureFixture) -> None:
    row = answer(capsys, str(trained / "run"))
    last = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
    final = next(record for record in last if "eval/held/bits_per_byte" in record)
    assert row["loss"] == pytest.approx(final["eval/held/loss"], rel=1e-5)
    assert row["bits_per_byte"] == pytest.approx(final["eval/held/bits_per_byte"], rel=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert 0 < row["gzip9_bits_per_byte"] < 8
    assert row["step"] == 2
    assert len(row["config_sha256"]) == 64
    assert row["devices"] == "8 CPU devices (mesh fsdp=8)"
    for options in (("mesh.fsdp=1",), ("mesh.tensor=2", "mesh.fsdp=4"), ("mesh.data=8", "mesh.fsdp=1", "--batch-size", "1")):
        assert answer(capsys, str(trained / "run"), *options)["loss"] == pytest.approx(row["loss"], rel=1e-5)

    assert run(["convert", "to-hf", str(trained / "run"), str(trained / "exported")]) == DONE
    held = f"held={trained / 'sets' / 'held'}"
    same = answer(capsys, str(trained / "exported"), "--set", held, "--seq-len", "64", "--batch-size", "4")
    assert same["bits_per_byte"] == pytest.approx(row["bits_per_byte"], rel=1e-5)


def test_a_quantized_export_reports_the_losses_that_evaluate_computes(trained: Path, capsys: pytest.CaptureFixture) -> None:
    """int8 of a run whose other weights keep their dtype: `ridge evaluate` of both directories is the judge."""
    output, held = trained / "quantized", f"held={trained / 'sets' / 'held'}"
    capsys.readouterr()
    assert run(["convert", "to-hf", str(trained / "run"), str(output), "--quantize", "int8", "--json"]) == DONE
    (measured,) = json.loads(capsys.readouterr().out)["losses"]
    plain = answer(capsys, str(trained / "run"))["loss"]
    quantized = answer(capsys, str(output), "--set", held, "--seq-len", "64", "--batch-size", "8")["loss"]
    assert measured["set"] == "held"
    assert (measured["run"], measured["export"]) == pytest.approx((plain, quantized), rel=1e-7)
    assert measured["difference"] == pytest.approx(quantized - plain, abs=1e-6)
    assert 0 < abs(measured["difference"]) < 0.01
    for arguments, expected in (
        (["--no-loss"], "need --quantize"),
        (["--quantize", "fp8", "--no-loss", "--set", held], "--no-loss"),
        (["--quantize", "fp8", "--adapter"], "choose --merge"),
        (["--quantize", "fp8", "--set", "x=nowhere"], "nowhere"),
    ):
        assert run(["convert", "to-hf", str(trained / "run"), str(trained / "refused"), *arguments]) == USAGE
        assert expected in capsys.readouterr().err
        assert not (trained / "refused").exists()


def test_sets_that_do_not_go_with_the_model_are_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text\n" * 50)
    prepare(PrepareSettings((text,), tmp_path / "bytes", "bytes"), workers=1)
    for arguments, expected in (
        (["--set", f"x={tmp_path / 'bytes'}"], "tokenizer"),
        (["--set", "x"], "NAME=DIR"),
        (["--set", "x=nowhere"], "nowhere"),
        (["--step", "7"], "step 7"),
        (["--seq-len", "65"], "max_seq_len=64"),
    ):
        capsys.readouterr()
        assert run(["evaluate", str(trained / "run"), *arguments]) == USAGE
        error = capsys.readouterr().err.strip()
        assert expected in error
        assert len(error.splitlines()) == 1
