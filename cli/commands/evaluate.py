"""`ridge evaluate RUN_OR_HF_DIR`: loss, perplexity and bits per byte on held-out sets."""

from __future__ import annotations

from pathlib import Path

import click

from ridgeline.cli.options import Int32Range, json_option, made_with, mesh_argument, parse_set
from ridgeline.configs.errors import UserError


@click.command()
@click.argument("model", metavar="RUN_OR_HF_DIR", type=click.Path(path_type=Path))
@mesh_argument
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="NAME=DIR",
    help="Evaluate on this prepared corpus; repeatable [default: the run's evaluation sets].",
)
@click.option("--tasks", metavar="NAME[,NAME]...", help="Evaluate on tasks of lm-evaluation-harness instead of sets (extra `eval`).")
@click.option("--tasks-dir", type=click.Path(path_type=Path), help="Directory with task files of your own, for --tasks.")
@click.option("--limit", type=Int32Range(min=1), help="Samples per task [default: all].")
@click.option("--step", type=Int32Range(), help="Checkpoint of the run [default: the newest valid one].")
@click.option(
    "--seq-len", type=Int32Range(min=1), help="Tokens per row [default: the run's; for a Hugging Face model its maximum, up to 2,048]."
)
@click.option("--batch-size", type=Int32Range(min=1), help="Rows per step, rounded up to fit the mesh [default: the run's, or 8].")
@json_option
def evaluate(
    model: Path,
    overrides: tuple[str, ...],
    sets: tuple[str, ...],
    tasks: str | None,
    tasks_dir: Path | None,
    limit: int | None,
    step: int | None,
    seq_len: int | None,
    batch_size: int | None,
    as_json: bool,
) -> None:
    """Compute loss, perplexity and bits per byte of a run or a Hugging Face model on held-out sets.

    Bits per byte is over the text of the target tokens: all of a document, or the model's part of a fine-tuning record. Beside it is the
    value of gzip -9 on the same documents, if the corpus stores it.

    The model is sharded over the mesh of the run's config, or the largest smaller mesh that the machine has; a Hugging Face model over all
    devices (mesh.fsdp=-1). mesh.AXIS=SIZE chooses another mesh.

    With --tasks the model is evaluated on tasks of lm-evaluation-harness instead; their data is downloaded where a task names any.
    """
    wanted = dict(parse_set(text) for text in sets)
    if tasks is not None:
        if sets or seq_len:
            raise UserError("--tasks does not go with --set or --seq-len: run `ridge evaluate` twice")
        _evaluate_tasks(model, tasks, tasks_dir, limit, step, batch_size, overrides, as_json)
        return
    if tasks_dir is not None or limit is not None:
        raise UserError("--tasks-dir and --limit need --tasks NAME")
    from ridgeline import api
    from ridgeline.cli.progress import evaluation_progress
    from ridgeline.cli.tables import Column, print_table

    with evaluation_progress() as progress:
        evaluation = api.evaluate(model, wanted, step=step, seq_len=seq_len, batch_size=batch_size, overrides=overrides, progress=progress)
    for line in (made_with(evaluation.devices, evaluation.step, evaluation.config_sha256), *evaluation.notes):
        click.echo(line, err=True)
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
            "step": evaluation.step,
            "config_sha256": evaluation.config_sha256,
            "devices": evaluation.devices,
        }
        for name, result in evaluation.sets.items()
    ]
    print_table(columns, rows, as_json=as_json, title=f"{model}" + ("" if evaluation.step is None else f", step {evaluation.step}"))


def _evaluate_tasks(
    model: Path,
    tasks: str,
    directory: Path | None,
    limit: int | None,
    step: int | None,
    batch_size: int | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from ridgeline import api
    from ridgeline.cli.tables import Column, print_table

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    found = api.evaluate_tasks(model, names, tasks_dir=directory, limit=limit, step=step, batch_size=batch_size, overrides=overrides)
    click.echo(made_with(found.devices, found.step, found.config_sha256), err=True)
    columns = [
        Column("task"),
        Column("metric"),
        Column("value", format="{:.4f}".format),
        Column("stderr", "standard error", "{:.4f}".format),
        Column("samples", format="{:,}".format),
    ]
    made = {"step": found.step, "config_sha256": found.config_sha256, "devices": found.devices}
    rows = [{**asdict(metric), **made} for metric in found.metrics]
    print_table(columns, rows, as_json=as_json, title=f"{model}" + ("" if found.step is None else f", step {found.step}"))
