"""Does the best learning rate stay the same at other widths? One model at several widths and learning rates, with and without muP.

    python benchmarks/mup.py [--widths 32,64,128,256] [--steps 150] [--seeds 2]

Trains a 2-layer Llama on bytes of the Python standard library (one process, float32, constant learning rate after a warm-up) and prints
the mean loss of the last tenth of the steps. muP's base width is the first one.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  # before ridgeline
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ridgeline import models
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import AttentionConfig, ComputeConfig, OptimizerConfig, PrecisionConfig
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.optimizers import build_optimizer

ROWS, LENGTH, WARMUP = 16, 64, 10
RATES = [2.0**power for power in range(-11, -2)]
HEAD = 16


def model_of(width: int, base: int | None) -> ModelConfig:
    """Return the model at a width; base: width of muP's base model, None: the standard parametrization."""
    fields: dict[str, Any] = {"vocab_size": 256, "num_layers": 2, "embed_dim": width, "num_heads": width // HEAD, "mlp_dim": 2 * width}
    return ModelConfig.model_validate(fields | {"max_seq_len": LENGTH} | ({} if base is None else {"mup": {"base_embed_dim": base}}))


def final_losses(model: ModelConfig, tokens: np.ndarray, rates: list[float], seed: int) -> list[float]:
    """Train a model with each learning rate; return the mean loss of the last tenth of the steps. tokens: [steps, rows, length + 1]."""
    compute, precision = ComputeConfig(attention=AttentionConfig(backend="reference")), PrecisionConfig(compute="float32")
    create = lambda: models.build(model, compute, precision, Partitioner.single(), nnx.Rngs(params=seed))  # noqa: E731
    structure, variables = nnx.split(nnx.eval_shape(create), nnx.Param)
    axes = jax.tree.map(lambda v: v.get_metadata()["axes"], variables, is_leaf=lambda v: isinstance(v, nnx.Variable))
    optimizer = build_optimizer(OptimizerConfig(), precision, nnx.to_pure_dict(axes), None, model.width_ratio)

    def loss_of(params: Any, rows: jax.Array) -> jax.Array:
        decoder = nnx.merge(structure, params)
        log_p = jax.nn.log_softmax(decoder.logits(decoder(rows[:, :-1])))
        return -jnp.mean(jnp.take_along_axis(log_p, rows[:, 1:, None], -1))

    @jax.jit
    def run(rate: jax.Array, tokens: jax.Array) -> jax.Array:
        def step(carry: tuple[Any, Any, jax.Array], rows: jax.Array) -> tuple[tuple[Any, Any, jax.Array], jax.Array]:
            params, state, at = carry
            loss, gradient = jax.value_and_grad(loss_of)(params, rows)
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient)))
            gradient = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradient)
            now = rate * jnp.minimum(1.0, (at + 1) / WARMUP)
            updates, state = optimizer.update(gradient, state, params, learning_rate=now)
            return (jax.tree.map(jnp.add, params, updates), state, at + 1), loss

        params = nnx.to_pure_dict(nnx.split(create(), nnx.Param)[1])
        return jax.lax.scan(step, (params, optimizer.init(params), jnp.float32(0)), tokens)[1]

    return [float(np.mean(run(jnp.float32(rate), tokens)[-len(tokens) // 10 :])) for rate in rates]


def main() -> None:
    """Print a table per parametrization."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--widths", default="32,64,128,256")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    widths = [int(width) for width in arguments.widths.split(",")]
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    for name, base in (("standard", None), ("muP", widths[0])):
        print(f"{name}: loss by learning rate\n{'width':>6} " + " ".join(f"2^{round(np.log2(rate)):<5}" for rate in RATES) + "  best")
        for width in widths:
            found = np.zeros(len(RATES))
            for seed in range(arguments.seeds):
                starts = np.random.default_rng(seed).integers(0, len(text) - LENGTH - 1, (arguments.steps, ROWS))
                tokens = text[starts[..., None] + np.arange(LENGTH + 1)].astype(np.int32)
                found += np.array(final_losses(model_of(width, base), tokens, RATES, seed)) / arguments.seeds
            best = int(np.nanargmin(found))
            print(f"{width:>6} " + " ".join(f"{loss:<7.3f}" for loss in found) + f"  2^{round(np.log2(RATES[best]))}", flush=True)


if __name__ == "__main__":
    main()
