"""From a record (a JSON object or a table row) to a document, and the template of supervised fine-tuning data.

Two layouts of fine-tuning records (`sft`), with the loss on what the model is to say and nowhere else:

    {"prompt": P, "completion": C}                     ->  P C                     loss on C
    {"messages": [{"role": R, "content": T}, ...]}     ->  <|R|> newline T, joined by newlines; loss on the T of assistant messages

The role markers are plain text, so any tokenizer can write them. An EOS token follows each text with loss, and counts: the model learns
to stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import unknown_name

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Place:
    """Where a record is: `file:line` (`file:row` in tables), or just the file.

    `number` counts from 1, after the newlines of the first `skipped_bytes` of the file; those are counted only when somebody asks.
    """

    path: Path
    number: int | None = None
    skipped_bytes: int = 0

    def __str__(self) -> str:
        if self.number is None:
            return str(self.path)
        return f"{self.path}:{self.number + _count_newlines(self.path, self.skipped_bytes)}"


@dataclass(frozen=True)
class Document:
    """One document. `loss_spans` are character ranges of `text` on which the loss counts; None means everywhere."""

    text: str
    source: Place
    loss_spans: tuple[tuple[int, int], ...] | None = None

    def segments(self) -> list[tuple[str, bool]]:
        """Cut the text at the edges of its loss spans: (text, whether the loss counts), none empty.

        Segments are tokenized one by one, so no token lies on both sides of an edge.
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
    """A record that was left out: where it is (`file:line`) and why."""

    source: Place
    reason: str


@dataclass(frozen=True)
class RecordFields:
    """Which fields of a record make its document: one text field, or the fine-tuning layouts."""

    text: str = "text"
    sft: bool = False


def document_from_text(text: str, source: Place, loss_spans: tuple[tuple[int, int], ...] | None = None) -> Document | BadRecord:
    """Build a document, refusing text that has no UTF-8 form (JSON escapes can spell lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return BadRecord(source, f"invalid UTF-8: lone surrogate at character {error.start}")
    return Document(text, source, loss_spans)


def document_from_bytes(data: bytes, source: Place) -> Document | BadRecord:
    """Build a document from the bytes of a text file or line."""
    try:
        return Document(data.decode(), source)
    except UnicodeDecodeError as error:
        return BadRecord(source, f"invalid UTF-8 at byte {error.start}")


def document_from_record(record: Any, fields: RecordFields, source: Place) -> Document | BadRecord:
    """Build the document of a record, or say what is wrong with it."""
    if not isinstance(record, Mapping):
        return BadRecord(source, f"not an object but {_type_name(record)}")
    if not fields.sft:
        return _from_text_field(record, fields.text, source)
    if "messages" in record:
        return _from_messages(record["messages"], source)
    if "prompt" in record and "completion" in record:
        return _from_completion(record["prompt"], record["completion"], source)
    return BadRecord(source, f"neither 'messages' nor 'prompt' and 'completion' (has: {_names(record)})")


def _from_text_field(record: Mapping[str, Any], name: str, source: Place) -> Document | BadRecord:
    if name not in record:
        return BadRecord(source, f"missing field '{name}' (has: {_names(record)})")
    text = record[name]
    if not isinstance(text, str):
        return BadRecord(source, f"field '{name}' is not a string but {_type_name(text)}")
    return document_from_text(text, source)


def _from_completion(prompt: Any, completion: Any, source: Place) -> Document | BadRecord:
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            return BadRecord(source, f"field '{name}' is not a string but {_type_name(value)}")
    if not completion:
        return BadRecord(source, "field 'completion' is empty: nothing to learn")
    text = prompt + completion
    return document_from_text(text, source, ((len(prompt), len(text)),))


def _from_messages(messages: Any, source: Place) -> Document | BadRecord:
    if not isinstance(messages, list) or not messages:
        return BadRecord(source, "field 'messages' is not a non-empty list")
    text = ""
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            return BadRecord(source, f"messages[{index}] has no string 'role' and 'content'")
        if role not in ROLES:
            return BadRecord(source, f"messages[{index}]: {unknown_name('role', role, ROLES)}")
        text += ("\n" if text else "") + f"<|{role}|>\n"
        if role == "assistant" and content:
            spans.append((len(text), len(text) + len(content)))
        text += content
    if not spans:
        return BadRecord(source, "no assistant message with text: nothing to learn")
    return document_from_text(text, source, tuple(spans))


def _names(record: Mapping[str, Any]) -> str:
    names = ", ".join(str(name) for name in list(record)[:8])
    return names + (", ..." if len(record) > 8 else "") if names else "nothing"


def _type_name(value: Any) -> str:
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
