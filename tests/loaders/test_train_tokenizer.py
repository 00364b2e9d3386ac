"""Training tokenizers: exact round trips, deterministic, from the training set only, reused when nothing changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.loaders import train_tokenizer as module
from ridgeline.loaders.records import RecordFields, parse_holdouts, set_of
from ridgeline.loaders.tokenizers import Tokenizer, load_tokenizer
from ridgeline.loaders.train_tokenizer import TokenizerSettings, train_tokenizer
from tests.loaders.corpora import texts_of, write_records


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenizerSettings, Tokenizer]:
    directory = tmp_path_factory.mktemp("trained")
    path = write_records(directory / "a.jsonl", 300)
    wanted = TokenizerSettings((path,), directory / "tokenizer.json", vocab_size=300)
    train_tokenizer(wanted)
    return wanted, load_tokenizer(wanted.output)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text(" \t\r\n\u00a0a1_.'", max_size=30))
def test_any_text_round_trips_exactly(trained: tuple[TokenizerSettings, Tokenizer], text: str) -> None:
    tokenizer = trained[1]
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text


def test_special_tokens_and_size(trained: tuple[TokenizerSettings, Tokenizer]) -> None:
    tokenizer = trained[1]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (300, 0, 1)
    words = tokenizer.encode_batch(["return value"])[0]
    assert len(words) < len("return value") / 2, "merges were learnt"


def test_two_processes_train_the_same_file(trained: tuple[TokenizerSettings, Tokenizer], tmp_path: Path) -> None:
    wanted = trained[0]
    code = (
        "import sys; from pathlib import Path; from loaders.train_tokenizer import *;"
        "train_tokenizer(TokenizerSettings((Path(sys.argv[1]),), Path(sys.argv[2]), vocab_size=300))"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(wanted.inputs[0]), str(tmp_path / "t.json")], check=True, env=environment)
    assert (tmp_path / "t.json").read_bytes() == wanted.output.read_bytes()


def test_only_the_training_part_is_read(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", 400)
    holdouts = parse_holdouts(["validation=0.3", "test=0.1"])
    kept = [text for text in texts_of(path) if set_of(text, holdouts) == "train"]
    assert 180 < len(kept) < 300
    (tmp_path / "kept.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    with_holdout = train_tokenizer(TokenizerSettings((path,), tmp_path / "a.json", vocab_size=300, holdouts=holdouts))
    train_tokenizer(TokenizerSettings((tmp_path / "kept.jsonl",), tmp_path / "b.json", vocab_size=300))
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert with_holdout.documents == len(kept)
    assert with_holdout.text_bytes == sum(len(text.encode()) for text in kept)


def test_a_limit_of_bytes_stops_the_reading(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", 400)
    result = train_tokenizer(TokenizerSettings((path,), tmp_path / "a.json", vocab_size=270, max_bytes=2000))
    assert 2000 <= result.text_bytes < 2600


def test_a_finished_tokenizer_is_reused_and_anything_else_is_refused(
    trained: tuple[TokenizerSettings, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_records(tmp_path / "a.jsonl", 50)
    wanted = TokenizerSettings((path,), tmp_path / "t.json", vocab_size=270)
    first = train_tokenizer(wanted)
    before = wanted.output.stat().st_mtime_ns

    def never(*args: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "_train", never)
    again = train_tokenizer(wanted)
    assert again.reused
    assert not first.reused
    assert (again.vocab_size, again.documents, again.text_bytes) == (first.vocab_size, first.documents, first.text_bytes)
    with pytest.raises(UserError, match="trained with other settings"):
        train_tokenizer(replace(wanted, vocab_size=271))
    write_records(path, 51)
    with pytest.raises(UserError, match="trained with other input"):
        train_tokenizer(wanted)
    wanted.output.write_text("{}")
    with pytest.raises(UserError, match="was not made by this command"):
        train_tokenizer(wanted)
    assert wanted.output.read_text() == "{}"
    monkeypatch.undo()
    assert not train_tokenizer(wanted, overwrite=True).reused
    assert wanted.output.stat().st_mtime_ns > before


def test_bad_input_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"txt": 1}\n{"txt": 2}\n{"txt": 3}\n')
    wanted = TokenizerSettings((path,), tmp_path / "t.json", vocab_size=270)
    for change, message in [
        ({"vocab_size": 200}, "vocab size 200 is too small; the least is 259"),
        ({"vocab_size": -5}, "vocab size -5 is too small"),
        ({"output": tmp_path / "t.model"}, r"must end in \.json"),
        ({"inputs": (tmp_path / "none",)}, "input not found"),
        ({"max_bad": 1}, r"more than 1 bad records \(--max-bad\); the last: .*a\.jsonl:3: missing field 'text'"),
        ({}, r"no text to train on in .*a\.jsonl \(3 bad records\)"),
        ({"fields": RecordFields(sft=True)}, "no text to train on"),
    ]:
        with pytest.raises(UserError, match=message):
            train_tokenizer(replace(wanted, **change))  # type: ignore[arg-type]
    assert not wanted.output.exists()


def test_unwritable_output_is_one_clear_line_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_records(tmp_path / "a.jsonl", 10)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "_train", None)
    with pytest.raises(UserError, match=r"cannot write .*/file: File exists"):
        train_tokenizer(TokenizerSettings((path,), tmp_path / "file" / "t.json", vocab_size=270))


def test_malformed_holdouts_are_refused() -> None:
    for texts, message in [
        (["validation"], "NAME=FRACTION"),
        (["=0.1"], "NAME=FRACTION"),
        (["../x=0.1"], "NAME=FRACTION"),
        (["train=0.1"], "the name 'train' is already taken"),
        (["a=0.1", "a=0.2"], "the name 'a' is already taken"),
        (["a=-0.1"], "must be between 0 and 1"),
        (["a=nan"], "must be between 0 and 1"),
        (["a=x"], "must be between 0 and 1"),
        (["a=0.6", "b=0.4"], "leave nothing to train on"),
    ]:
        with pytest.raises(UserError, match=message):
            parse_holdouts(texts)
