"""Train a byte-level BPE tokenizer on the training part of an input.

Any text round-trips exactly: all 256 bytes are in the vocabulary, nothing is normalized, no space is added. Its post-processor puts
BOS before a text, as `ridge data prepare` does.
The same input and settings give the same file on any machine and with any number of threads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.configs.foreign import read_object
from ridgeline.loaders.inputs import InputOptions, Listing, list_inputs
from ridgeline.loaders.readers import read_unit
from ridgeline.loaders.records import TRAIN, BadRecord, Document, RecordFields, set_of
from ridgeline.rundir.files import write_atomically

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+ *|\s+(?!\S)|\s+"
"""No merge crosses these pieces: a word with the character before it, up to three digits, punctuation, line breaks with the
indentation after them (frequent in code), other spaces."""


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings that determine the trained tokenizer."""

    inputs: tuple[str | Path, ...]
    output: Path
    vocab_size: int = 32768
    min_frequency: int = 2
    options: InputOptions = field(default_factory=InputOptions)
    fields: RecordFields = field(default_factory=RecordFields)
    holdouts: Mapping[str, float] = field(default_factory=dict)
    max_bytes: int | None = None
    """Stop reading after this many bytes of text; None: read everything."""
    max_bad: int = 100


@dataclass
class TrainedTokenizer:
    """Result of the training. `reused`: the file existed already, made with the same settings from the same input."""

    path: Path
    vocab_size: int
    documents: int
    text_bytes: int
    bad: list[BadRecord]
    notes: tuple[str, ...]
    reused: bool = False


def train_tokenizer(settings: TokenizerSettings, overwrite: bool = False) -> TrainedTokenizer:
    """Train a tokenizer; write `settings.output` (a tokenizer.json), and its settings in a file next to it.

    Raises UserError for a missing or empty input, too many bad records, a vocabulary that is too small, and an output made with other
    settings (unless `overwrite`).
    """
    if settings.vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab size {settings.vocab_size} is too small; the least is {SMALLEST_VOCABULARY} (256 bytes, {len(SPECIAL_TOKENS)} special)"
        )
    if settings.output.suffix != ".json":
        raise UserError(f"output {settings.output} must end in .json")
    listing = list_inputs(settings.inputs, settings.options)
    identity = _identity(settings, listing)
    sidecar = settings.output.with_suffix(".settings.json")
    earlier = _finished(settings.output, sidecar, identity, overwrite)
    if earlier is not None:
        return TrainedTokenizer(settings.output, **earlier, bad=[], notes=listing.notes, reused=True)
    _make_writable(settings.output.parent)
    stream = _TrainingText(settings, listing)
    tokenizer = _train(stream, settings)
    if stream.documents == 0:
        raise UserError(f"no text to train on in {', '.join(map(str, settings.inputs))} ({len(stream.bad)} bad records)")
    content = tokenizer.to_str(pretty=True)
    counts = {"vocab_size": tokenizer.get_vocab_size(), "documents": stream.documents, "text_bytes": stream.text_bytes}
    _write(settings.output, content)
    _write(sidecar, json.dumps({**identity, "sha256": _sha256(content.encode()), "result": counts}, indent=1) + "\n")
    return TrainedTokenizer(settings.output, **counts, bad=stream.bad, notes=listing.notes)


class _TrainingText:
    """Iterator over the texts of the training documents, with counts."""

    def __init__(self, settings: TokenizerSettings, listing: Listing) -> None:
        self._settings, self._listing = settings, listing
        self.documents = 0
        self.text_bytes = 0
        self.bad: list[BadRecord] = []

    def __iter__(self) -> Iterator[str]:
        settings = self._settings
        for unit in self._listing.units():
            for item in read_unit(unit, settings.fields):
                if isinstance(item, BadRecord):
                    self._count_bad(item)
                elif isinstance(item, Document) and item.text and set_of(item.text, settings.holdouts) == TRAIN:
                    if settings.max_bytes is not None and self.text_bytes >= settings.max_bytes:
                        return
                    self.documents += 1
                    self.text_bytes += len(item.text.encode())
                    yield item.text

    def _count_bad(self, item: BadRecord) -> None:
        self.bad.append(item)
        if len(self.bad) > self._settings.max_bad:
            raise UserError(f"more than {self._settings.max_bad} bad records (--max-bad); the last: {item.source}: {item.reason}")


def _train(text: _TrainingText, settings: TokenizerSettings) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def _identity(settings: TokenizerSettings, listing: Listing) -> dict[str, Any]:
    values = asdict(settings) | {"output": None, "inputs": [str(path) for path in settings.inputs], "max_bad": None}
    described = json.dumps([values, SPLIT_PATTERN, SPECIAL_TOKENS], sort_keys=True)
    return {"settings": _sha256(described.encode()), "input": listing.fingerprint}


def _finished(output: Path, sidecar: Path, identity: dict[str, Any], overwrite: bool) -> dict[str, int] | None:
    """Return the counts of an output made with the same settings, None when there is no output. Raises UserError for any other."""
    if overwrite or not output.exists():
        return None
    try:
        earlier = read_object(sidecar)
        made_here = earlier.get("sha256") == _sha256(read_limited(output)) and isinstance(earlier.get("result"), dict)
    except UserError:
        made_here = False
    if not made_here:
        raise UserError(f"{output} exists and was not made by this command; choose another --output or add --overwrite")
    for part in ("settings", "input"):
        if earlier.get(part) != identity[part]:
            raise UserError(f"{output} was trained with other {part}; choose another --output or add --overwrite")
    return earlier["result"]


def _make_writable(directory: Path) -> None:
    """Create the directory. Raises UserError before the work, not after it, when the result cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {directory}: {error.strerror}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {directory}: permission denied")


def _write(path: Path, content: str) -> None:
    try:
        write_atomically(path, content.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
