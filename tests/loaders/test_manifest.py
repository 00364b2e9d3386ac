"""The manifest: it is read as written; a changed one is refused."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.loaders.manifest import CorpusError, Manifest, check_tokenizer
from ridgeline.loaders.rows import Rows, RowSource
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


HOSTILE = (-1, 0, 1, 3, True, 1.5, "1", None, [], {}, [[]], 2**31, 2**62, 2**64, 10**30, 1e308, "", "..", "a/b", "\0", "x" * 5000)


def keys_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of every value below a JSON value."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from keys_of(below, (*path, key))


def forge(directory: Path, path: tuple[Any, ...], value: Any) -> None:
    """Write a manifest with one other value and the digest that belongs to it."""
    content = json.loads((directory / "manifest.json").read_text())
    del content["sha256"]
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps({**content, "sha256": digest}))


def read_or_message(directory: Path) -> tuple[Rows | None, str | None]:
    """The first rows of a corpus, or the message of its error."""
    try:
        return RowSource(directory, 64).read(np.arange(2)), None
    except UserError as error:
        return None, str(error)


@pytest.mark.parametrize("pack_length", [None, 64])
def test_a_forged_manifest_is_refused_or_reads_the_stored_tokens(tmp_path: Path, pack_length: int | None) -> None:
    """Also with a digest that fits: no traceback, no endless loop, no allocation that the files do not justify."""
    original = write_corpus(tmp_path, [random_docs(0, 5), random_docs(1, 7)], pack_length=pack_length)
    right = RowSource(tmp_path, 64, manifest=original).read(np.arange(2))
    text = (tmp_path / "manifest.json").read_text()
    paths = [path for path in keys_of(json.loads(text)) if path[0] != "sha256"]
    refused = 0
    for path, value in random.Random(pack_length or 0).sample([(path, value) for path in paths for value in HOSTILE], 350):
        (tmp_path / "manifest.json").write_text(text)
        forge(tmp_path, path, value)
        read, message = read_or_message(tmp_path)
        assert message is None or (str(tmp_path) in message and "\n" not in message and len(message) < 500 + len(str(tmp_path)))
        assert read is None or all((read[name] == right[name]).all() for name in right), (path, value)
        refused += message is not None
    assert refused > 200


def test_numbers_that_contradict_the_files_are_refused_by_key(corpus: Path) -> None:
    for path, value, named in (
        (("record_tokens",), -1, "record_tokens"),
        (("record_tokens",), 32, "shards.0"),
        (("pack_length",), 32, "pack_length"),
        (("shards", 1, "name"), "../other", "shards.1.name"),
        (("shards", 0, "tokens"), 2**70, "shards.0.tokens"),
        (("tokenizer", "eos_id"), 50, "eos_id"),
    ):
        text = (corpus / "manifest.json").read_text()
        forge(corpus, path, value)
        with pytest.raises(CorpusError, match=rf"manifest\.json is damaged: .*{named}"):
            Manifest.read(corpus)
        (corpus / "manifest.json").write_text(text)


def test_the_identity_of_a_corpus_is_its_content(corpus: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "copy", [random_docs(0, 5), random_docs(1, 7)])
    write_corpus(tmp_path / "other", [random_docs(0, 5), random_docs(2, 7)])
    identity, copy, other = (Manifest.read(path).sha256 for path in (corpus, tmp_path / "copy", tmp_path / "other"))
    assert identity == copy != other
