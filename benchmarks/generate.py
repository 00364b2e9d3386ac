"""Speed of generation: `python benchmarks/generate.py [--model models/gpt2] [mesh.AXIS=SIZE ...]`. New tokens/s at each batch size.

Random parameters: the speed does not depend on them. A call is timed after one that compiles; the best of several counts, since other work
on the machine only ever slows one down. Prompts have different lengths. Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import checkout  # noqa: F401  # before ridgeline
import jax
import numpy as np

from ridgeline.cli.tables import Column, print_table
from ridgeline.configs.load import load
from ridgeline.configs.rules import fit_devices
from ridgeline.models.decoder import Decoder
from ridgeline.models.generate import Sampling, generate, generation_config
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.state import model_spec

Generate = Callable[..., Sequence[Any]]


def build(model: str, overrides: Sequence[str]) -> Decoder:
    """Return a decoder with random parameters on the devices of this machine."""
    config = fit_devices(generation_config(load(model, overrides).config), len(jax.devices()))
    partitioner = Partitioner.of(build_mesh(config.mesh, jax.devices()[: int(np.prod(list(config.mesh.sizes.values())))]), config)
    spec = model_spec(config, partitioner)
    params = jax.jit(spec.build, out_shardings=spec.param_shardings)(jax.random.key(0))
    decoder: Decoder = spec.merge(params)
    return decoder


def measure(decoder: Decoder, batch: int, prompt: int, tokens: int, repeats: int, run: Generate = generate) -> dict[str, float]:
    """Return the speed of one batch of prompts with up to `prompt` tokens."""
    draw = np.random.default_rng(0)
    vocabulary = decoder.model.vocab_size
    prompts = [draw.integers(0, vocabulary, max(1, prompt - 3 * (row % 8))).tolist() for row in range(batch)]
    took_s: dict[int, list[float]] = {1: [], tokens: []}
    for repeat in range(repeats + 1):
        for count, times in took_s.items():
            start_s = time.perf_counter()
            run(decoder, prompts, max_tokens=count, sampling=Sampling(temperature=0))
            if repeat:
                times.append(time.perf_counter() - start_s)
    first_s, all_s = min(took_s[1]), min(took_s[tokens])
    further_s = (all_s - first_s) / (tokens - 1)
    return {"batch": batch, "first_token_s": first_s, "s_per_step": further_s, "tokens_per_s": batch * tokens / all_s}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/gpt2", help="a shipped config, or a file")
    parser.add_argument("--batch", default="1,16", help="batch sizes, separated by commas")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    decoder = build(args.model, args.overrides)
    rows = [measure(decoder, int(batch), args.prompt, args.tokens, args.repeats) for batch in args.batch.split(",")]
    columns = [
        Column("batch"),
        Column("first_token_s", "first token (s)", "{:.3f}".format),
        Column("s_per_step", "further token (s)", "{:.4f}".format),
        Column("tokens_per_s", "tokens/s", "{:,.0f}".format),
    ]
    title = f"{args.model}, {jax.devices()[0].device_kind}, prompts of up to {args.prompt} tokens, {args.tokens} new tokens"
    print_table(columns, rows, as_json=False, title=title)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
