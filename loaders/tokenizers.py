"""Tokenizers with one interface, and the registry of their kinds.

Documents are encoded as plain text: the characters `<|endoftext|>` in one never become the special token. Only the output of a chat
template (loaders/chat.py) is encoded with special tokens.
The code that writes documents adds BOS and EOS; `encode_batch` does not.

Whether a text begins with BOS is one rule per tokenizer, `add_bos`, for prepared documents, prompts and exports alike. A tokenizer.json
has it in its post-processor; each copy beside a corpus or a run records it.
"""

from __future__ import annotations

import abc
import base64
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ridgeline.configs import plugins
from ridgeline.configs.errors import UserError, nearest
from ridgeline.configs.foreign import parse_object, shortened
from ridgeline.loaders.tokenizer_files import (
    BOS_NAMES,
    CONFIG_NAME,
    EOS_NAMES,
    configured_special_tokens,
    digest,
    json_object,
    one_file,
    openai_definition,
    own_record,
    read_bytes,
    read_ranks,
    read_text,
    recorded_rule,
    special_token,
    with_prefix,
    write_json,
)

RULE_NAME = "add_bos.json"
"""Records `add_bos` beside the files of a plug-in."""


class Tokenizer(abc.ABC):
    """Text to token ids and back. `bos_id` is the EOS id when the tokenizer has no BOS."""

    kind: ClassVar[str]
    vocab_size: int
    bos_id: int
    eos_id: int
    sha256: str
    """Of everything that determines the ids (vocabulary, merges, pattern, BOS, EOS): files that differ only in formatting are equal."""
    add_bos: bool = True
    """Whether texts begin with `bos_id`. Recorded in the copy: by `save` for a plug-in, by `save_copy` of the built-in kinds."""
    records_add_bos: bool = True
    """False: the files state `add_bos` by their post-processor only. Copies made before the rule was recorded are of documents with BOS."""

    @property
    def prefix(self) -> list[int]:
        """The ids that a text begins with."""
        return [self.bos_id] if self.add_bos else []

    @classmethod
    @abc.abstractmethod
    def find(cls, path: Path) -> Path | None:
        """Return `path` if it is a file of this kind, or the file of this kind in the directory `path`; else None."""

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts as plain text: without BOS and EOS, and without recognizing special tokens in the text."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids; special tokens and ids outside the vocabulary are dropped, invalid UTF-8 becomes U+FFFD."""

    def decode_all(self, ids: Iterable[int]) -> str:
        """Decode ids with the names of special tokens, where the kind has them; to show rows."""
        return self.decode(ids)

    @abc.abstractmethod
    def save_copy(self, directory: Path) -> Path:
        """Write the files that `load_tokenizer(directory, kind)` needs for this tokenizer; return the main file."""

    def save(self, directory: Path) -> None:
        """Write the files that `load_tokenizer(directory, kind)` needs for this tokenizer, `add_bos` included."""
        self.save_copy(directory)
        if _rule_beside(type(self)):
            write_json(directory / RULE_NAME, {"add_bos": self.add_bos})

    def write_rule(self, directory: Path) -> None:
        """Write `add_bos` into the copy of this tokenizer in a directory."""
        self.save(directory)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: ids 0-255, BOS 256, EOS 257."""

    kind = "bytes"
    file_name = "bytes.json"

    def __init__(self, path: Path | None = None) -> None:
        self.vocab_size, self.bos_id, self.eos_id = 258, 256, 257
        recorded = None  # a subclass may have a file of its own
        if path is not None and path.name == ByteTokenizer.file_name:
            recorded = recorded_rule(json_object(path), "add_bos", path)
        self.add_bos = recorded is not False
        self.sha256 = digest({"kind": self.kind, "bos": self.bos_id, "eos": self.eos_id})

    @classmethod
    def find(cls, path: Path) -> Path | None:
        return one_file(path, lambda name: name == cls.file_name)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save_copy(self, directory: Path) -> Path:
        rule = {} if self.add_bos else {"add_bos": False}
        return write_json(directory / self.file_name, {"kind": self.kind, "bos_id": self.bos_id, "eos_id": self.eos_id, **rule})


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` of the `tokenizers` library. BOS and EOS: from tokenizer_config.json in its directory, else by usual names.

    add_bos: from the record of a copy (tokenizer_config.json, `ridgeline.add_bos`); else as the post-processor does, which is what
    transformers uses; without one, true for a tokenizer of `ridge data tokenizer`, which had none in earlier versions.
    """

    kind = "huggingface"

    def __init__(self, path: Path) -> None:
        import tokenizers

        text = read_text(path)
        content = parse_object(text.encode(), path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except BaseException as error:  # the library raises bare Exception, and PanicException, which is not one
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UserError(f"{path}: not a tokenizer.json of the tokenizers library ({shortened(error)})") from error
        # The file may contain truncation and padding settings, which would silently truncate or pad documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        content.update(truncation=None, padding=None)
        self._content = content
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        configured = configured_special_tokens(path)
        self.eos_token = special_token("EOS", path, vocabulary, configured.get("eos_token"), EOS_NAMES)
        self.bos_token = special_token("BOS", path, vocabulary, configured.get("bos_token"), BOS_NAMES)
        if self.eos_token is None:
            raise UserError(f"{path}: no EOS token; set 'eos_token' in {path.parent / 'tokenizer_config.json'}")
        self.eos_id = vocabulary[self.eos_token]
        self._record = own_record(path)
        added = self.post_processor_prefix()
        if len(added) > 1:
            raise UserError(f"{path}: its post_processor puts {len(added)} tokens before a text; only one, BOS, is supported")
        self.bos_id = added[0] if added else self.eos_id if self.bos_token is None else vocabulary[self.bos_token]
        recorded = recorded_rule(self._record, "add_bos", path.with_name(CONFIG_NAME))
        self.records_add_bos = recorded is not None
        trained_here = content.get("post_processor") is None and {self.bos_token, self.eos_token} == {BOS_NAMES[0], EOS_NAMES[0]}
        self.add_bos = bool(added) or trained_here if recorded is None else recorded
        original = {"post_processor": self._record["post_processor"]} if "post_processor" in self._record else {}
        self.sha256 = digest({"content": {**content, **original}, "bos": self.bos_id, "eos": self.eos_id})

    @classmethod
    def find(cls, path: Path) -> Path | None:
        if path.is_file():
            return path if path.suffix == ".json" and path.name != ByteTokenizer.file_name else None
        return one_file(path, lambda name: name == "tokenizer.json")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_all(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode_with_special_tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text in which the names of special tokens are those tokens, without adding any.

        Returns ids [n] and the range of characters of each [n]. For the output of a chat template; other text is plain.
        """
        self._tokenizer.encode_special_tokens = False
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        return encoding.ids, encoding.offsets

    def post_processor_prefix(self) -> list[int]:
        """Return the special tokens that the post-processor puts before a text."""
        encoding = self._tokenizer.encode("a")
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [token for token, special in itertools.takewhile(lambda pair: pair[1], marked)]

    def save_copy(self, directory: Path) -> Path:
        names = {"eos_token": self.eos_token} | ({"bos_token": self.bos_token} if self.bos_token else {})
        write_json(directory / CONFIG_NAME, {"tokenizer_class": "PreTrainedTokenizerFast", **names})
        path = write_json(directory / "tokenizer.json", self._content)
        self.write_rule(directory)
        return path

    def write_rule(self, directory: Path) -> None:
        """Write `add_bos` into the post-processor of the tokenizer.json in a directory, and record it in its tokenizer_config.json.

        The record has the original post-processor where it was replaced, so that the copy has the same sha256.
        """
        record = {**self._record, "add_bos": self.add_bos}
        if bool(self.post_processor_prefix()) != self.add_bos:
            record.setdefault("post_processor", self._content.get("post_processor"))
            changed = with_prefix(self._content.get("post_processor"), self._tokenizer, self.prefix)
            file = directory / "tokenizer.json"
            write_json(file, {**json_object(file), "post_processor": changed})
        config_file = directory / CONFIG_NAME
        config = json_object(config_file) if config_file.exists() else {"eos_token": self.eos_token}
        # transformers 4 reads add_bos_token for some classes, later versions only the post-processor
        write_json(config_file, {**config, "add_bos_token": self.add_bos, "ridgeline": record})


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file. Text that its normalizer drops (such as extra spaces) does not round-trip."""

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self._proto = read_bytes(path)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._proto)
        except Exception as error:  # RuntimeError or another, by version
            raise UserError(f"{path}: not a SentencePiece model ({error})") from error
        self.vocab_size = self._processor.vocab_size()
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise UserError(f"{path}: the SentencePiece model has no EOS piece; train it with --eos_id")
        bos_id = self._processor.bos_id()
        self.bos_id = bos_id if bos_id >= 0 else self.eos_id
        config_file = path.with_name(CONFIG_NAME)
        self.add_bos = not config_file.exists() or bool(recorded_rule(json_object(config_file), "add_bos_token", config_file))
        self.sha256 = hashlib.sha256(self._proto).hexdigest()

    @classmethod
    def find(cls, path: Path) -> Path | None:
        return one_file(path, lambda name: name.endswith(".model"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), out_type=int, num_threads=1)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids if i < self.vocab_size])

    def save_copy(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "tokenizer.model"
        path.write_bytes(self._proto)
        self.write_rule(directory)
        return path

    def write_rule(self, directory: Path) -> None:
        """Write `add_bos` into the tokenizer_config.json of a directory; transformers reads the .model file with it."""
        config_file = directory / CONFIG_NAME
        names = {"eos_token": self.eos_id} | ({} if self.bos_id == self.eos_id else {"bos_token": self.bos_id})
        config: dict[str, Any] = {role: self._processor.id_to_piece(i) for role, i in names.items()}
        if config_file.exists():
            config = json_object(config_file)
        write_json(config_file, {"tokenizer_class": "PreTrainedTokenizerFast", **config, "add_bos_token": self.add_bos})


class TiktokenTokenizer(Tokenizer):
    """A `.tiktoken` ranks file. Its split pattern and special tokens come from `FILE.json` in the same directory
    ({"pattern": ..., "special_tokens": {name: id}}), or from tiktoken's own definitions for OpenAI's file names."""

    kind = "tiktoken"
    known = ("r50k_base", "p50k_base", "cl100k_base", "o200k_base")

    def __init__(self, path: Path) -> None:
        import tiktoken

        ranks = read_ranks(path)
        self._definition, self.add_bos = self._find_definition(path, ranks)
        special_tokens: dict[str, int] = self._definition["special_tokens"]
        clash = sorted(set(special_tokens.values()) & set(ranks.values()))
        if clash:
            raise UserError(f"{path}: special tokens reuse ids of the ranks file: {clash[:5]}")
        try:
            self._encoding = tiktoken.Encoding(
                path.stem, pat_str=self._definition["pattern"], mergeable_ranks=ranks, special_tokens=special_tokens
            )
        except Exception as error:  # ValueError for a bad pattern; a Rust panic for broken ranks
            raise UserError(f"{path}: tiktoken rejects the ranks or the pattern ({error})") from error
        self._ranks = ranks
        eos = next((name for name in EOS_NAMES if name in special_tokens), None)
        bos = next((name for name in BOS_NAMES if name in special_tokens), None)
        if eos is None:
            raise UserError(f"{path}: no EOS among the special tokens (one of {', '.join(EOS_NAMES)})")
        self.eos_id = special_tokens[eos]
        self.bos_id = self.eos_id if bos is None else special_tokens[bos]
        self._special_ids = frozenset(special_tokens.values())
        self.vocab_size = self._encoding.max_token_value + 1
        canonical = {base64.b64encode(token).decode(): rank for token, rank in ranks.items()}
        self.sha256 = digest({"ranks": canonical, **self._definition})

    @classmethod
    def _find_definition(cls, path: Path, ranks: dict[bytes, int]) -> tuple[dict[str, Any], bool]:
        """Return pattern and special tokens, and add_bos."""
        sidecar = path.with_name(path.name + ".json")
        if not sidecar.exists() and path.stem in cls.known:
            return openai_definition(path.stem, ranks), True
        if not sidecar.exists():
            raise UserError(
                f"{path}: pattern and special tokens are unknown; write {sidecar} with "
                '{"pattern": ..., "special_tokens": {"<|endoftext|>": ID}}'
            )
        try:
            content = json.loads(read_text(sidecar))
            pattern, special_tokens = content["pattern"], content["special_tokens"]
            if not isinstance(pattern, str) or not all(isinstance(i, int) and i >= 0 for i in special_tokens.values()):
                raise TypeError("'pattern' must be a string and 'special_tokens' a map of name to id")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{sidecar}: not a tiktoken definition ({error})") from error
        return {"pattern": pattern, "special_tokens": special_tokens}, recorded_rule(content, "add_bos", sidecar) is not False

    @classmethod
    def find(cls, path: Path) -> Path | None:
        return one_file(path, lambda name: name.endswith(".tiktoken"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=1)

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(i) for i in ids if i < self.vocab_size and i not in self._special_ids]
        return self._encoding.decode(known, errors="replace")

    def save_copy(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "tokenizer.tiktoken"
        ordered = sorted(self._ranks.items(), key=lambda item: item[1])
        path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ordered))
        write_json(path.with_name(path.name + ".json"), self._definition | ({} if self.add_bos else {"add_bos": False}))
        return path


