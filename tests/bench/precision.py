"""What narrow arithmetic and narrow state cost in loss: `python tests/bench/precision.py [--steps 400] [--variants NAME ...]`.

A small Llama learns the bytes of this project's own sources; all variants see the same batches from the same initial parameters. Printed:
the mean training loss of the last tenth of the steps, its difference to bf16, and the same on held-out files. `fp8, broken scale` shows
that the comparison can fail.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from configs.schema import Config
from sharding.mesh import build_mesh
from sharding.partition import Partitioner
from sharding.rules import Rules
from trainer.optimizers import build_optimizer
from trainer.schedules import build_schedule
from trainer.state import abstract_state, init_state, model_spec
from trainer.step import make_evaluation_step, make_train_step

ROOT = Path(__file__).parents[2]
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"compute": "float32"},
    "bf16": {},
    "fp8": {"matmul": "fp8"},
    "int8 moments": {"moments": "int8"},
    "bf16 master": {"params": "bfloat16"},
    "bf16 master, stochastic": {"params": "bfloat16", "stochastic_rounding": True},
    "all narrow": {"matmul": "fp8", "moments": "int8", "params": "bfloat16", "stochastic_rounding": True},
}
ROWS, LENGTH = 8, 128


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the sources to train on, and of those held out."""
    files = sorted(path for room in ("trainer", "perf", "planner", "launch", "loaders") for path in (ROOT / room).glob("*.py"))
    parts = [b"".join(path.read_bytes() for path in chosen) for chosen in (files[::8], [f for i, f in enumerate(files) if i % 8])]
    held, train = (np.frombuffer(part, np.uint8).astype(np.int32) for part in parts)
    return train, held


def batches(text: np.ndarray, count: int, seed: int) -> Iterator[dict[str, jax.Array]]:
    """Rows of LENGTH bytes from random places."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        starts = rng.integers(0, len(text) - LENGTH - 1, ROWS)
        rows = np.stack([text[start : start + LENGTH + 1] for start in starts])
        yield {
            "tokens": rows[:, :-1],
            "targets": rows[:, 1:],
            "weights": np.ones((ROWS, LENGTH), np.float32),
            "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)),
            "segment_ids": np.ones((ROWS, LENGTH), np.int32),
        }


def config_of(precision: dict[str, Any], steps: int, **more: Any) -> Config:
    """Return the config of a variant."""
    return Config.model_validate(
        {
            "model": {"vocab_size": 256, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 192,
                      "max_seq_len": LENGTH},
            "precision": {"compute": "bfloat16", **precision},
            "data": {"batch_size": ROWS, "seq_len": LENGTH},
            "optimizer": {"kind": "adamw", "learning_rate": 4e-3},
            "schedule": {"kind": "linear", "warmup_steps": steps // 10, "final_fraction": 0.0},
            "trainer": {"steps": steps},
            **more,
        }
    )  # fmt: skip


def train(config: Config, devices: int = 1) -> tuple[list[float], float]:
    """Return the training loss of every step and the loss on held-out text, in nats per byte."""
    partitioner = Partitioner(build_mesh(config.mesh, jax.devices()[:devices]), Rules.from_config(config.mesh))
    spec = model_spec(config, partitioner)
    optimizer = build_optimizer(config.optimizer, config.precision, spec.param_axes)
    state = init_state(config, spec, optimizer, abstract_state(config, spec, optimizer, partitioner))
    schedule = build_schedule(config.schedule, config.optimizer.learning_rate, config.trainer.steps)
    step = jax.jit(make_train_step(spec, config, optimizer, schedule, partitioner), donate_argnums=0)
    evaluate = jax.jit(make_evaluation_step(spec, config, partitioner))
    text, held = texts()
    losses = []
    for batch in batches(text, config.trainer.steps, 0):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    sums = [evaluate(state.params, batch) for batch in batches(held, 40, 1)]
    return [float(loss) for loss in losses], sum(float(s["nats"]) for s in sums) / sum(float(s["weight"]) for s in sums)


def main() -> None:
    """Print a row per variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    print(f"{'variant':28}{'train':>9}{'held out':>10}{'minus bf16':>12}")
    reference = None
    for name in args.variants:
        losses, held = train(config_of(VARIANTS[name], args.steps))
        reference = held if name == "bf16" else reference
        tail = float(np.mean(losses[-args.steps // 10 :]))
        print(f"{name:28}{tail:9.4f}{held:10.4f}" + (f"{held - reference:+12.4f}" if reference is not None else ""), flush=True)


if __name__ == "__main__":
    main()
