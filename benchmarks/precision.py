"""Effect of low-precision arithmetic and optimizer state on the loss.

`python benchmarks/precision.py [--steps 400] [--seeds 3] [--learning-rate 1e-3] [--variants NAME ...]`

A small Llama learns the bytes of this project's sources. For each seed, all variants use the same batches and the same initial parameters.
Prints, in nats per byte averaged over seeds: the training loss of the last tenth of the steps, the loss on held-out files, and its
difference to bf16 with the standard error over seeds. With a learning rate of 4e-3 runs are chaotic: any two roundings then differ by about
0.03.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from checkout import ROOT

from ridgeline.configs.schema import Config
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import Rules
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.schedules import build_schedule
from ridgeline.trainer.state import abstract_state, init_state, model_spec
from ridgeline.trainer.step import make_evaluation_step, make_train_step

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"compute": "float32"},
    "bf16": {},
    "fp8": {"matmul": "fp8"},
    "fp8 delayed": {"matmul": "fp8_delayed"},
    "int8 moments": {"moments": "int8"},
    "bf16 master": {"params": "bfloat16"},
    "bf16 master, stochastic": {"params": "bfloat16", "stochastic_rounding": True},
    "all narrow": {"matmul": "fp8", "moments": "int8", "params": "bfloat16", "stochastic_rounding": True},
}
ROWS, LENGTH = 8, 128


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the sources to train on, and of those held out."""
    files = sorted(path for room in ("trainer", "explain", "planner", "launch", "loaders") for path in (ROOT / room).glob("*.py"))
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


def config_of(precision: dict[str, Any], steps: int, learning_rate: float = 1e-3, **more: Any) -> Config:
    """Return the config of a variant."""
    return Config.model_validate(
        {
            "model": {"vocab_size": 256, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 192,
                      "max_seq_len": LENGTH},
            "precision": {"compute": "bfloat16", **precision},
            "data": {"batch_size": ROWS, "seq_len": LENGTH},
            "optimizer": {"kind": "adamw", "learning_rate": learning_rate},
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
    for batch in batches(text, config.trainer.steps, config.seed):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    sums = [evaluate(state.params, batch) for batch in batches(held, 40, 10**6)]
    return [float(loss) for loss in losses], sum(float(s["nats"]) for s in sums) / sum(float(s["weight"]) for s in sums)


def main() -> None:
    """Print a row per variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    print(f"{'variant':28}{'train':>9}{'held out':>10}{'minus bf16':>12}{'+-':>8}")
    reference = None
    for name in args.variants:
        configs = [config_of(VARIANTS[name], args.steps, args.learning_rate, seed=seed) for seed in range(args.seeds)]
        runs = [train(config) for config in configs]
        held = np.array([loss for _, loss in runs])
        tail = float(np.mean([losses[-args.steps // 10 :] for losses, _ in runs]))
        reference = held if name == "bf16" else reference
        row = f"{name:28}{tail:9.4f}{held.mean():10.4f}"
        if reference is not None:
            apart = held - reference
            row += f"{apart.mean():+12.4f}{apart.std(ddof=1) / np.sqrt(args.seeds) if args.seeds > 1 else np.nan:8.4f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
