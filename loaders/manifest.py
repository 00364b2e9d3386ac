"""The manifest of a prepared corpus: its shards and how they were made. It is written last: a directory with a manifest is complete."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.configs.yaml_tree import describe
from ridgeline.rundir.files import first_problem, write_atomically

MANIFEST_NAME = "manifest.json"
FORMAT = "ridgeline-tokens"
VERSION = 1
MAX_RECORD_TOKENS = 1 << 26
"""Most tokens in a record (a row of a packed corpus): a reader holds several records in memory."""

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
"""Numbers of a manifest are bounded, so that sums over shards fit 64 bits."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class CorpusError(UserError):
    """A corpus that is missing, damaged, of another format, or incompatible with the others; the message names file and record."""


@dataclass(frozen=True)
class ShardInfo:
    """One shard file."""

    name: Annotated[str, Field(pattern=r"^[^/\x00]{1,255}$")]
    records: Annotated[Count, Field(ge=1)]
    tokens: Annotated[Count, Field(ge=1)]
    """Stored tokens, BOS and EOS included, padding not."""
    documents: Count
    text_bytes: Count
    """UTF-8 bytes of the documents' text."""
    bytes: Annotated[Count, Field(ge=1)]
    """Size of the file."""
    sha256: Digest
    edge_crc32: Annotated[int, Field(ge=0, lt=1 << 32)]
    """crc32 over the first and the last record: detects another file of the same name when it is opened."""
    counted_bytes: Count | None = None
    """UTF-8 bytes of the text whose tokens count as targets; None: equal to text_bytes, or unknown (earlier fine-tuning corpora)."""


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer that produced the tokens; the corpus directory has a copy."""

    kind: str
    path: str
    """Path of the copy, relative to the corpus directory."""
    sha256: Digest
    vocab_size: Annotated[int, Field(ge=1, lt=1 << 31)]
    bos_id: Count
    eos_id: Count
    add_bos: bool = True
    """Whether documents begin with bos_id."""


@dataclass(frozen=True)
class Manifest:
    """The description of a corpus that readers need. Without times and host names: the same input gives the same bytes."""

    tokenizer: TokenizerInfo
    dtype: Annotated[str, Field(pattern="^uint(16|32)$")]
    """Type of the stored tokens."""
    record_tokens: Annotated[int, Field(ge=1, le=MAX_RECORD_TOKENS)]
    """Tokens per record; the last record of a shard may be shorter. Packed corpora: the row length."""
    pack_length: Annotated[int, Field(ge=2, le=MAX_RECORD_TOKENS)] | None
    """Row length of a packed corpus; None: a stream of documents."""
    shards: tuple[ShardInfo, ...]
    gzip9_bytes: Count | None = None
    """Sum over the documents of the size of `gzip -9` of their text; None: not measured."""
    bad_records: Count = 0
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

    @property
    def counted_bytes(self) -> int | None:
        """UTF-8 bytes of the text whose tokens count as targets; None: unknown."""
        if self.parameters.get("sft") and any(shard.counted_bytes is None for shard in self.shards):
            return None  # a corpus made before this was recorded
        return sum(shard.text_bytes if shard.counted_bytes is None else shard.counted_bytes for shard in self.shards)

    @property
    def masked(self) -> bool:
        """Whether the loss counts only a part of the text (fine-tuning corpora)."""
        return bool(self.parameters.get("sft") or self.parameters.get("chat"))

    @property
    def has_pairs(self) -> bool:
        """Whether documents 2k and 2k + 1 are the chosen and the rejected conversation of preference pair k."""
        chat = self.parameters.get("chat")
        return isinstance(chat, Mapping) and bool(chat.get("pairs"))

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
            "tokenizer": _without_default(asdict(self.tokenizer), "add_bos", True),
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
            "shards": [_without_default(asdict(shard), "counted_bytes", None) for shard in self.shards],
            "parameters": json.loads(json.dumps(dict(self.parameters), default=str)),
        }
        return {**content, "sha256": _digest(content)}

    @property
    def sha256(self) -> str:
        """Digest of the content, which identifies the corpus: it covers the sha256 of every shard and of the tokenizer."""
        return str(self.to_json()["sha256"])

    def write(self, directory: Path) -> Path:
        """Write manifest.json atomically. Raises CorpusError for a corpus without tokens."""
        if not self.tokens:
            raise CorpusError(f"empty corpus: no document in {directory}")
        path = directory / MANIFEST_NAME
        write_atomically(path, (json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n").encode())
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
                f"{path}: corpus format version is {describe(content.get('version'))}, supported is {VERSION}; prepare the corpus again"
            )
        stored = content.pop("sha256", None)
        if stored != _digest(content):
            raise CorpusError(f"{path}: modified after it was written (the digest does not match); prepare the corpus again")
        return cls._from_content(path, content)

    @classmethod
    def _from_content(cls, path: Path, content: dict[str, Any]) -> Manifest:
        """Check types and ranges, and that the numbers agree with each other. Raises CorpusError naming file and key."""
        known: dict[str, Any] = {
            key: content[key]
            for key in ("tokenizer", "dtype", "record_tokens", "pack_length", "shards", "gzip9_bytes", "parameters")
            if key in content
        }
        counts = content.get("counts")
        if isinstance(counts, dict) and "bad_records" in counts:
            known["bad_records"] = counts["bad_records"]
        try:
            manifest = _adapter().validate_json(json.dumps(known), strict=True)
        except ValidationError as error:
            raise CorpusError(f"{path} is damaged: {first_problem(error)}") from None
        if not manifest.shards:
            raise CorpusError(f"{path}: empty corpus")
        problem = _contradiction(manifest)
        if problem is not None:
            raise CorpusError(f"{path} is damaged: {problem}")
        return manifest


@functools.cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _contradiction(manifest: Manifest) -> str | None:
    """Return in which way the numbers of a manifest contradict each other; None when they agree."""
    size, packed, tokenizer = manifest.record_tokens, manifest.pack_length, manifest.tokenizer
    if packed is not None and packed != size:
        return f"record_tokens is {size} and pack_length {packed}; they must be equal"
    if max(tokenizer.bos_id, tokenizer.eos_id) >= tokenizer.vocab_size:
        return f"tokenizer: bos_id and eos_id must be below vocab_size {tokenizer.vocab_size}"
    names: set[str] = set()
    for index, shard in enumerate(manifest.shards):
        where = f"shards.{index}"
        if shard.name in names or shard.name in (".", ".."):
            return f"{where}.name: '{shard.name}' is not the name of a file of its own"
        names.add(shard.name)
        if packed is None and shard.records != -(-shard.tokens // size):
            return f"{where}: {shard.tokens} tokens are not {shard.records} records of {size}"
        if packed is not None and not shard.records <= shard.tokens <= shard.records * size:
            return f"{where}: {shard.tokens} tokens do not fill {shard.records} rows of {size}"
        if shard.records > shard.bytes:
            return f"{where}: a file of {shard.bytes} bytes cannot have {shard.records} records"
    if manifest.stream_length >= 1 << 62:
        return "the shards have too many tokens"
    return None


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
        if manifest.tokenizer.add_bos != first.tokenizer.add_bos:
            with_bos, without = (path, first_path) if manifest.tokenizer.add_bos else (first_path, path)
            raise CorpusError(
                f"documents of {with_bos} begin with BOS, those of {without} do not: prepare one again with --bos or --no-bos"
            )
    if vocab_size is not None and first.tokenizer.vocab_size > vocab_size:
        raise CorpusError(
            f"{first_path} has a vocabulary of {first.tokenizer.vocab_size} tokens, more than model.vocab_size={vocab_size}; "
            f"set model.vocab_size={first.tokenizer.vocab_size} or more"
        )
    return first.tokenizer


def _without_default(fields: dict[str, Any], key: str, default: Any) -> dict[str, Any]:
    """Leave out a key that earlier versions did not write where it has its default, so that the same corpus keeps its digest."""
    return {name: value for name, value in fields.items() if name != key or value != default}


def _name(tokenizer: TokenizerInfo) -> str:
    return f"{tokenizer.kind}, {tokenizer.vocab_size} ids, sha256 {tokenizer.sha256[:12]}"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_json(directory: Path, path: Path) -> Any:
    if not directory.exists():
        raise CorpusError(f"corpus not found: {directory} (create it with `ridge data prepare`)")
    if not path.exists():
        raise CorpusError(f"{directory} is not a complete corpus: it has no {MANIFEST_NAME} (run `ridge data prepare` again)")
    try:
        content = read_limited(path)
    except UserError as error:
        raise CorpusError(str(error)) from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}: damaged, not JSON ({error})") from error


def check_same_tokenizer(stored: str | None, current: str | None, where: str) -> None:
    """Refuse data made with another tokenizer than a model was trained with (both as sha256; None: unknown). Raises UserError."""
    if stored and current and stored != current:
        raise UserError(f"the data's tokenizer (sha256 {current[:12]}) is not the one of {where} (sha256 {stored[:12]})")
