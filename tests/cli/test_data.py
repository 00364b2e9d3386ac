"""`ridge data inspect` and `ridge data bench` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli import main as cli


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A byte corpus of thirty small files, prepared by the command itself."""
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    for index in range(30):
        Path(f"src/f{index}.py").write_text(f"def f{index}(x):\n    return x + {index}\n" * (1 + index))
    assert cli.run(["data", "prepare", "-i", "src", "-o", "corpus", "--tokenizer", "bytes", "--gzip-baseline", "--workers", "1"]) == 0
    return Path("corpus")


def as_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capfd.readouterr()
    assert cli.run(["data", *arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_inspect_shows_counts_shards_lengths_and_rows(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert cli.run(["data", "inspect", "corpus", "--verify", "--samples", "1", "--seq-len", "200"]) == 0
    out = capfd.readouterr().out
    assert "tokenizer  bytes, 258 ids" in out
    assert "documents  30\n" in out
    assert "bits/byte" in out
    assert "tokens per document: mean" in out
    assert "verified: " in out
    assert "-- segment 1: " in out
    assert "return x +" in out
    found = as_json(capfd, "inspect", "corpus", "--samples", "3")
    assert found["documents"] == found["lengths"]["documents"] == 30
    assert found["tokens"] == found["text_bytes"] + 60 == sum(shard["tokens"] for shard in found["shards"])
    assert len(found["samples"]) == 3


def test_inspect_finds_damage(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shard = next(path for path in corpus.iterdir() if "arrayrecord" in path.name.replace("_", ""))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert cli.run(["data", "inspect", "corpus", "--verify"]) == 2
    assert f"damaged shard: {shard} " in capfd.readouterr().err
    assert cli.run(["data", "inspect", "nowhere"]) == 2
    assert "corpus not found: nowhere" in capfd.readouterr().err


def test_bench_of_a_corpus_prints_speed_and_waiting(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = ["data.seq_len=32", "data.batch_size=4", "--batches", "5"]
    free, busy = as_json(capfd, "bench", "corpus", *small, "--step-ms", "0", "--step-ms", "2")
    assert free["tokens_per_s"] == pytest.approx(5 * 4 * 32 / free["wall_s"])
    assert free["wait_share"] > 0.5  # nothing to do but wait
    assert busy["wall_s"] >= 5 * 0.002
    assert busy["wait_s"] <= busy["wall_s"] - 5 * 0.002
    (half,) = as_json(capfd, "bench", "corpus", *small, "--step-ms", "0", "--processes", "2")
    assert half["rows_per_batch"] == 2
    assert cli.run(["data", "bench", "corpus", *small, "--step-ms", "0"]) == 0
    assert "tokens/s" in capfd.readouterr().out


def test_bench_of_a_config_uses_its_data(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(f"data:\n  train: [{{path: {corpus}}}]\n  seq_len: 16\n  batch_size: 2\nmodel: {{vocab_size: 258}}\n")
    (found,) = as_json(capfd, "bench", "x.yaml", "data.batch_size=6", "--batches", "3", "--step-ms", "0")
    assert (found["seq_len"], found["rows_per_batch"]) == (16, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corpus", "data.sq_len=3"], "unknown key"),
        (["corpus", "--processes", "3"], "data.batch_size=32 does not divide over 3 processes"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["empty"], "no manifest.json"),
    ],
)
def test_bench_refuses_in_one_line(corpus: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    Path("empty").mkdir()
    capfd.readouterr()
    assert cli.run(["data", "bench", *arguments]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