KINDS: dict[str, type[Tokenizer]] = {
    cls.kind: cls for cls in (ByteTokenizer, HuggingFaceTokenizer, TiktokenTokenizer, SentencePieceTokenizer)
}
"""Kind -> class. In a directory with files of several kinds (such as Llama 2's) the first in this order is used."""


def load_tokenizer(spec: str | Path, kind: str | None = None) -> Tokenizer:
    """Load a tokenizer: the word `bytes`, a file, or a directory with one.

    Without `kind`, the kind follows from the name (tokenizer.json, *.model, *.tiktoken).
    Raises UserError for a missing or unreadable file, an unknown kind, or a tokenizer without EOS.
    """
    if kind is not None:
        _class(kind)  # refuses an unknown kind
    if str(spec) == ByteTokenizer.kind and kind in (None, ByteTokenizer.kind):
        return ByteTokenizer()
    path = Path(spec)
    if not path.exists():
        hint = f"; did you mean '{ByteTokenizer.kind}'?" if nearest(str(spec), [ByteTokenizer.kind]) else ""
        raise UserError(
            f"tokenizer not found: {path}{hint} (allowed: a tokenizer.json, *.tiktoken or *.model file, a directory with one, 'bytes')"
        )
    for name in plugins.all_names("tokenizers", KINDS) if kind is None else (kind,):
        cls = _class(name)
        found = path if kind is not None and path.is_file() else cls.find(path)
        if found is not None:
            tokenizer = cls(found)  # type: ignore[call-arg]
            rule = found.with_name(RULE_NAME)
            if _rule_beside(cls) and rule.exists() and (found_rule := recorded_rule(json_object(rule), "add_bos", rule)) is not None:
                tokenizer.add_bos = found_rule
            return tokenizer
    place = "no tokenizer in directory" if path.is_dir() else "unknown tokenizer kind:"
    raise UserError(f"{place} {path} (allowed: tokenizer.json, *.tiktoken, *.model, or the word 'bytes')")


def _rule_beside(cls: type[Tokenizer]) -> bool:
    """Return whether `add_bos` is recorded in a file of its own: for plug-ins, except those with the files of a kind that records it."""
    return cls.kind not in KINDS and not issubclass(cls, HuggingFaceTokenizer | SentencePieceTokenizer)


def holds_tokenizer(directory: Path) -> bool:
    """Return whether `load_tokenizer` finds a tokenizer in a directory."""
    return directory.is_dir() and any(_class(name).find(directory) for name in plugins.all_names("tokenizers", KINDS))


def _class(kind: str) -> type[Tokenizer]:
    """Return the class of a kind: a built-in one, or the plug-in of that name. Raises UserError for an unknown kind."""
    plugins.find("tokenizers", kind, KINDS)  # refuses a name that is registered twice
    if kind in KINDS:
        return KINDS[kind]
    cls = plugins.load("tokenizers", kind, type, KINDS)
    if not issubclass(cls, Tokenizer) or cls.kind != kind:
        raise UserError(f"tokenizer kind '{kind}': {cls.__module__}.{cls.__qualname__} must be a Tokenizer with kind = '{kind}'")
    return cls
