"""manifest.json: what a prepared corpus is. Written last, so a directory without one is not a corpus.

A corpus is a stream of documents, each `[BOS] t1 .. tn [EOS]`, cut into fixed-size token records over several shards (loaders/format.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import UserError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


class CorpusError(UserError):
    """A prepared corpus is missing, foreign or damaged; names the file and, where it has one, the record."""


@dataclass(frozen=True)
class ShardInfo:
    """One token file."""

    name: str
    sha256: str
    documents: int
    tokens: int
    """Padding included."""
    text_bytes: int
    size_bytes: int
    records: int
    padding_tokens: int = 0


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer the ids come from; a copy lies in the corpus's `tokenizer` directory."""

    kind: str
    sha256: str
    vocab_size: int
    bos_id: int
    eos_id: int


@dataclass(frozen=True)
class Manifest:
    """A whole corpus."""

    tokenizer: TokenizerInfo
    record_tokens: int
    """Tokens per record; only the last record of a shard is shorter."""
    token_bytes: int
    """2 (uint16) or 4 (uint32) per stored token."""
    pack_length: int | None
    """Documents lie whole in rows of this length (then the only sequence length there is); None: a continuous stream."""
    shards: tuple[ShardInfo, ...]
    bad_records: int = 0
    gzip9_bytes: int | None = None
    """gzip -9 size of every document by itself, summed."""
    created_with: dict[str, Any] = field(default_factory=dict)
    """Parameters of the preparation."""
    version: int = FORMAT_VERSION

    @property
    def documents(self) -> int:
        """Documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Stored tokens in all shards, padding included."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def padding_tokens(self) -> int:
        """Stored padding."""
        return sum(shard.padding_tokens for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return sum(shard.text_bytes for shard in self.shards)

    def to_json(self) -> str:
        """Dump deterministically; totals are included for readers of the file."""
        totals = {"documents": self.documents, "tokens": self.tokens, "padding_tokens": self.padding_tokens, "text_bytes": self.text_bytes}
        return json.dumps({**asdict(self), "totals": totals}, indent=1, sort_keys=True) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """Read and check a corpus's manifest. Raises CorpusError naming the file and what is wrong."""
    path = directory / MANIFEST
    if not directory.is_dir():
        raise CorpusError(f"corpus {directory} does not exist; make it with `ridge data prepare`")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorpusError(
            f"{directory} is not a prepared corpus (no {MANIFEST}): it was not made by `ridge data prepare`, or not finished"
        ) from None
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path} cannot be read: {error}") from error
    try:
        if content["version"] != FORMAT_VERSION:
            raise CorpusError(f"{path} has format version {content['version']}; this program reads {FORMAT_VERSION}")
        content.pop("totals", None)
        manifest = Manifest(
            **{
                **content,
                "tokenizer": TokenizerInfo(**content["tokenizer"]),
                "shards": tuple(ShardInfo(**shard) for shard in content["shards"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise CorpusError(f"{path} is not a manifest of Ridgeline: {error}") from error
    if not manifest.shards or manifest.tokens < 2:
        raise CorpusError(f"{path}: the corpus is empty")
    return manifest


def check_tokenizer(manifests: Sequence[tuple[Path, Manifest]], vocab_size: int) -> TokenizerInfo:
    """Return the tokenizer all corpora share; refuse different ones, and one whose ids do not fit the model's vocabulary."""
    first_path, first = manifests[0]
    for path, manifest in manifests[1:]:
        if manifest.tokenizer.sha256 != first.tokenizer.sha256:
            raise UserError(
                f"{path} and {first_path} were made with different tokenizers "
                f"({manifest.tokenizer.kind} {manifest.tokenizer.sha256[:12]}, {first.tokenizer.kind} {first.tokenizer.sha256[:12]})"
            )
    if first.tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size} is smaller than the vocabulary of {first_path} "
            f"({first.tokenizer.kind} tokenizer with {first.tokenizer.vocab_size} ids); set model.vocab_size={first.tokenizer.vocab_size}"
        )
    return first.tokenizer
