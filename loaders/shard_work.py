"""Make one shard: read its units, tokenize, write one token file per set. Runs in a worker process."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.configs.foreign import read_object
from ridgeline.loaders.chat import ChatEncoder
from ridgeline.loaders.chat_template import ChatTemplate, TemplateError
from ridgeline.loaders.conversations import Conversation, Pair
from ridgeline.loaders.inputs import Unit
from ridgeline.loaders.manifest import ShardInfo
from ridgeline.loaders.prepare_state import SHARD_SUFFIX
from ridgeline.loaders.readers import read_unit
from ridgeline.loaders.records import BadRecord, Document, Place, RecordFields, set_of
from ridgeline.loaders.token_writer import TokenWriter
from ridgeline.loaders.tokenizers import Tokenizer, load_tokenizer

BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 20
"""Documents are tokenized in batches of up to this many documents or characters."""


@dataclass(frozen=True)
class ShardTask:
    """One shard to make. Its bytes depend on everything here except the paths."""

    index: int
    units: tuple[Unit, ...]
    sets: Mapping[str, Path]
    """Set name -> its corpus directory."""
    holdouts: Mapping[str, float]
    fields: RecordFields
    tokenizer: tuple[Path, str, bool]
    """Directory of the tokenizer's copy, its kind, and whether documents begin with BOS."""
    pack_length: int | None
    gzip_baseline: bool
    chat: ChatTemplate | None
    """The template of conversations; None: the units have documents."""
    pairs: bool
    """Whether the units have preference pairs."""
    work: Path
    """Directory of partial files and of the results of finished shards."""


@dataclass(frozen=True)
class SetShard:
    """The part of a shard that belongs to one set; `info` is None when it has no document."""

    info: ShardInfo | None
    documents: int
    text_bytes: int
    gzip9_bytes: int


@dataclass(frozen=True)
class ShardResult:
    """Content of a finished shard; stored, so that a later run can keep the shard."""

    index: int
    sets: dict[str, SetShard]
    bad: list[tuple[str, str]]
    """Bad records in order: (place, reason)."""
    empty_documents: int
    kept: bool = False
    """Whether it was made by an earlier run."""


@dataclass(frozen=True)
class Advance:
    """Progress since the last message."""

    input_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    bad: tuple[tuple[str, str], ...] = ()


Send = Callable[[Advance], None]
Content = Document | Conversation | Pair


def make_shard(task: ShardTask, send: Send) -> ShardResult:
    """Make a shard, or keep the one of an earlier run after verifying its checksum."""
    kept = _finished_result(task)
    if kept is not None:
        tokens = sum(part.info.tokens for part in kept.sets.values() if part.info)
        send(Advance(sum(unit.size_bytes for unit in task.units), sum(p.documents for p in kept.sets.values()), tokens, tuple(kept.bad)))
        return kept
    for stale in task.work.glob(f"partial-{task.index:05d}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = task.work / f"partial-{task.index:05d}-{os.getpid()}"
    try:
        result = _Shard(task, partial, send).run()
        _write_result(task, result)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or task.work}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return result


