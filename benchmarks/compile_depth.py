"""Compile time by number of layers: `python benchmarks/compile_depth.py [--layers 4 64]`.

Compiles loss and gradients of a model with narrow layers. Required: with scanned layers, tracing and compiling 64 layers takes at most 1.3
times as long as 4 layers (best of the repeats, which alternate).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import checkout  # noqa: F401  # before ridgeline
import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline import models
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import ComputeConfig, PrecisionConfig
from ridgeline.models.loss import cross_entropy
from ridgeline.sharding.partition import Partitioner


def compile_s(layers: int, scan: bool) -> tuple[float, int]:
    """Seconds to trace and compile, and instructions of the compiled program."""
    jax.clear_caches()
    model = ModelConfig(num_layers=layers, embed_dim=64, num_heads=4, mlp_dim=128, vocab_size=512, max_seq_len=128)
    partitioner = Partitioner.single()
    start_s = time.perf_counter()
    compute = ComputeConfig(scan_layers=scan)
    built = nnx.eval_shape(lambda: models.build(model, compute, PrecisionConfig(compute="float32"), partitioner, nnx.Rngs(params=0)))
    structure, state = nnx.split(built)
    ids = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    weights = jax.ShapeDtypeStruct((2, 128), jnp.float32)

    def loss(state: Any, tokens_BT: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
        decoder = nnx.merge(structure, state)
        options = {"vocab_size": 512, "chunk": 1024, "z_loss": 0.0, "partitioner": partitioner}
        return cross_entropy(decoder(tokens_BT), decoder.unembedding(), targets_BT, weights_BT, **options).nats

    compiled = jax.jit(jax.value_and_grad(loss)).lower(state, ids, ids, weights).compile()
    seconds = time.perf_counter() - start_s
    return seconds, sum(" = " in line for line in compiled.as_text().splitlines())


def main(arguments: list[str] | None = None) -> int:
    """Print a table and one JSON line; 1 when compile time grows with depth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loop-layers", type=int, default=16, help="layers of the comparison without scan; 0: none")
    args = parser.parse_args(arguments)
    compile_s(2, True)  # one-time costs
    runs = [(args.layers[0], True), (args.layers[1], True)] + ([(args.loop_layers, False)] if args.loop_layers else [])
    best: dict[tuple[int, bool], tuple[float, int]] = {}
    for _ in range(args.repeats):
        for run in runs:
            best[run] = min(best.get(run, (float("inf"), 0)), compile_s(*run))
    for (layers, scan), (seconds, instructions) in best.items():
        print(f"{layers:4} layers, {'scan' if scan else 'loop'}: {seconds:6.2f} s, {instructions} instructions")
    ratio = best[runs[1]][0] / best[runs[0]][0]
    print(json.dumps({"ratio": ratio, "runs": [{"layers": k[0], "scan": k[1], "s": v[0], "instructions": v[1]} for k, v in best.items()]}))
    return 0 if ratio <= 1.3 else 1


if __name__ == "__main__":
    sys.exit(main())
