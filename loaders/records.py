"""Documents: how a record (a JSON object or a table row) becomes one, and which documents are held out.

With `sft` a record is raw text for a model without a chat template: {"prompt": P, "completion": C} becomes the text P C with loss on C, and
an EOS token with loss follows: the model learns to stop. With `chat` it is a conversation (loaders/conversations.py).

Held-out sets are drawn by a hash of the document's text, the same on every machine and in every order of files. Equal documents are always
in the same set, so no copy of a held-out document is trained on.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError

SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""Names of the sets of a corpus: subdirectories."""
TRAIN = "train"
"""The set of all documents that are not held out."""


@dataclass(frozen=True)
class Place:
    """Location of a record: `file:line` (`file:row` in tables), or the file.

    `number` counts from 1, after the newlines in the first `skipped_bytes` of the file; those are counted only when it is printed.
    """

    path: Path
    number: int | None = None
    skipped_bytes: int = 0
    url: str | None = None
    """Where `path` was copied from: printed in its place."""

    def __str__(self) -> str:
        if self.number is None:
            return self.url or str(self.path)
        return f"{self.url or self.path}:{self.number + _count_newlines(self.path, self.skipped_bytes)}"


@dataclass(frozen=True)
class Document:
    """One document. `loss_spans` are the character ranges of `text` with loss; None: all of it."""

    text: str
    source: Place
    loss_spans: tuple[tuple[int, int], ...] | None = None

    def segments(self) -> list[tuple[str, bool]]:
        """Split the text at the ends of its loss spans: (text, whether it has loss), none empty.

        Segments are tokenized one by one, so no token crosses an end.
        """
        if self.loss_spans is None:
            return [(self.text, True)] if self.text else []
        pieces: list[tuple[str, bool]] = []
        end = 0
        for start, stop in self.loss_spans:
            pieces += [(self.text[end:start], False), (self.text[start:stop], True)]
            end = stop
        pieces.append((self.text[end:], False))
        return [(text, counts) for text, counts in pieces if text]


@dataclass(frozen=True)
class BadRecord:
    """A record that was skipped: its location (`file:line`) and the reason."""

    source: Place
    reason: str


@dataclass(frozen=True)
class RecordFields:
    """Which fields of a record become its document: one text field, prompt and completion (`sft`), or a conversation (`chat`)."""

    text: str = "text"
    sft: bool = False
    chat: bool = False


def document_from_text(text: str, source: Place, loss_spans: tuple[tuple[int, int], ...] | None = None) -> Document | BadRecord:
    """Return a document, or a BadRecord for text without a UTF-8 form (JSON escapes can encode lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return BadRecord(source, f"invalid UTF-8: lone surrogate at character {error.start}")
    return Document(text, source, loss_spans)


def document_from_bytes(data: bytes, source: Place) -> Document | BadRecord:
    """Return the document of the bytes of a text file or line."""
    try:
        return Document(data.decode(), source)
    except UnicodeDecodeError as error:
        return BadRecord(source, f"invalid UTF-8 at byte {error.start}")


def document_from_record(record: Any, fields: RecordFields, source: Place) -> Document | BadRecord:
    """Return the document of a record, or a BadRecord with the reason."""
    if not isinstance(record, Mapping):
        return BadRecord(source, f"expected a JSON object, got {type_name(record)}")
    if not fields.sft:
        return _from_text_field(record, fields.text, source)
    if "prompt" in record and "completion" in record:
        return _from_completion(record["prompt"], record["completion"], source)
    hint = "; use --chat for messages" if "messages" in record else ""
    return BadRecord(source, f"no fields 'prompt' and 'completion' (has: {_names(record)}){hint}")


def _from_text_field(record: Mapping[str, Any], name: str, source: Place) -> Document | BadRecord:
    if name not in record:
        return BadRecord(source, f"missing field '{name}' (has: {_names(record)})")
    text = record[name]
    if not isinstance(text, str):
        return BadRecord(source, f"field '{name}' is not a string but {type_name(text)}")
    return document_from_text(text, source)


def _from_completion(prompt: Any, completion: Any, source: Place) -> Document | BadRecord:
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            return BadRecord(source, f"field '{name}' is not a string but {type_name(value)}")
    if not completion:
        return BadRecord(source, "field 'completion' is empty: nothing to learn")
    text = prompt + completion
    return document_from_text(text, source, ((len(prompt), len(text)),))


def _names(record: Mapping[str, Any]) -> str:
    names = ", ".join(str(name) for name in list(record)[:8])
    return names + (", ..." if len(record) > 8 else "") if names else "nothing"


def type_name(value: Any) -> str:
    """Return what a JSON value is, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _count_newlines(path: Path, end: int) -> int:
    count = 0
    with path.open("rb") as stream:
        while end > 0:
            block = stream.read(min(end, 1 << 20))
            if not block:
                break
            count += block.count(b"\n")
            end -= len(block)
    return count


def parse_holdouts(texts: Sequence[str]) -> dict[str, float]:
    """Parse `name=fraction` settings. Raises UserError for a malformed one, a repeated name, or nothing left to train on."""
    holdouts: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not SET_NAME.fullmatch(name) or not value:
            raise UserError(f"holdout '{text}': expected NAME=FRACTION, such as validation=0.05")
        if name == TRAIN or name in holdouts:
            raise UserError(f"holdout '{text}': the name '{name}' is already taken")
        try:
            fraction = float(value)
        except ValueError:
            fraction = math.nan
        if not 0 < fraction < 1:
            raise UserError(f"holdout '{text}': the fraction must be between 0 and 1")
        holdouts[name] = fraction
    if sum(holdouts.values()) >= 1:
        raise UserError(f"holdouts leave nothing to train on: their fractions sum to {sum(holdouts.values()):g}")
    return holdouts


def set_of(text: str, holdouts: Mapping[str, float]) -> str:
    """Return the name of a document's set: `train` or a holdout, by the hash of its text, in proportion to the fractions."""
    if not holdouts:
        return TRAIN
    draw = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
    for name, fraction in holdouts.items():
        draw -= fraction
        if draw < 0:
            return name
    return TRAIN
