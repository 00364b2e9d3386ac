"""Our train step against PyTorch's on a CPU, alternating in one run.

`python benchmarks/step_vs_torch.py [--dtype float32|bfloat16] [--steps 5] [--compile] [--set KEY=VALUE ...]`

PyTorch trains transformers' decoder of the same shape with fused attention, a chunked loss (gpu_torch_parts.py), AdamW and clipping (bf16:
autocast, because ours keeps float32 parameters). Tokens are random. The machine may be shared, so times are medians over alternating steps,
and the result is a ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import checkout  # noqa: F401  # before ridgeline
import jax
import torch
from gpu_torch import Trained
from step_vs_handwritten import SHAPES, WARMUP, batches, contenders, shape_config

from ridgeline.configs.schema import Config
from ridgeline.models.huggingface.convert import hf_config


def torch_step(config: Config, dtype: str, compiled: bool) -> Callable[[Any], float]:
    """Return a step on tokens [B, T] (a torch tensor) that gives the loss."""
    model = Trained(hf_config(config.model, "float32", {}), "autocast" if dtype == "bfloat16" else dtype, compile=compiled)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def step(tokens: Any) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def main(arguments: list[str] | None = None) -> None:
    """Print medians of wall and CPU time and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="reference")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="torch.compile instead of eager")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of ours, as in `compute.loss_chunk=512`")
    args = parser.parse_args(arguments)
    config = shape_config(args.shape, args.dtype, args.set)
    torch.manual_seed(0)
    theirs = torch_step(config, args.dtype, args.compile)
    state, ours = contenders(config, [])["ours"]
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "PyTorch": []}
    for batch in batches(config, args.steps + WARMUP):
        tokens = torch.from_numpy(jax.device_get(batch["tokens"]).astype("int64"))
        begun, cpu = time.perf_counter(), time.process_time()
        state, loss = ours(state, batch)
        jax.block_until_ready((state, loss))
        times["ours"].append((time.perf_counter() - begun, time.process_time() - cpu))
        begun, cpu = time.perf_counter(), time.process_time()
        theirs(tokens)
        times["PyTorch"].append((time.perf_counter() - begun, time.process_time() - cpu))
    medians = {name: [statistics.median(t[i] for t in found[WARMUP:]) for i in (0, 1)] for name, found in times.items()}
    print(f"{args.shape}, {args.dtype}, median of {args.steps} steps in turn, torch {torch.__version__}, jax {jax.__version__}")
    for name, (wall, cpu) in medians.items():
        print(f"{name:10}{wall * 1e3:10.0f} ms{cpu * 1e3:10.0f} ms CPU")
    print(f"ours / PyTorch: {medians['ours'][0] / medians['PyTorch'][0]:.2f} (CPU {medians['ours'][1] / medians['PyTorch'][1]:.2f})")


if __name__ == "__main__":
    main()
