"""Prepare a corpus: text in, token shards and a manifest out.

The input is split into shards by names and sizes alone, and one worker makes a shard from start to end. So the output does not depend on
the number of workers, on slices made in other jobs (a job array), or on interruptions and restarts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.configs.errors import UserError
from ridgeline.loaders.chat import ChatEncoder
from ridgeline.loaders.chat_template import ChatTemplate, load_chat_template
from ridgeline.loaders.conversations import Pair
from ridgeline.loaders.inputs import InputOptions, Listing, Unit, list_inputs
from ridgeline.loaders.manifest import CorpusError, Manifest, TokenizerInfo
from ridgeline.loaders.prepare_state import BAD_RECORDS_FILE, State, recorded
from ridgeline.loaders.readers import read_unit
from ridgeline.loaders.records import TRAIN, BadRecord, RecordFields
from ridgeline.loaders.remote import is_url
from ridgeline.loaders.shard_hashes import remember
from ridgeline.loaders.shard_work import Advance, ShardResult, ShardTask, make_shard
from ridgeline.loaders.token_reader import Shard
from ridgeline.loaders.token_record import token_dtype
from ridgeline.loaders.token_writer import RECORD_TOKENS
from ridgeline.loaders.tokenizers import Tokenizer, load_tokenizer
from ridgeline.loaders.workers import run_tasks
from ridgeline.rundir.files import write_atomically

MAX_BAD = 100
TOKENIZER_DIRECTORY = "tokenizer"
"""Subdirectory of a corpus with the copy of its tokenizer."""
BAD_EXAMPLES = 20
"""Bad records in the summary; all of them are in OUTPUT/bad_records.jsonl."""
SMALL_SHARD_BYTES = 4 << 20
SMALL_SHARDS = 16
LARGE_SHARD_BYTES = 256 << 20
"""The default number of shards: one per 4 MiB of input up to 16 (work for every core), and none above 256 MiB of input."""


@dataclass(frozen=True)
class PrepareSettings:
    """The settings that determine the corpus."""

    inputs: tuple[str | Path, ...]
    """Files, directories, and URLs (loaders/remote.py)."""
    output: Path
    tokenizer: str
    """`bytes`, or the path of a tokenizer."""
    options: InputOptions = field(default_factory=InputOptions)
    fields: RecordFields = field(default_factory=RecordFields)
    holdouts: Mapping[str, float] = field(default_factory=dict)
    """Set name -> share of the documents. With holdouts, and for conversations, the sets are in OUTPUT/train and OUTPUT/<name>."""
    shards: int | None = None
    pack_length: int | None = None
    gzip_baseline: bool = False
    add_bos: bool | None = None
    """Whether documents begin with BOS; None: as the tokenizer's own files have it."""
    chat_template: Path | None = None
    """A Jinja file used in place of the tokenizer's chat template."""


@dataclass(frozen=True)
class Slice:
    """Part `index` of `count` of the shards, made by one of several independent runs."""

    index: int
    count: int


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    input_bytes: int
    total_bytes: int
    documents: int
    tokens: int
    bad: int
    shards: int
    total_shards: int


@dataclass(frozen=True)
class SetSummary:
    """One finished corpus."""

    name: str
    path: str
    shards: int
    documents: int
    tokens: int
    padding_share: float | None
    """Share of padding in packed rows; None for a stream."""
    text_bytes: int
    gzip9_bytes: int | None


@dataclass(frozen=True)
class Summary:
    """Result of a run. `sets` is empty after a slice: the corpus is complete only after the merge."""

    sets: tuple[SetSummary, ...]
    bad: int
    bad_examples: tuple[tuple[str, str], ...]
    empty_documents: int
    notes: tuple[str, ...] = ()
    already_done: bool = False
    kept_shards: int = 0
    made_shards: int = 0


