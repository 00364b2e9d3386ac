"""`ridge evaluate RUN_OR_HF_DIR`: loss, perplexity and bits per byte on held-out sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ridgeline.cli.options import json_option
from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    pass


@click.command()
@click.argument("model", metavar="RUN_OR_HF_DIR", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="NAME=DIR",
    help="Evaluate on this prepared corpus; repeatable [default: the run's evaluation sets].",
)
@click.option("--step", type=int, help="Checkpoint of the run [default: the newest valid one].")
@click.option(
    "--seq-len", type=click.IntRange(min=1), help="Tokens per row [default: the run's; for a Hugging Face model its maximum, up to 2,048]."
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Rows per step [default: the run's, or 8].")
@json_option
def evaluate(model: Path, sets: tuple[str, ...], step: int | None, seq_len: int | None, batch_size: int | None, as_json: bool) -> None:
    """Compute loss, perplexity and bits per byte of a run or a Hugging Face model on held-out sets.

    Bits per byte includes every token of a set. Beside it is the value of gzip -9 on the same documents, if the corpus stores it.
    """
    wanted = dict(_parse(text) for text in sets)
    from ridgeline.cli.progress import evaluation_progress
    from ridgeline.cli.tables import Column, print_table
    from ridgeline.trainer.evaluation import evaluate_model
    from ridgeline.trainer.pretrained import load_model

    loaded = load_model(model, step=step)
    if not wanted and not loaded.config.evaluation.sets:
        raise UserError(f"{model} has no evaluation sets; use --set NAME=DIR")
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


def _parse(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise UserError(f"--set '{text}' must be NAME=DIR")
    return name, Path(path)
