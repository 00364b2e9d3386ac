"""`ridge generate RUN_OR_HF_DIR --prompt TEXT`: sample text from a model."""

from __future__ import annotations

from pathlib import Path

import click

from ridgeline.cli.options import json_option
from ridgeline.configs.errors import UserError

_DEFAULT_MAX_TOKENS = 200


@click.command()
@click.argument("model", metavar="RUN_OR_HF_DIR", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; repeatable [default: start of a document].")
@click.option(
    "--max-tokens", type=int, help=f"Maximum number of new tokens [default: {_DEFAULT_MAX_TOKENS}, or what the model's length allows]."
)
@click.option(
    "--temperature", type=float, default=0.8, show_default=True, help="Sampling temperature; 0 always takes the most likely token."
)
@click.option("--top-k", type=int, help="Sample from the k most likely tokens.")
@click.option("--top-p", type=float, help="Sample from the most likely tokens whose probabilities sum to this value.")
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed.")
@click.option("--step", type=int, help="Checkpoint of the run [default: the newest valid one].")
@json_option
def generate(
    model: Path,
    prompts: tuple[str, ...],
    max_tokens: int | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    step: int | None,
    as_json: bool,
) -> None:
    """Sample text from a run or from a Hugging Face model."""
    if not 0 <= seed < 2**32:
        raise UserError(f"--seed {seed} must be in 0..{2**32 - 1}")
    from ridgeline.cli.tables import print_json
    from ridgeline.models.generate import Sampling
    from ridgeline.models.generate import generate as sample
    from ridgeline.trainer.pretrained import load_model

    sampling = Sampling(temperature, top_k, top_p)
    loaded = load_model(model, step=step)
    tokenizer = loaded.tokenizer
    texts = prompts or ("",)
    # Our documents begin with BOS, or with EOS if the tokenizer has no BOS. Imported models were not trained with a leading EOS.
    begin = loaded.source.hf is None or tokenizer.bos_id != tokenizer.eos_id
    encoded = [[tokenizer.bos_id, *ids] if begin or not ids else ids for ids in tokenizer.encode_batch(texts)]
    room = loaded.model.max_seq_len - max(map(len, encoded))
    results = sample(
        loaded.decoder,
        encoded,
        max_tokens=max(1, min(_DEFAULT_MAX_TOKENS, room)) if max_tokens is None else max_tokens,
        sampling=sampling,
        eos_ids=loaded.eos_ids,
        seed=seed,
    )
    rows = [
        {"prompt": text, "text": tokenizer.decode(result.tokens), "tokens": len(result.tokens), "stopped_by": result.stopped_by}
        for text, result in zip(texts, results, strict=True)
    ]
    if as_json:
        print_json(rows)
        return
    for number, row in enumerate(rows):
        if number:
            click.echo("-" * 40)
        click.echo(f"{row['prompt']}{row['text']}")
