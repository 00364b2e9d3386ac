"""`ridge data teacher`: store a teacher's predictions of a corpus."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import click

from ridgeline.cli.data_options import overwrite_option, parse_slice
from ridgeline.cli.options import FiniteRange, Int32Range, json_option, mesh_argument
from ridgeline.configs.errors import UserError


@click.command()
@click.argument("model", metavar="RUN_OR_HF_DIR", type=click.Path(path_type=Path))
@click.argument("corpus", type=click.Path(path_type=Path))
@mesh_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory of the predictions.")
@click.option("--top-k", type=Int32Range(min=1), default=64, show_default=True, help="Most likely tokens stored per position.")
@click.option(
    "--temperature",
    type=FiniteRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="distillation.temperature of the student.",
)
@click.option(
    "--seq-len", type=Int32Range(min=1), help="data.seq_len of the student; needed for a corpus without packed rows [default: packed]."
)
@click.option("--document-masking/--no-document-masking", default=True, show_default=True, help="data.document_masking of the student.")
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    default="float16",
    show_default=True,
    help="Type of the log-probabilities.",
)
@click.option("--step", type=Int32Range(), help="Checkpoint of the run [default: the newest valid one].")
@click.option("--batch-size", type=Int32Range(min=1), help="Rows at a time, rounded up to fit the mesh [default: the run's, or 8].")
@click.option(
    "--slice", "slice_text", metavar="I/N", help="Write only slice I (from 0) of N; then run the command without --slice to finish."
)
@overwrite_option
@json_option
def teacher(
    model: Path,
    corpus: Path,
    overrides: tuple[str, ...],
    output: Path,
    top_k: int,
    temperature: float,
    seq_len: int | None,
    document_masking: bool,
    dtype: Literal["float16", "bfloat16", "float32"],
    step: int | None,
    batch_size: int | None,
    slice_text: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Store the most likely tokens of a teacher at every position of CORPUS, which a student is trained towards (distillation).

    The teacher is a run or a Hugging Face model with the tokenizer of the corpus. It is sharded over the mesh of the run's config, or the
    largest smaller mesh that the machine has; mesh.AXIS=SIZE chooses another. To continue after an interruption, run the command again.
    """
    from ridgeline import api
    from ridgeline.cli.progress import evaluation_progress
    from ridgeline.cli.tables import print_json

    index, count = (0, 1) if slice_text is None else parse_slice(slice_text)
    if index >= count:
        raise UserError(f"--slice '{slice_text}': I must be less than N")
    try:
        with evaluation_progress() as progress:
            written = api.write_teacher(
                model,
                corpus,
                output,
                seq_len=seq_len,
                top_k=top_k,
                temperature=temperature,
                dtype=dtype,
                document_masking=document_masking,
                step=step,
                batch_size=batch_size,
                overrides=overrides,
                slice=(index, count),
                overwrite=overwrite,
                progress=progress,
            )
    except KeyboardInterrupt:
        click.echo("stopped; finished files are kept, run the same command again to continue", err=True)
        raise
    if written is None:
        click.echo(f"slice {slice_text} is written; run the command without --slice when all are")
        return
    found = written.predictions
    if as_json:
        print_json({**dataclasses.asdict(found), "bytes": written.bytes, "sha256": written.sha256, "path": str(output)})
        return
    positions = found.rows * found.seq_len
    click.echo(f"{output}: {found.top_k} tokens at each of {positions:,} positions, {written.bytes / 1e6:,.1f} MB ({found.dtype})")
