"""Every tokenizer kind, with tiny models trained here: exact round trips, special tokens, hashes, copies, errors."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.configs.errors import UserError
from ridgeline.loaders.tokenizers import KINDS, Tokenizer, load_tokenizer

CORPUS = ["def main():\n    return 0\n", "for i in range(10):\n    print(i)\n", "Grüße, 世界! 🙂 x = x + 1\n"] * 4
# U+2581 is SentencePiece's own mark for a space; NUL ends its strings.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581\0"), max_size=40)


def write_huggingface(directory: Path) -> Path:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|bos|>", "<|eos|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.enable_truncation(3)  # what a saved tokenizer may carry, and must not do to documents
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def write_sentencepiece(directory: Path, **options: object) -> Path:
    import sentencepiece

    buffer = io.BytesIO()
    exact = {"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False, "byte_fallback": True}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=buffer, vocab_size=320, model_type="bpe", minloglevel=2, **{**exact, **options}
    )
    path = directory / "spm.model"
    path.write_bytes(buffer.getvalue())
    return path


def write_tiktoken(directory: Path, name: str = "tiny.tiktoken", special_tokens: dict[str, int] | None = None) -> Path:
    ranks = [bytes([byte]) for byte in range(256)] + [b"re", b"in", b"    ", b"return"]
    path = directory / name
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)))
    definition = {"pattern": r"\s+|\w+|[^\w\s]+", "special_tokens": special_tokens or {"<|bos|>": 260, "<|endoftext|>": 261}}
    path.with_name(name + ".json").write_text(json.dumps(definition))
    return path


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("tokenizers")
    paths = [write_huggingface(directory), write_sentencepiece(directory), write_tiktoken(directory)]
    return {"bytes": load_tokenizer("bytes")} | {(tokenizer := load_tokenizer(path)).kind: tokenizer for path in paths}


def test_every_registered_kind_is_tested_here(tokenizers: dict[str, Tokenizer]) -> None:
    assert set(tokenizers) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXT, min_size=1, max_size=3))
def test_any_text_round_trips_exactly(tokenizers: dict[str, Tokenizer], kind: str, texts: list[str]) -> None:
    tokenizer = tokenizers[kind]
    batch = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in batch] == texts
    assert all(0 <= i < tokenizer.vocab_size for ids in batch for i in ids)
    assert batch == [tokenizer.encode_batch([text])[0] for text in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_spelt_out_in_text_stay_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    text = "a <|eos|> <|bos|> </s> <s> <|endoftext|> b"
    (ids,) = tokenizer.encode_batch([text])
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text


@pytest.mark.parametrize("kind", KINDS)
def test_the_copy_is_the_same_tokenizer(tokenizers: dict[str, Tokenizer], kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizers[kind]
    tokenizer.save(tmp_path / "copy")
    for again in (load_tokenizer(tmp_path / "copy", kind), load_tokenizer(tmp_path / "copy")):
        assert (again.kind, again.sha256, again.vocab_size) == (kind, tokenizer.sha256, tokenizer.vocab_size)
        assert (again.bos_id, again.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
        assert again.encode_batch(CORPUS) == tokenizer.encode_batch(CORPUS)


def test_saved_truncation_and_padding_do_not_change_documents(tokenizers: dict[str, Tokenizer]) -> None:
    long, short = tokenizers["huggingface"].encode_batch(["word " * 50, "a"])
    assert len(long) > 50
    assert len(short) == 1


def test_the_hash_depends_on_content_and_not_on_formatting(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path)
    before = load_tokenizer(path).sha256
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content, indent=7, sort_keys=True))
    assert load_tokenizer(path).sha256 == before
    content["model"]["merges"].pop()
    path.write_text(json.dumps(content))
    assert load_tokenizer(path).sha256 != before


def test_special_tokens_come_from_tokenizer_config_json(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path)
    usual = load_tokenizer(path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|bos|>"}, "bos_token": None}))
    configured = load_tokenizer(path)
    assert configured.eos_id == usual.bos_id
    assert configured.sha256 != usual.sha256
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nowhere>"}))
    with pytest.raises(UserError, match=r"'<nowhere>' of tokenizer_config\.json is not in the vocabulary"):
        load_tokenizer(path)


def test_without_bos_the_eos_id_is_used(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tiktoken(tmp_path, special_tokens={"<|endoftext|>": 300}))
    assert tokenizer.bos_id == tokenizer.eos_id == 300
    assert tokenizer.vocab_size == 301


def test_openai_file_names_need_no_definition_file(tmp_path: Path) -> None:
    path = write_tiktoken(tmp_path, "cl100k_base.tiktoken")
    path.with_name(path.name + ".json").unlink()
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_id == 100257
    assert tokenizer.decode(tokenizer.encode_batch(["return  12345 it's\n"])[0]) == "return  12345 it's\n"


def test_a_directory_loads_the_tokenizer_it_has(tmp_path: Path) -> None:
    write_tiktoken(tmp_path)
    (tmp_path / "README.md").write_text("not a tokenizer")
    assert load_tokenizer(tmp_path).kind == "tiktoken"
    write_sentencepiece(tmp_path)
    assert load_tokenizer(tmp_path, "sentencepiece").kind == "sentencepiece"
    write_huggingface(tmp_path)
    assert load_tokenizer(tmp_path).kind == "huggingface"


def refusal(spec: object, kind: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_tokenizer(spec, kind)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_and_unknown_are_named(tmp_path: Path) -> None:
    assert "tokenizer not found: byte; did you mean 'bytes'?" in refusal("byte")
    assert f"tokenizer not found: {tmp_path}/no.json" in refusal(tmp_path / "no.json")
    assert "did you mean 'huggingface'?" in refusal("x", "hugingface")
    assert "no tokenizer in directory" in refusal(tmp_path)
    (tmp_path / "vocab.xyz").write_text("")
    assert "unknown tokenizer kind" in refusal(tmp_path / "vocab.xyz")


def test_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    assert "not a tokenizer.json" in refusal(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(tmp_path / "tokenizer.json")
    (tmp_path / "x.model").write_bytes(b"nonsense")
    assert "not a SentencePiece model" in refusal(tmp_path / "x.model")
    (tmp_path / "x.tiktoken").write_text("YQ== 0\nYg==\n")
    assert "x.tiktoken:2" in refusal(tmp_path / "x.tiktoken")
    (tmp_path / "x.tiktoken").write_text("YQ== 0\n")
    assert "255 of the 256 single bytes have no rank" in refusal(tmp_path / "x.tiktoken")


def test_tiktoken_needs_a_valid_definition(tmp_path: Path) -> None:
    path = write_tiktoken(tmp_path)
    beside = path.with_name(path.name + ".json")
    beside.write_text('{"pattern": "[", "special_tokens": {"<|endoftext|>": 300}}')
    assert "the ranks or the pattern" in refusal(path)
    beside.write_text('{"pattern": "a"}')
    assert "not a tiktoken definition" in refusal(path)
    beside.write_text('{"pattern": "a", "special_tokens": {"<|endoftext|>": 7}}')
    assert "reuse ids" in refusal(path)
    beside.unlink()
    assert f"write {beside}" in refusal(path)


def test_no_eos_is_refused(tmp_path: Path) -> None:
    assert "no EOS piece" in refusal(write_sentencepiece(tmp_path, eos_id=-1))
    assert "no EOS among the special tokens" in refusal(write_tiktoken(tmp_path, special_tokens={"<|other|>": 300}))
    content = json.loads(write_huggingface(tmp_path).read_text())
    content["added_tokens"][1]["content"] = "<|stop|>"
    content["model"]["vocab"]["<|stop|>"] = content["model"]["vocab"].pop("<|eos|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert "no EOS token" in refusal(tmp_path / "tokenizer.json")
