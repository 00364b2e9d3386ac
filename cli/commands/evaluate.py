"""`ridge evaluate RUN_OR_HF_DIR`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import json_option
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from rich.progress import TaskID


@click.command()
@click.argument("model", metavar="RUN_OR_HF_DIR", type=click.Path(path_type=Path))
@click.option("--set", "sets", multiple=True, metavar="NAME=DIR", help="A prepared corpus to evaluate on (default: the run's sets).")
@click.option("--step", type=int, help="Checkpoint of the run (default: the newest good one).")
@click.option("--seq-len", type=click.IntRange(min=1), help="Tokens per row (default: the run's, or the model's up to 2,048).")
@click.option("--batch-size", type=click.IntRange(min=1), help="Rows per step (default: the run's, or 8).")
@json_option
def evaluate(model: Path, sets: tuple[str, ...], step: int | None, seq_len: int | None, batch_size: int | None, as_json: bool) -> None:
    """Loss, perplexity and bits per byte on held-out sets, of a run or of a Hugging Face model.

    Bits per byte counts every token of a set, and stands beside what gzip -9 makes of the same documents where the corpus knows it.
    """
    wanted = dict(_parse(text) for text in sets)
    from ridgeline.cli.tables import Column, print_table
    from ridgeline.trainer.evaluation import evaluate_model
    from ridgeline.trainer.loading import load_model

    loaded = load_model(model, step=step)
    if not wanted and not loaded.config.evaluation.sets:
        raise UserError(f"{model} names no evaluation sets: give --set NAME=DIR")
    with evaluation_progress() as progress:
        results = evaluate_model(
            loaded.config,
            loaded.spec,
            loaded.partitioner,
            loaded.params,
            wanted or loaded.config.evaluation.sets,
            tokenizer_sha256=loaded.tokenizer.sha256 if loaded.source.tokenizer_dir is not None else None,
            seq_len=seq_len or (loaded.config.data.seq_len if loaded.source.hf is None else min(loaded.model.max_seq_len, 2048)),
            batch_size=batch_size,
            progress=progress,
        )
    columns = [
        Column("set"),
        Column("loss", "loss (nats/token)", "{:.4f}".format),
        Column("perplexity", format="{:.2f}".format),
        Column("bits_per_byte", "bits/byte", "{:.4f}".format),
        Column("gzip9_bits_per_byte", "gzip -9 bits/byte", "{:.4f}".format),
        Column("tokens", format="{:,.0f}".format),
        Column("text_bytes", "bytes", "{:,}".format),
    ]
    rows = [
        {
            "set": name,
            "loss": result.loss,
            "perplexity": result.perplexity,
            "bits_per_byte": result.bits_per_byte,
            "gzip9_bits_per_byte": result.gzip_bits_per_byte,
            "tokens": result.tokens,
            "text_bytes": result.text_bytes,
            "step": loaded.step,
        }
        for name, result in results.items()
    ]
    print_table(columns, rows, as_json=as_json, title=f"{model}" + ("" if loaded.step is None else f", step {loaded.step}"))


@contextlib.contextmanager
def evaluation_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Give a callback (set, batches done, batches in all) that draws a bar per set on a terminal's stderr; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    tasks: dict[str, TaskID] = {}
    with Progress(console=Console(stderr=True), transient=True) as bars:

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield show


def _parse(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise UserError(f"--set '{text}' is not NAME=DIR")
    return name, Path(path)
