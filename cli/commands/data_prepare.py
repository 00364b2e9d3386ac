"""`ridge data prepare` and `ridge data train-tokenizer`."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import json_option
from ridgeline.cli.tables import Column, print_json, print_table
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.loaders.inputs import InputOptions
    from ridgeline.loaders.prepare import Progress, Slice, Summary
    from ridgeline.loaders.records import RecordFields

PLAIN_LINE_EVERY_S = 10.0


def input_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Take what says which text is read."""
    for option in reversed(
        (
            click.option(
                "-i",
                "--input",
                "inputs",
                type=click.Path(path_type=Path),
                multiple=True,
                required=True,
                help="File or directory; repeatable.",
            ),
            click.option(
                "--format",
                "input_format",
                default="auto",
                show_default=True,
                help="auto (by name), text (a file is a document), lines, records, jsonl, parquet or arrow.",
            ),
            click.option("--split", help="Split of a Hugging Face dataset directory (default: train)."),
            click.option(
                "--include", multiple=True, metavar="GLOB", help="Read only these files of a directory, such as '**/*.py'; repeatable."
            ),
            click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out these files or directories; repeatable."),
            click.option("--text-field", default="text", show_default=True, help="Field of a record that holds its text."),
            click.option(
                "--sft", is_flag=True, help="Records hold prompt and completion, or messages: the loss counts on what the model says."
            ),
            click.option(
                "--holdout",
                "holdouts",
                multiple=True,
                metavar="NAME=SHARE",
                help="Set aside documents, such as validation=0.05; repeatable.",
            ),
            click.option("--max-bad", type=int, default=100, show_default=True, help="Stop after more bad records than this."),
            click.option("--overwrite", is_flag=True, help="Replace an output made with other settings or from other input."),
        )
    ):
        function = option(function)
    return function


@click.command()
@input_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory of the corpus (with --holdout: of the sets)."
)
@click.option("--tokenizer", required=True, help="'bytes', or a tokenizer.json, *.model or *.tiktoken file, or a directory with one.")
@click.option("--pack-length", type=int, metavar="T", help="Pack whole documents into rows of T tokens (best fit).")
@click.option("--shards", type=int, help="Number of shard files (default: by the size of the input).")
@click.option("--gzip-baseline", is_flag=True, help="Also store what gzip -9 makes of each document, summed.")
@click.option("--workers", type=int, help="Processes (default: the cores there are). Never changes the output.")
@click.option("--slice", "slice_text", metavar="I/N", help="Make only part I (from 0) of N; the same command without --slice then merges.")
@json_option
def prepare(
    inputs: tuple[Path, ...],
    input_format: str,
    split: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    text_field: str,
    sft: bool,
    holdouts: tuple[str, ...],
    max_bad: int,
    overwrite: bool,
    output: Path,
    tokenizer: str,
    pack_length: int | None,
    shards: int | None,
    gzip_baseline: bool,
    workers: int | None,
    slice_text: str | None,
    as_json: bool,
) -> None:
    """Tokenize text into a corpus of token files.

    Reads text, JSON lines (.gz, .zst), Parquet, directories of files and Hugging Face datasets. The output depends on the input and the
    settings alone. A run that was stopped continues with the same command.
    """
    from ridgeline.loaders.holdout import parse_holdouts
    from ridgeline.loaders.prepare import PrepareSettings
    from ridgeline.loaders.prepare import prepare as run

    settings = PrepareSettings(
        inputs=inputs,
        output=output,
        tokenizer=tokenizer,
        options=_input_options(input_format, split, include, exclude),
        fields=_fields(text_field, sft),
        holdouts=parse_holdouts(holdouts),
        shards=shards,
        pack_length=pack_length,
        gzip_baseline=gzip_baseline,
    )
    started_s = time.monotonic()
    try:
        with _display() as on_progress:
            summary = run(
                settings, workers=workers, max_bad=max_bad, overwrite=overwrite, slice=_parse_slice(slice_text), on_progress=on_progress
            )
    except KeyboardInterrupt:
        click.echo("stopped; finished shards are kept, and the same command continues", err=True)
        raise
    if as_json:
        print_json(dataclasses.asdict(summary))
    else:
        _print_summary(summary, output, slice_text, time.monotonic() - started_s)


