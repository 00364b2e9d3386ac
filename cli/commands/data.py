"""`ridge data inspect` and `ridge data bench`: show a corpus, and time the loader."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ridgeline.cli.options import MEMBERS, FiniteRange, Int32Range, complete_key, json_option
from ridgeline.cli.tables import Column, print_json, print_table

if TYPE_CHECKING:
    from ridgeline.configs.schema import Config, DataConfig
    from ridgeline.loaders.inspect import SampleRow
    from ridgeline.loaders.manifest import Manifest
    from ridgeline.measure.loader import LoaderResult

LONGEST_ROW = 2**20
"""Most tokens of a row that is printed."""
SAMPLE_TOKENS = 128
BENCH_TOKENS = 2048
BENCH_ROWS = 32


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--samples",
    "--rows",
    "samples",
    type=Int32Range(min=0),
    default=2,
    show_default=True,
    help="Number of random rows (chat corpora: conversations) to print as text.",
)
@click.option(
    "--seq-len", type=click.IntRange(1, LONGEST_ROW), help=f"Tokens per printed row [default: {SAMPLE_TOKENS}, or the packed length]."
)
@click.option("--seed", type=Int32Range(min=0), default=0, show_default=True, help="Random seed for the choice of rows.")
@click.option("--verify", is_flag=True, help="Compare the SHA-256 of every shard with the manifest.")
@json_option
def inspect(directory: Path, samples: int, seq_len: int | None, seed: int, verify: bool, as_json: bool) -> None:
    """Show the corpus in DIRECTORY: counts, shards, document lengths, and rows as the model receives them.

    Of a chat corpus, whole conversations: what the loss counts is green, the rest is dim.

    Every record that is read is checked; --verify reads all records.
    """
    from ridgeline.loaders.inspect import length_statistics, sample_conversations, sample_rows
    from ridgeline.loaders.manifest import read_manifest
    from ridgeline.loaders.token_reader import verify_shards

    manifest = read_manifest(directory)
    if verify:
        verify_shards(directory, manifest)
    lengths = length_statistics(directory, manifest)
    if manifest.parameters.get("chat"):
        shown = list(sample_conversations(directory, manifest, count=samples, seed=seed))
    else:
        shown = list(sample_rows(directory, manifest, seq_len=seq_len or manifest.pack_length or SAMPLE_TOKENS, count=samples, seed=seed))
    summary = _summary(directory, manifest)
    shards = [dataclasses.asdict(shard) for shard in manifest.shards]
    if as_json:
        rows = [{key: value for key, value in dataclasses.asdict(row).items() if key != "runs"} for row in shown]
        content = {**summary, "shards": shards, "lengths": dataclasses.asdict(lengths), "samples": rows}
        print_json({**content, **({"verified": True} if verify else {})})
        return
    _print_facts(summary)
    click.echo()
    counts = [Column(key, format="{:,}".format) for key in ("records", "documents", "tokens", "bytes")]
    print_table(["name", *counts, Column("sha256", format=lambda digest: digest[:12])], shards)
    part = "" if lengths.shards == len(shards) else f" (of the first {lengths.shards} of {len(shards)} shards)"
    middle = ", ".join(f"p{q} {value:,.0f}" for q, value in lengths.percentiles.items())
    what = "document" if manifest.pack_length is None else "document (a document longer than a row counts as several)"
    click.echo(f"\ntokens per {what}{part}: mean {lengths.mean:,.1f}, {lengths.shortest:,} to {lengths.longest:,}; {middle}")
    if lengths.counted_share < 1:
        click.echo(f"the loss includes {lengths.counted_share:.1%} of the tokens")
    if verify:
        click.echo(f"verified: the SHA-256 of all {len(shards)} shards matches the manifest")
    for row in shown:
        _print_conversation(row) if manifest.parameters.get("chat") else _print_row(row)


@click.command()
@click.argument("target", metavar="CONFIG|CORPUS")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_key)
@click.option("--step-ms", multiple=True, type=FiniteRange(min=0), help="Duration of a simulated step; repeatable [default: 0 and 100].")
@click.option("--batches", type=Int32Range(min=1), default=200, show_default=True, help="Batches per measurement.")
@click.option("--processes", type=MEMBERS, default=1, show_default=True, help="Read the rows of process 0 out of this many processes.")
@json_option
def bench(target: str, overrides: tuple[str, ...], step_ms: tuple[float, ...], batches: int, processes: int, as_json: bool) -> None:
    """Time the loader on CONFIG's data, or on one CORPUS directory: tokens/s, and the share of a step spent waiting.

    Overrides such as data.seq_len=2048, data.batch_size=64, data.threads=2 or data.workers=1 are allowed with both.
    """
    from ridgeline.measure.loader import measure_loader

    data, seed = _data_of(target, overrides)
    results = [measure_loader(data, step_s=ms / 1e3, batches=batches, processes=processes, seed=seed) for ms in step_ms or (0.0, 100.0)]
    columns = [
        Column("step_ms", "step ms", "{:g}".format),
        Column("tokens_per_s", "tokens/s", "{:,.0f}".format),
        Column("wait_ms", "wait ms/step", "{:.3f}".format),
        Column("wait_share", "waiting", "{:.1%}".format),
        Column("first_batch_s", "first batch s", "{:.2f}".format),
    ]
    print_table(columns, [_bench_row(result) for result in results], as_json=as_json)


def _bench_row(result: LoaderResult) -> dict[str, Any]:
    derived = {"step_ms": result.step_s * 1e3, "tokens_per_s": result.tokens_per_s, "wait_share": result.wait_share}
    return {**dataclasses.asdict(result), **derived, "wait_ms": result.wait_s / result.batches * 1e3}


def _data_of(target: str, overrides: tuple[str, ...]) -> tuple[DataConfig, int]:
    """Return the data section and seed of a config, or of the defaults with one corpus as the training data."""
    from ridgeline.configs.load import load

    config = _defaults_for(Path(target), overrides) if Path(target).is_dir() else load(target, overrides).config
    return config.data, config.seed if config.data.seed is None else config.data.seed


def _defaults_for(corpus: Path, overrides: tuple[str, ...]) -> Config:
    """Return the default config with one corpus as its data: the packed row length, or 2,048 tokens; batches of 32 rows."""
    from ridgeline.configs.compose import with_family_defaults
    from ridgeline.configs.load import resolve
    from ridgeline.configs.overrides import apply_overrides
    from ridgeline.configs.yaml_tree import Mapping, Source, parse
    from ridgeline.loaders.manifest import read_manifest

    seq_len = read_manifest(corpus).pack_length or BENCH_TOKENS
    data = {"train": [{"path": str(corpus)}], "seq_len": seq_len, "batch_size": BENCH_ROWS}
    tree = parse(json.dumps({"data": data, "model": {"max_seq_len": 1 << 30}}), Source("default", str(corpus)))
    assert isinstance(tree, Mapping)
    return resolve(with_family_defaults(apply_overrides(tree, overrides)), os.environ).config


def _summary(directory: Path, manifest: Manifest) -> dict[str, Any]:
    tokens, text_bytes, gzip9_bytes = manifest.tokens, manifest.text_bytes, manifest.gzip9_bytes
    return {
        "path": str(directory),
        "sha256": manifest.sha256,
        "tokenizer": dataclasses.asdict(manifest.tokenizer),
        "dtype": manifest.dtype,
        "record_tokens": manifest.record_tokens,
        "pack_length": manifest.pack_length,
        "padding_share": manifest.padding_share,
        "documents": manifest.documents,
        "tokens": tokens,
        "text_bytes": text_bytes,
        "bytes_per_token": text_bytes / tokens,
        "gzip9_bits_per_byte": None if gzip9_bytes is None or not text_bytes else 8 * gzip9_bytes / text_bytes,
        "bad_records": manifest.bad_records,
        "parameters": dict(manifest.parameters),
    }


def _print_facts(summary: dict[str, Any]) -> None:
    tokenizer = summary["tokenizer"]
    kind = f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} ids, sha256 {tokenizer['sha256'][:12]}"
    layout = f"{summary['dtype']} in records of {summary['record_tokens']:,} tokens"
    if summary["pack_length"] is not None:
        layout = f"{summary['dtype']} in packed rows of {summary['pack_length']:,} tokens, {summary['padding_share']:.1%} padding"
    bad = f" ({summary['bad_records']:,} bad records skipped)" if summary["bad_records"] else ""
    facts = {
        "corpus": summary["path"],
        "tokenizer": kind,
        "format": layout,
        "documents": f"{summary['documents']:,}{bad}",
        "tokens": f"{summary['tokens']:,}",
        "text": f"{summary['text_bytes']:,} bytes, {summary['bytes_per_token']:.2f} per token",
        "gzip -9": "n/a" if summary["gzip9_bits_per_byte"] is None else f"{summary['gzip9_bits_per_byte']:.3f} bits/byte",
        "sha256": summary["sha256"],
    }
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name.ljust(width)}  {value}")


def _print_row(row: SampleRow) -> None:
    padding = f", {row.padding} padding" if row.padding else ""
    click.echo(f"\nrow {row.row}: {len(row.segments)} segments{padding}")
    for number, segment in enumerate(row.segments, start=1):
        click.echo(f"-- segment {number}: {segment.tokens} tokens, {segment.counted} targets in the loss")
        click.echo(segment.text)


def _print_conversation(row: SampleRow) -> None:
    what = f"pair {row.row}, {row.side}" if row.side else f"conversation {row.row}"
    click.echo(f"\n{what}: {len(row.tokens)} tokens, {int(sum(row.weights))} in the loss")
    click.echo("".join(click.style(text, fg="green") if counts else click.style(text, dim=True) for text, counts in row.runs))