def prepare(
    settings: PrepareSettings,
    *,
    workers: int | None = None,
    max_bad: int = MAX_BAD,
    overwrite: bool = False,
    slice: Slice | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Prepare a corpus, continuing an interrupted run with the same settings.

    With `slice` only that part of the shards is made; a run without it then merges them and makes those that are missing.
    Raises UserError for missing, empty or changed input, more than `max_bad` bad records, an output that contains something else, and an
    output that cannot be written.
    """
    _check(settings, workers, max_bad, overwrite, slice)
    listing = list_inputs(settings.inputs, settings.options, settings.output)
    tokenizer = load_tokenizer(settings.tokenizer)
    if settings.add_bos is not None:
        tokenizer.add_bos = settings.add_bos
    chat = _chat_of(settings, listing, tokenizer, overwrite) if settings.fields.chat else None
    state = State(settings.output, describe(settings, listing, tokenizer, chat))
    finished = None if overwrite else state.finished()
    if finished is not None:
        return _finished_summary(settings, finished, listing)
    try:
        with state.claimed(overwrite, f"{slice.index}-of-{slice.count}" if slice else None):
            run = _Run(settings, state, listing, tokenizer, chat, max_bad, on_progress)
            run.make(slice, workers or available_cores())
            return run.slice_summary() if slice else run.merge()
    except OSError as error:
        raise UserError(f"cannot write {error.filename or settings.output}: {error.strerror or error}") from error


def available_cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Chat:
    """How conversations are written, and whether the records are preference pairs."""

    template: ChatTemplate
    pairs: bool

    def describe(self) -> dict[str, Any]:
        """Return what determines the text of a conversation; the date only where the template uses it."""
        date = {"date": self.template.date} if self.template.uses_date else {}
        return {"template_sha256": self.template.sha256, "pairs": self.pairs, **date}


def _chat_of(settings: PrepareSettings, listing: Listing, tokenizer: Tokenizer, overwrite: bool) -> Chat:
    """Read the chat template, with the date of an earlier start, and find out whether the first record is a pair. Raises UserError."""
    if settings.fields.sft:
        raise UserError("--chat and --sft exclude each other: --sft is raw prompt and completion without a template")
    if settings.add_bos is not None:
        raise UserError("--bos and --no-bos have no effect with --chat: the chat template writes BOS")
    earlier = None if overwrite else recorded(settings.output).get("chat")
    date = earlier.get("date") if isinstance(earlier, dict) else None
    template = load_chat_template(Path(settings.tokenizer), settings.chat_template, date if isinstance(date, str) else None)
    ChatEncoder(tokenizer, template)  # refuses a tokenizer without special tokens
    found = (item for unit in listing.units() for item in read_unit(unit, settings.fields))
    pairs = isinstance(next((item for item in found if not isinstance(item, BadRecord)), None), Pair)
    if pairs and settings.pack_length is not None:
        raise UserError("--pack-length does not apply to preference pairs: they are read one conversation per row")
    return Chat(template, pairs)


def describe(settings: PrepareSettings, listing: Listing, tokenizer: Tokenizer, chat: Chat | None = None) -> dict[str, Any]:
    """Return everything that determines the output, as JSON values."""
    return {
        "inputs": [str(path) if is_url(str(path)) else os.path.abspath(path) for path in settings.inputs],
        **asdict(settings.options),
        "text_field": settings.fields.text,
        "sft": settings.fields.sft,
        "tokenizer": {"kind": tokenizer.kind, "sha256": tokenizer.sha256, **({} if tokenizer.add_bos else {"add_bos": False})},
        "holdouts": dict(settings.holdouts),
        "shards": settings.shards,
        "pack_length": settings.pack_length,
        "gzip_baseline": settings.gzip_baseline,
        "sets": [name for name, directory in set_directories(settings).items() if directory != settings.output],
        **({} if chat is None else {"chat": chat.describe()}),
        "input_fingerprint": listing.fingerprint,
    }


def set_directories(settings: PrepareSettings) -> dict[str, Path]:
    """Return set name -> corpus directory."""
    if not settings.holdouts and not settings.fields.chat:
        return {TRAIN: settings.output}
    return {name: settings.output / name for name in (TRAIN, *settings.holdouts)}


def _check(settings: PrepareSettings, workers: int | None, max_bad: int, overwrite: bool, slice: Slice | None) -> None:
    limits = (("shards", settings.shards, 1), ("pack length", settings.pack_length, 2), ("workers", workers, 1), ("max bad", max_bad, 0))
    for name, value, least in limits:
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")
    if slice is not None and not 0 <= slice.index < slice.count:
        raise UserError(f"slice {slice.index}/{slice.count}: the first number must be in 0..{slice.count - 1}")
    if slice is not None and overwrite:
        raise UserError("--overwrite with a slice would remove the shards of other slices; delete the output before the slices start")


def divide(units: Sequence[Unit], shards: int | None) -> list[tuple[Unit, ...]]:
    """Split units into contiguous shards of about equal input bytes, none empty. Raises UserError for more shards than units."""
    total = sum(unit.size_bytes for unit in units)
    if shards is None:
        wanted = max(min(SMALL_SHARDS, math.ceil(total / SMALL_SHARD_BYTES)), math.ceil(total / LARGE_SHARD_BYTES), 1)
        shards = min(wanted, len(units))
    if shards > len(units):
        raise UserError(f"--shards {shards}: the input can be split into at most {len(units)} shards")
    divided: list[tuple[Unit, ...]] = []
    start = done = 0
    for position, unit in enumerate(units, start=1):
        done += unit.size_bytes
        missing = shards - len(divided) - 1
        full = done * shards >= total * (len(divided) + 1)
        if (missing and (full or len(units) - position == missing)) or position == len(units):
            divided.append(tuple(units[start:position]))
            start = position
    return divided


class _Run:
    """One run of the command on a locked output."""

    def __init__(
        self,
        settings: PrepareSettings,
        state: State,
        listing: Listing,
        tokenizer: Tokenizer,
        chat: Chat | None,
        max_bad: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.settings, self.state, self.listing, self.tokenizer = settings, state, listing, tokenizer
        self.chat, self.max_bad, self.on_progress = chat, max_bad, on_progress
        tokenizer.save(state.tokenizer)
        self.directories = set_directories(settings)
        self.tasks = [self._task(index, units) for index, units in enumerate(divide(listing.units(), settings.shards))]
        self.results: dict[int, ShardResult] = {}
        self.advance = Advance()
        self.bad: list[tuple[str, str]] = []

    def _task(self, index: int, units: tuple[Unit, ...]) -> ShardTask:
        return ShardTask(
            index=index,
            units=units,
            sets=self.directories,
            holdouts=self.settings.holdouts,
            fields=self.settings.fields,
            tokenizer=(self.state.tokenizer, self.tokenizer.kind, self.tokenizer.add_bos),
            pack_length=self.settings.pack_length,
            gzip_baseline=self.settings.gzip_baseline,
            chat=None if self.chat is None else self.chat.template,
            pairs=self.chat is not None and self.chat.pairs,
            work=self.state.work,
        )

    def make(self, slice: Slice | None, workers: int) -> None:
        """Make the shards of the slice, or all; existing shards are verified and kept."""
        self.mine = [task for task in self.tasks if slice is None or task.index % slice.count == slice.index]
        self.total_bytes = sum(unit.size_bytes for task in self.mine for unit in task.units)
        for directory in self.directories.values():
            directory.mkdir(parents=True, exist_ok=True)
        self._report()
        run_tasks(make_shard, self.mine, workers, self._take_result, self._take_advance, self._report)
        if list_inputs(self.settings.inputs, self.settings.options, self.settings.output).fingerprint != self.listing.fingerprint:
            raise UserError("the input changed while it was read; run again with --overwrite when it no longer changes")

    def _take_result(self, task: ShardTask, result: ShardResult) -> None:
        self.results[task.index] = result

    def _take_advance(self, step: Advance) -> None:
        now = self.advance
        self.advance = Advance(now.input_bytes + step.input_bytes, now.documents + step.documents, now.tokens + step.tokens)
        self.bad += step.bad
        if len(self.bad) > self.max_bad:
            place, reason = self.bad[-1]
            raise UserError(f"more than {self.max_bad} bad records (--max-bad); the last: {place}: {reason}")

    def _report(self) -> None:
        now = self.advance
        finished, total = len(self.results), len(self.mine)
        self.on_progress(Progress(now.input_bytes, self.total_bytes, now.documents, now.tokens, len(self.bad), finished, total))

    def slice_summary(self) -> Summary:
        """Return the summary of a slice: its shards are written, the corpus is not complete."""
        results = [self.results[index] for index in sorted(self.results)]
        return self._summary((), results)

    def merge(self) -> Summary:
        """Write the manifests of all shards and mark the output complete."""
        results = [self.results[task.index] for task in self.tasks]
        for name in self.directories:
            if not any(result.sets[name].documents for result in results):
                self._refuse_empty_set(name, results)
        sets = tuple(self._write_set(name, directory, results) for name, directory in self.directories.items())
        if self.bad:
            lines = [json.dumps({"place": place, "reason": reason}) for result in results for place, reason in result.bad]
            write_atomically(self.settings.output / BAD_RECORDS_FILE, ("\n".join(lines) + "\n").encode())
        summary = self._summary(sets, results)
        self.state.finish({"bad": summary.bad, "bad_examples": summary.bad_examples, "empty_documents": summary.empty_documents})
        return summary

    def _refuse_empty_set(self, name: str, results: Sequence[ShardResult]) -> None:
        documents = sum(part.documents for result in results for part in result.sets.values())
        bad, empty = len(self.bad), sum(result.empty_documents for result in results)
        self.state.discard()
        if not documents:
            first = f"; the first: {self.bad[0][0]}: {self.bad[0][1]}" if self.bad else ""
            inputs = ", ".join(map(str, self.settings.inputs))
            raise UserError(f"empty corpus: no text in {inputs} ({empty} empty documents, {bad} bad records{first})")
        raise UserError(f"the set '{name}' has none of the {documents} documents; change the fractions of --holdout")

    def _write_set(self, name: str, directory: Path, results: Sequence[ShardResult]) -> SetSummary:
        parts = [part for result in results if (part := result.sets[name]).info is not None]
        tokenizer = self.tokenizer
        tokenizer.save(directory / TOKENIZER_DIRECTORY)
        if self.chat is not None:
            self.chat.template.save(directory / TOKENIZER_DIRECTORY)
        manifest = Manifest(
            tokenizer=TokenizerInfo(
                kind=tokenizer.kind,
                path=TOKENIZER_DIRECTORY,
                sha256=tokenizer.sha256,
                vocab_size=tokenizer.vocab_size,
                bos_id=tokenizer.bos_id,
                eos_id=tokenizer.eos_id,
                add_bos=tokenizer.add_bos,
            ),
            dtype=token_dtype(tokenizer.vocab_size).name,
            record_tokens=self.settings.pack_length or RECORD_TOKENS,
            pack_length=self.settings.pack_length,
            shards=tuple(part.info for part in parts if part.info is not None),
            gzip9_bytes=sum(part.gzip9_bytes for part in parts) if self.settings.gzip_baseline else None,
            bad_records=len(self.bad),
            parameters={key: value for key, value in self.state.described.items() if key != "input_fingerprint"},
        )
        manifest.write(directory)
        remember(directory, manifest.shards)  # each was hashed by this run
        return _set_summary(name, directory, manifest)

    def _summary(self, sets: tuple[SetSummary, ...], results: Sequence[ShardResult]) -> Summary:
        bad = [record for result in results for record in result.bad]
        kept = sum(result.kept for result in results)
        empty = sum(result.empty_documents for result in results)
        return Summary(sets, len(bad), tuple(bad[:BAD_EXAMPLES]), empty, self.listing.notes, False, kept, len(results) - kept)


def _set_summary(name: str, directory: Path, manifest: Manifest) -> SetSummary:
    return SetSummary(
        name=name,
        path=str(directory),
        shards=len(manifest.shards),
        documents=manifest.documents,
        tokens=manifest.tokens,
        padding_share=manifest.padding_share,
        text_bytes=manifest.text_bytes,
        gzip9_bytes=manifest.gzip9_bytes,
    )


def _finished_summary(settings: PrepareSettings, finished: Mapping[str, Any], listing: Listing) -> Summary:
    """Return the summary of a corpus that was already complete. Raises UserError when one of its files is missing or truncated."""
    sets = []
    for name, directory in set_directories(settings).items():
        try:
            manifest = Manifest.read(directory)
            for info in manifest.shards:
                Shard(directory, info, manifest).close()  # checks size, first and last record
        except CorpusError as error:
            raise UserError(f"{settings.output} was complete and is now damaged ({error}); add --overwrite to prepare it again") from error
        sets.append(_set_summary(name, directory, manifest))
    try:
        examples = tuple((str(place), str(reason)) for place, reason in finished["bad_examples"])
        bad, empty = int(finished["bad"]), int(finished["empty_documents"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"the state of {settings.output} is damaged; add --overwrite to prepare it again") from None
    return Summary(tuple(sets), bad, examples, empty, listing.notes, already_done=True)