@click.command("train-tokenizer")
@input_options
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The tokenizer.json to write.")
@click.option("--vocab-size", type=int, default=32768, show_default=True, help="Tokens, special ones included.")
@click.option("--max-bytes", type=int, help="Stop reading after this much text (default: read all).")
@json_option
def train_tokenizer(
    inputs: tuple[Path, ...],
    input_format: str,
    split: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    text_field: str,
    sft: bool,
    holdouts: tuple[str, ...],
    max_bad: int,
    overwrite: bool,
    output: Path,
    vocab_size: int,
    max_bytes: int | None,
    as_json: bool,
) -> None:
    """Train a byte-level BPE tokenizer.

    Reads the same inputs as `prepare`; with the same --holdout it is trained on the training part only.
    """
    from ridgeline.loaders.holdout import parse_holdouts
    from ridgeline.loaders.train_tokenizer import TokenizerSettings
    from ridgeline.loaders.train_tokenizer import train_tokenizer as run

    settings = TokenizerSettings(
        inputs=inputs,
        output=output,
        vocab_size=vocab_size,
        options=_input_options(input_format, split, include, exclude),
        fields=_fields(text_field, sft),
        holdouts=parse_holdouts(holdouts),
        max_bytes=max_bytes,
        max_bad=max_bad,
    )
    started_s = time.monotonic()
    result = run(settings, overwrite=overwrite)
    if as_json:
        print_json({**dataclasses.asdict(result), "bad": len(result.bad)})
        return
    for note in result.notes:
        click.echo(note)
    _print_bad(len(result.bad), [(str(item.source), item.reason) for item in result.bad])
    corpus = f"{result.documents:,} documents, {result.text_bytes / 1e6:.1f} MB"
    if result.reused:
        click.echo(f"{result.path}: already trained with these settings ({result.vocab_size:,} tokens, {corpus})")
    else:
        click.echo(f"{result.path}: {result.vocab_size:,} tokens from {corpus} in {time.monotonic() - started_s:.1f} s")


def _input_options(input_format: str, split: str | None, include: tuple[str, ...], exclude: tuple[str, ...]) -> InputOptions:
    from ridgeline.loaders.inputs import InputOptions

    return InputOptions(format=input_format, split=split, include=include, exclude=exclude)


def _fields(text_field: str, sft: bool) -> RecordFields:
    from ridgeline.loaders.records import RecordFields

    return RecordFields(text=text_field, sft=sft)


def _parse_slice(text: str | None) -> Slice | None:
    from ridgeline.loaders.prepare import Slice

    if text is None:
        return None
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal()):
        raise UserError(f"--slice '{text}' is not I/N (such as 0/8)")
    return Slice(int(index), int(count))


@contextmanager
def _display() -> Iterator[Callable[[Progress], None]]:
    """Show progress on stderr: a bar on a terminal, a plain line now and then otherwise."""
    if sys.stderr.isatty():
        with _bar() as show:
            yield show
        return
    last_s = time.monotonic()

    def print_line(progress: Progress) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= PLAIN_LINE_EVERY_S:
            last_s = time.monotonic()
            share = progress.input_bytes / max(progress.total_bytes, 1)
            click.echo(
                f"{share:4.0%}  shards {progress.shards}/{progress.total_shards}  {progress.documents:,} documents"
                f"  {progress.tokens:,} tokens  {progress.bad} bad",
                err=True,
            )

    yield print_line


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, {task.fields[bad]} bad"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, tokens=0, bad=0)
        yield lambda progress: bar.update(
            task, total=progress.total_bytes, completed=progress.input_bytes, tokens=progress.tokens, bad=progress.bad
        )


def _print_summary(summary: Summary, output: Path, slice_text: str | None, wall_s: float) -> None:
    for note in summary.notes:
        click.echo(note)
    _print_bad(summary.bad, summary.bad_examples)
    if summary.empty_documents:
        click.echo(f"{summary.empty_documents:,} empty documents left out")
    if slice_text is not None:
        click.echo(
            f"slice {slice_text}: {summary.made_shards} shards made, {summary.kept_shards} kept; the same command without --slice merges"
        )
        return
    columns = [
        Column("name", "set"),
        *(Column(key, format="{:,}".format) for key in ("shards", "documents", "tokens")),
        Column("text_bytes", "text bytes", "{:,}".format),
        Column("bytes_per_token", "bytes/token", "{:.2f}".format),
        Column("gzip9_bits_per_byte", "gzip -9 bits/byte", "{:.3f}".format),
        *([Column("padding_share", "padding", "{:.1%}".format)] if any(part.padding_share is not None for part in summary.sets) else []),
        Column("path"),
    ]
    rows = [
        {
            **dataclasses.asdict(part),
            "bytes_per_token": part.text_bytes / part.tokens,
            "gzip9_bits_per_byte": None if part.gzip9_bytes is None else 8 * part.gzip9_bytes / part.text_bytes,
        }
        for part in summary.sets
    ]
    print_table(columns, rows)
    if summary.already_done:
        click.echo(f"{output}: already prepared with these settings")
    else:
        kept = f" ({summary.kept_shards} shards of an earlier run kept)" if summary.kept_shards else ""
        click.echo(f"{output}: prepared in {wall_s:.1f} s{kept}")


def _print_bad(count: int, examples: Sequence[tuple[str, str]]) -> None:
    if not count:
        return
    click.echo(f"{count:,} bad records left out:", err=True)
    for place, reason in examples[:20]:
        click.echo(f"  {place}: {reason}", err=True)
    if count > 20:
        click.echo(f"  ... and {count - 20:,} more", err=True)
