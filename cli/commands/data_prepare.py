"""`ridge data prepare` and `ridge data train-tokenizer`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.data_options import corpus_options, overwrite_option, parse_slice, text_options, text_settings
from ridgeline.cli.options import Int32Range, json_option
from ridgeline.cli.progress import prepare_progress
from ridgeline.cli.tables import Column, print_json, print_table

if TYPE_CHECKING:
    from ridgeline.loaders.prepare import Slice, Summary


@click.command()
@corpus_options
@overwrite_option
@click.option("--workers", type=Int32Range(), help="Processes [default: the number of cores]. Does not change the output.")
@click.option(
    "--slice", "slice_text", metavar="I/N", help="Make only slice I (from 0) of N; then run the command without --slice to merge."
)
@json_option
def prepare(
    output: Path,
    tokenizer: str,
    add_bos: bool | None,
    pack_length: int | None,
    shards: int | None,
    gzip_baseline: bool,
    max_bad: int,
    chat_template: Path | None,
    overwrite: bool,
    workers: int | None,
    slice_text: str | None,
    as_json: bool,
    **text: Any,
) -> None:
    """Tokenize text into a corpus of token files.

    Reads text files, JSON lines (.gz, .zst), Parquet, directories of files, Hugging Face datasets, and URLs of object stores and hubs. With
    --chat, conversations become tokens by the tokenizer's chat template. The output depends only on the input and the settings. To continue
    after an interruption, run the same command again.
    """
    from ridgeline.loaders.prepare import PrepareSettings
    from ridgeline.loaders.prepare import prepare as run

    settings = PrepareSettings(
        output=output,
        tokenizer=tokenizer,
        shards=shards,
        pack_length=pack_length,
        gzip_baseline=gzip_baseline,
        add_bos=add_bos,
        chat_template=chat_template,
        **text_settings(text),
    )
    started_s = time.monotonic()
    try:
        with prepare_progress() as on_progress:
            summary = run(
                settings, workers=workers, max_bad=max_bad, overwrite=overwrite, slice=_slice(slice_text), on_progress=on_progress
            )
    except KeyboardInterrupt:
        click.echo("stopped; finished shards are kept, run the same command again to continue", err=True)
        raise
    if as_json:
        print_json(dataclasses.asdict(summary))
    else:
        _print_summary(summary, output, slice_text, time.monotonic() - started_s)


@click.command("train-tokenizer")
@text_options
@overwrite_option
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The tokenizer.json to write.")
@click.option("--vocab-size", type=Int32Range(), default=32768, show_default=True, help="Vocabulary size, including special tokens.")
@click.option("--max-bytes", type=click.IntRange(min=1, max=2**63 - 1), help="Stop reading after this much text [default: read all].")
@json_option
def train_tokenizer(
    output: Path, vocab_size: int, max_bytes: int | None, max_bad: int, overwrite: bool, as_json: bool, **text: Any
) -> None:
    """Train a byte-level BPE tokenizer.

    Takes the same inputs as `ridge data prepare`. With the same --holdout, it is trained on the training part only.
    """
    from ridgeline.loaders.train_tokenizer import TokenizerSettings
    from ridgeline.loaders.train_tokenizer import train_tokenizer as run

    settings = TokenizerSettings(output=output, vocab_size=vocab_size, max_bytes=max_bytes, max_bad=max_bad, **text_settings(text))
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


def _slice(text: str | None) -> Slice | None:
    from ridgeline.loaders.prepare import Slice

    return None if text is None else Slice(*parse_slice(text))


def _print_summary(summary: Summary, output: Path, slice_text: str | None, wall_s: float) -> None:
    for note in summary.notes:
        click.echo(note)
    _print_bad(summary.bad, summary.bad_examples)
    if summary.empty_documents:
        click.echo(f"{summary.empty_documents:,} empty documents skipped")
    if slice_text is not None:
        click.echo(
            f"slice {slice_text}: {summary.made_shards} shards made, {summary.kept_shards} kept; run the command without --slice to merge"
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
        kept = f" ({summary.kept_shards} shards kept from an earlier run)" if summary.kept_shards else ""
        click.echo(f"{output}: prepared in {wall_s:.1f} s{kept}")


def _print_bad(count: int, examples: Sequence[tuple[str, str]]) -> None:
    if not count:
        return
    click.echo(f"{count:,} bad records skipped:", err=True)
    for place, reason in examples[:20]:
        click.echo(f"  {place}: {reason}", err=True)
    if count > 20:
        click.echo(f"  ... and {count - 20:,} more", err=True)