class _Shard:
    """A shard being written."""

    def __init__(self, task: ShardTask, partial: Path, send: Send) -> None:
        self.task, self.partial, self.send = task, partial, send
        self.tokenizer = _load_tokenizer(*task.tokenizer)
        self.chat = None if task.chat is None else ChatEncoder(self.tokenizer, task.chat)
        self.writers: dict[str, TokenWriter] = {}
        self.counts = {name: [0, 0, 0] for name in task.sets}  # documents, text bytes, gzip bytes
        self.bad: list[tuple[str, str]] = []
        self.empty_documents = 0

    def run(self) -> ShardResult:
        for unit in self.task.units:
            for items in self._batches(unit):
                tokens = sum(self._write(entry) for entry in self._entries(items))
                self.send(Advance(0, len(items), tokens))
            self.send(Advance(unit.size_bytes))
        infos = {name: self._finish(name, writer) for name, writer in self.writers.items()}
        sets = {name: SetShard(infos.get(name), *counts) for name, counts in self.counts.items()}
        return ShardResult(self.task.index, sets, self.bad, self.empty_documents)

    def _batches(self, unit: Unit) -> Iterator[list[Content]]:
        items: list[Content] = []
        characters = 0
        for item in read_unit(unit, self.task.fields):
            if isinstance(item, BadRecord):
                self._skip(item.source, item.reason)
                continue
            if isinstance(item, Document) and not item.text:
                self.empty_documents += 1
                continue
            items.append(item)
            characters += len(item.text) if isinstance(item, Document) else 0
            if len(items) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
                yield items
                items, characters = [], 0
        if items:
            yield items

    def _skip(self, source: Place, reason: str) -> None:
        self.bad.append((str(source), reason))
        self.send(Advance(bad=(self.bad[-1],)))

    def _entries(self, items: list[Content]) -> Iterator[Entry]:
        """Yield what is stored of the items of a batch, in order."""
        if self.chat is None:
            documents = [item for item in items if isinstance(item, Document)]
            assert len(documents) == len(items)
            for document, encoded in zip(documents, encode_documents(self.tokenizer, documents), strict=True):
                yield Entry(document.text, ((document.text, encoded),))
            return
        for item in items:
            if isinstance(item, Document) or isinstance(item, Pair) != self.task.pairs:
                what = "a preference pair" if isinstance(item, Pair) else "no preference pair"
                self._skip(item.source, f"the record is {what}, unlike the first one of the input; prepare them apart")
                continue
            conversations = (item.chosen, item.rejected) if isinstance(item, Pair) else (item,)
            try:
                yield Entry(item.key, tuple(self._encode_chat(self.chat, conversation) for conversation in conversations))
            except TemplateError as error:
                self._skip(item.source, str(error))

    def _encode_chat(self, encoder: ChatEncoder, conversation: Conversation) -> tuple[str, Encoded]:
        chat = encoder.encode(conversation)
        counted = np.flatnonzero(chat.loss_mask)
        counted_text = self.tokenizer.decode(chat.ids[counted[counted > 0]].tolist())
        return chat.text, Encoded(chat.ids, chat.loss_mask, len(counted_text.encode()))

    def _write(self, entry: Entry) -> int:
        name = set_of(entry.key, self.task.holdouts)
        if name not in self.writers:
            self.writers[name] = self._open(name)
        counts, tokens = self.counts[name], 0
        for text, encoded in entry.documents:
            data = text.encode()
            with _writing(self.task.sets[name]):
                self.writers[name].add(encoded.ids, loss_mask=encoded.loss_mask, text_bytes=len(data), counted_bytes=encoded.counted_bytes)
            counts[0] += 1
            counts[1] += len(data)
            if self.task.gzip_baseline:
                counts[2] += gzip9_size_bytes(data)
            tokens += len(encoded.ids)
        return tokens

    def _open(self, name: str) -> TokenWriter:
        shard_name = f"shard-{self.task.index:05d}{SHARD_SUFFIX}"
        with _writing(self.task.sets[name]):
            return TokenWriter(self.partial / name, shard_name, vocab_size=self.tokenizer.vocab_size, pack_length=self.task.pack_length)

    def _finish(self, name: str, writer: TokenWriter) -> ShardInfo:
        with _writing(self.task.sets[name]):
            info = writer.close()
        (self.partial / name / info.name).replace(self.task.sets[name] / info.name)
        return info


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Raise UserError for a failed write. ArrayRecord raises RuntimeError or ValueError when the disk is full."""
    try:
        yield
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join((getattr(error, "strerror", None) or str(error)).split()).partition("; writing ")[
            0
        ]  # the library repeats the path
        raise UserError(reason if reason.startswith("cannot write") else f"cannot write {directory}: {reason}") from error


@dataclass(frozen=True)
class Encoded:
    """The tokens of a document."""

    ids: np.ndarray
    """int32 [n], from BOS (where the tokenizer adds it) to EOS."""
    loss_mask: np.ndarray | None
    """bool [n], True where the token counts; None: all."""
    counted_bytes: int
    """UTF-8 bytes of the text of the tokens that count as targets."""


@dataclass(frozen=True)
class Entry:
    """What is stored of one item, always in one set: a document or conversation, or the two conversations of a pair."""

    key: str
    """Text by whose hash the set is drawn."""
    documents: tuple[tuple[str, Encoded], ...]
    """(text, its tokens)."""


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> Iterator[Encoded]:
    """Encode documents.

    In a document with loss spans each span is followed by an EOS that counts: the model learns to stop. BOS never counts, nor does the
    first token of a document without BOS: nothing predicts it.
    """
    segments = [document.segments() for document in documents]
    encoded = iter(tokenizer.encode_batch([text for pieces in segments for text, _ in pieces]))
    for document, pieces in zip(documents, segments, strict=True):
        ids, counted_bytes = list(tokenizer.prefix), 0
        mask = [False] * len(ids)
        for place, (text, counts) in enumerate(pieces, start=1):
            piece_ids = next(encoded)
            if counts:
                counted_bytes += len(text.encode()) - (0 if ids else len(tokenizer.decode(piece_ids[:1]).encode()))
            ids += piece_ids
            mask += [counts] * len(piece_ids)
            if counts or place == len(pieces):
                ids.append(tokenizer.eos_id)
                mask.append(counts)
        if len(ids) == 1:  # a tokenizer that drops the whole text, and adds no BOS
            ids, mask = [tokenizer.bos_id, *ids], [False, *mask]
        loss_mask = None if document.loss_spans is None else np.array(mask, bool)
        yield Encoded(np.array(ids, np.int32), loss_mask, max(counted_bytes, 0))


def gzip9_size_bytes(data: bytes) -> int:
    """Return the size of `data` compressed with `gzip -9 -n`: 10 bytes of header, deflate at level 9, 8 bytes of trailer."""
    return len(gzip.compress(data, 9, mtime=0))


@lru_cache(maxsize=1)
def _load_tokenizer(directory: Path, kind: str, add_bos: bool) -> Tokenizer:
    tokenizer = load_tokenizer(directory, kind)  # once per worker, not once per shard
    tokenizer.add_bos = add_bos
    return tokenizer


def result_path(work: Path, index: int) -> Path:
    """Return the path of the result of a finished shard."""
    return work / f"finished-{index:05d}.json"


def read_result(path: Path) -> ShardResult | None:
    """Read the result of a finished shard; None when it is missing or damaged."""
    try:
        content = read_object(path)
        sets = {
            name: SetShard(**{**part, "info": None if part["info"] is None else ShardInfo(**part["info"])})
            for name, part in content["sets"].items()
        }
        return ShardResult(content["index"], sets, [(place, reason) for place, reason in content["bad"]], content["empty_documents"], True)
    except (UserError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_result(task: ShardTask, result: ShardResult) -> None:
    path = result_path(task.work, task.index)
    partial = path.with_suffix(f".{os.getpid()}")
    content: dict[str, Any] = asdict(result)
    del content["kept"]
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


def _finished_result(task: ShardTask) -> ShardResult | None:
    result = read_result(result_path(task.work, task.index))
    if result is None:
        return None
    for name, part in result.sets.items():
        if part.info is not None and not _intact(task.sets[name] / part.info.name, part.info.sha256):
            return None
    return result


def _intact(path: Path, sha256: str) -> bool:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == sha256
    except OSError:
        return False
