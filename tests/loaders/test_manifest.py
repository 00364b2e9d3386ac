"""The manifest: it is read as written; a changed one is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.loaders.manifest import CorpusError, Manifest, check_tokenizer
from tests.loaders.token_corpora import random_docs, tokenizer_info, write_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus", [random_docs(0, 5), random_docs(1, 7)])
    return tmp_path / "corpus"


def test_what_is_written_is_read(corpus: Path) -> None:
    manifest = Manifest.read(corpus)
    assert (manifest.documents, manifest.pack_length, manifest.dtype) == (12, None, "uint16")
    assert manifest.tokens == sum(len(doc.tokens) for doc in random_docs(0, 5) + random_docs(1, 7)) == manifest.text_bytes + 24
    extended = replace(manifest, gzip9_bytes=17, bad_records=3, parameters={"inputs": ["a", "größe"]})
    extended.write(corpus)
    assert Manifest.read(corpus) == extended


def test_the_bytes_depend_only_on_the_content(corpus: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "again", [random_docs(0, 5), random_docs(1, 7)])
    for file in corpus.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    assert {file.name for file in corpus.iterdir()} == {
        "manifest.json",
        "tokens-00000-of-00002.arrayrecord",
        "tokens-00001-of-00002.arrayrecord",
    }


def test_any_changed_digit_is_noticed(corpus: Path) -> None:
    path = corpus / "manifest.json"
    text = path.read_text()
    places = [index for index, character in enumerate(text) if character.isdigit()]
    assert len(places) > 100
    for place in places:
        path.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])
        with pytest.raises(CorpusError, match=r"manifest\.json"):
            Manifest.read(corpus)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged, not JSON"),
        ("[]", "not the manifest of a prepared corpus"),
        ('{"format": "something else"}', "not the manifest of a prepared corpus"),
        ('{"format": "ridgeline-tokens", "version": 99}', r"version is 99, supported is 1"),
    ],
)
def test_content_of_another_format_is_refused(corpus: Path, content: str, message: str) -> None:
    (corpus / "manifest.json").write_text(content)
    with pytest.raises(CorpusError, match=message):
        Manifest.read(corpus)


def test_a_manifest_that_is_not_text_is_refused(corpus: Path) -> None:
    (corpus / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CorpusError, match="damaged"):
        Manifest.read(corpus)


def test_a_missing_corpus_and_an_incomplete_one_have_different_messages(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"corpus not found: .*nothing.*ridge data prepare"):
        Manifest.read(tmp_path / "nothing")
    with pytest.raises(CorpusError, match=rf"{tmp_path} .* no manifest\.json .*ridge data prepare"):
        Manifest.read(tmp_path)


def test_an_empty_corpus_is_refused_in_writing_and_in_reading(corpus: Path) -> None:
    empty = replace(Manifest.read(corpus), shards=())
    with pytest.raises(CorpusError, match="empty corpus"):
        empty.write(corpus)
    (corpus / "manifest.json").write_text(json.dumps(empty.to_json()))
    with pytest.raises(CorpusError, match="empty corpus"):
        Manifest.read(corpus)


def test_corpora_of_one_tokenizer_are_compatible(corpus: Path) -> None:
    manifest = Manifest.read(corpus)
    assert check_tokenizer([(corpus, manifest), (corpus, manifest)], 50) == tokenizer_info()


def test_different_tokenizers_are_refused_naming_both_corpora(corpus: Path) -> None:
    manifest = Manifest.read(corpus)
    other = replace(manifest, tokenizer=tokenizer_info(sha256="b" * 64))
    with pytest.raises(CorpusError, match=r"two .* tokenizer .*bbbb.* one .*aaaa"):
        check_tokenizer([(Path("one"), manifest), (Path("two"), other)], 50)


def test_a_vocabulary_that_does_not_fit_the_model_is_refused(corpus: Path) -> None:
    with pytest.raises(CorpusError, match=r"vocabulary of 50 .*model\.vocab_size=49; set model\.vocab_size=50"):
        check_tokenizer([(corpus, Manifest.read(corpus))], 49)
