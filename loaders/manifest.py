"""The manifest of a prepared corpus: its shards and how they were made. It is written last: a directory with a manifest is complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError

MANIFEST_NAME = "manifest.json"
FORMAT = "ridgeline-tokens"
VERSION = 1


class CorpusError(UserError):
    """A corpus that is missing, damaged, of another format, or incompatible with the others; the message names file and record."""


@dataclass(frozen=True)
class ShardInfo:
    """One shard file."""

    name: str
    records: int
    tokens: int
    """Stored tokens, BOS and EOS included, padding not."""
    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    bytes: int
    """Size of the file."""
    sha256: str
    edge_crc32: int
    """crc32 over the first and the last record: detects another file of the same name when it is opened."""


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer that produced the tokens; the corpus directory has a copy."""

    kind: str
    path: str
    """Path of the copy, relative to the corpus directory."""
    sha256: str
    vocab_size: int
    bos_id: int
    eos_id: int


@dataclass(frozen=True)
class Manifest:
    """The description of a corpus that readers need. Without times and host names: the same input gives the same bytes."""

    tokenizer: TokenizerInfo
    dtype: str
    """uint16 or uint32."""
    record_tokens: int
    """Tokens per record; the last record of a shard may be shorter. Packed corpora: the row length."""
    pack_length: int | None
    """Row length of a packed corpus; None: a stream of documents."""
    shards: tuple[ShardInfo, ...]
    gzip9_bytes: int | None = None
    """Sum over the documents of the size of `gzip -9` of their text; None: not measured."""
    bad_records: int = 0
    """Input records that were skipped."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the preparation."""

    @property
    def tokens(self) -> int:
        """Stored tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents in all shards (one that is longer than a packed row and was split counts once)."""
        return sum(shard.documents for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of text in all shards."""
        return sum(shard.text_bytes for shard in self.shards)

    def shard_length(self, shard: ShardInfo) -> int:
        """Length of a shard in tokens, including the padding of rows in a packed corpus."""
        return shard.tokens if self.pack_length is None else shard.records * self.pack_length

    @property
    def stream_length(self) -> int:
        """Length of all shards in tokens, including padding."""
        return sum(self.shard_length(shard) for shard in self.shards)

    @property
    def padding_share(self) -> float | None:
        """Share of padding in a packed corpus; None for a stream."""
        return None if self.pack_length is None else 1 - self.tokens / self.stream_length

    def to_json(self) -> dict[str, Any]:
        """Return the content of manifest.json, including its digest."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": asdict(self.tokenizer),
            "dtype": self.dtype,
            "record_tokens": self.record_tokens,
            "pack_length": self.pack_length,
            "counts": {
                "documents": self.documents,
                "tokens": self.tokens,
                "text_bytes": self.text_bytes,
                "bad_records": self.bad_records,
            },
            "gzip9_bytes": self.gzip9_bytes,
            "shards": [asdict(shard) for shard in self.shards],
            "parameters": json.loads(json.dumps(dict(self.parameters), default=str)),
        }
        return {**content, "sha256": _digest(content)}

    @property
    def sha256(self) -> str:
        """Digest of the content, which identifies the corpus."""
        return str(self.to_json()["sha256"])

    def write(self, directory: Path) -> Path:
        """Write manifest.json atomically. Raises CorpusError for a corpus without tokens."""
        if not self.tokens:
            raise CorpusError(f"empty corpus: no document in {directory}")
        path = directory / MANIFEST_NAME
        write_atomically(path, json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read a corpus's manifest. Raises CorpusError when it is missing, damaged, of another version, or empty."""
        directory = Path(directory)
        path = directory / MANIFEST_NAME
        content = _read_json(directory, path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CorpusError(f"{path}: not the manifest of a prepared corpus")
        if content.get("version") != VERSION:
            raise CorpusError(
                f"{path}: corpus format version is {content.get('version')}, supported is {VERSION}; prepare the corpus again"
            )
        stored = content.pop("sha256", None)
        if stored != _digest(content):
            raise CorpusError(f"{path}: modified after it was written (the digest does not match); prepare the corpus again")
        manifest = cls(
            tokenizer=TokenizerInfo(**content["tokenizer"]),
            dtype=content["dtype"],
            record_tokens=content["record_tokens"],
            pack_length=content["pack_length"],
            shards=tuple(ShardInfo(**shard) for shard in content["shards"]),
            gzip9_bytes=content["gzip9_bytes"],
            bad_records=content["counts"]["bad_records"],
            parameters=content["parameters"],
        )
        if not manifest.tokens:
            raise CorpusError(f"{path}: empty corpus")
        return manifest


def write_atomically(path: Path, content: str) -> None:
    """Write a text file through a temporary file, so that no reader finds a part of it. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def read_manifest(directory: Path) -> Manifest:
    """Read a corpus's manifest. Raises CorpusError (see Manifest.read)."""
    return Manifest.read(directory)


def check_tokenizer(manifests: Sequence[tuple[Path, Manifest]], vocab_size: int | None = None) -> TokenizerInfo:
    """Return the tokenizer of several corpora.

    Raises CorpusError, naming the corpora, when their tokenizers differ (by sha256) or have more ids than `vocab_size` (model.vocab_size).
    """
    assert manifests
    (first_path, first), *others = manifests
    for path, manifest in others:
        if manifest.tokenizer.sha256 != first.tokenizer.sha256:
            raise CorpusError(f"{path} has another tokenizer ({_name(manifest.tokenizer)}) than {first_path} ({_name(first.tokenizer)})")
    if vocab_size is not None and first.tokenizer.vocab_size > vocab_size:
        raise CorpusError(
            f"{first_path} has a vocabulary of {first.tokenizer.vocab_size} tokens, more than model.vocab_size={vocab_size}; "
            f"set model.vocab_size={first.tokenizer.vocab_size} or more"
        )
    return first.tokenizer


def _name(tokenizer: TokenizerInfo) -> str:
    return f"{tokenizer.kind}, {tokenizer.vocab_size} ids, sha256 {tokenizer.sha256[:12]}"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_json(directory: Path, path: Path) -> Any:
    if not directory.exists():
        raise CorpusError(f"corpus not found: {directory} (create it with `ridge data prepare`)")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CorpusError(f"{directory} is not a complete corpus: it has no {MANIFEST_NAME} (run `ridge data prepare` again)") from error
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CorpusError(f"{path}: damaged, not JSON ({error})") from error


def check_same_tokenizer(stored: str | None, current: str | None, where: str) -> None:
    """Refuse data made with another tokenizer than a model was trained with (both as sha256; None: unknown). Raises UserError."""
    if stored and current and stored != current:
        raise UserError(f"the data's tokenizer (sha256 {current[:12]}) is not the one of {where} (sha256 {stored[:12]})")
