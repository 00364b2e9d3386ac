"""`ridge generate RUN_OR_HF_DIR --prompt TEXT`: sample text from a model."""

from __future__ import annotations

from pathlib import Path

import click

from ridgeline.cli.options import FiniteRange, Int32Range, json_option, made_with, mesh_argument
from ridgeline.configs.errors import UserError


@click.command()
@click.argument("model", metavar="RUN_OR_HF_DIR", type=click.Path(path_type=Path))
@mesh_argument
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; repeatable [default: start of a document].")
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    help="File of prompts, one per line; .jsonl: a JSON string, a list of messages, or an object with 'prompt' or 'messages' per line.",
)
@click.option(
    "--chat", is_flag=True, help="Write prompts with the chat template: a prompt is a message of the user, or a JSON list of messages."
)
@click.option("--batch-size", type=Int32Range(min=1), help="Prompts at a time [default: 32].")
@click.option("--max-tokens", type=Int32Range(), help="Maximum number of new tokens [default: 200, or what the model's length allows].")
@click.option(
    "--temperature", type=FiniteRange(), default=0.8, show_default=True, help="Sampling temperature; 0 always takes the most likely token."
)
@click.option("--top-k", type=Int32Range(), help="Sample from the k most likely tokens.")
@click.option("--top-p", type=FiniteRange(), help="Sample from the most likely tokens whose probabilities sum to this value.")
@click.option("--seed", type=Int32Range(), default=0, show_default=True, help="Random seed.")
@click.option("--step", type=Int32Range(), help="Checkpoint of the run [default: the newest valid one].")
@json_option
def generate(
    model: Path,
    overrides: tuple[str, ...],
    prompts: tuple[str, ...],
    file: Path | None,
    chat: bool,
    batch_size: int | None,
    max_tokens: int | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    step: int | None,
    as_json: bool,
) -> None:
    """Sample text from a run or from a Hugging Face model.

    The model is sharded over the mesh of the run's config, or the largest smaller mesh that the machine has; a
    Hugging Face model over all devices (mesh.fsdp=-1). mesh.AXIS=SIZE chooses another mesh: with mesh.tensor parameters stay where
    they are, with mesh.fsdp they are gathered for every new token.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f"--seed {seed} must be in 0..{2**32 - 1}")
    from dataclasses import asdict

    from ridgeline import api
    from ridgeline.cli.tables import print_json
    from ridgeline.loaders.prompts import Prompt, parse_messages, read_prompts

    wanted: list[Prompt] = [parse_messages(text, "--prompt") if chat else text for text in prompts]
    wanted += [] if file is None else read_prompts(file)
    rows = api.generate(
        model,
        wanted or ("",),
        chat=chat,
        batch_size=batch_size,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        step=step,
        overrides=overrides,
    )
    if rows:
        click.echo(made_with(rows[0].devices, rows[0].step, rows[0].config_sha256), err=True)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    for number, row in enumerate(rows):
        if number:
            click.echo("-" * 40)
        click.echo(row.text if chat else f"{row.prompt}{row.text}")
