"""Our train step against a straightforward hand-written JAX version of the same model.

`python benchmarks/step_vs_handwritten.py [--shape reference|quickstart] [--dtype float32|bfloat16] [--steps 5] [--set KEY=VALUE ...]`

Both start from the same parameters and use the same batches; their losses are compared first. The machine may be shared, so times are
medians over alternating steps, and the requirement is a ratio: ours / hand-written <= 1.0 (both scan over layers). CPU seconds over all
threads are printed too, because other load affects them least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import checkout  # noqa: F401  # before ridgeline
import jax
import numpy as np
import yaml
from handwritten import Step, Tree, hand_written_step

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import Config, DataConfig, OptimizerConfig, PrecisionConfig, ScheduleConfig
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import Rules
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.schedules import build_schedule
from ridgeline.trainer.state import abstract_state, init_state, model_spec
from ridgeline.trainer.step import make_train_step

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reference": (
        {"num_layers": 4, "embed_dim": 512, "num_heads": 8, "mlp_dim": 1376, "vocab_size": 32000, "max_seq_len": 512},
        {"batch_size": 4, "seq_len": 512},
    ),
    "quickstart": (
        {"num_layers": 4, "embed_dim": 192, "num_heads": 6, "num_kv_heads": 3, "mlp_dim": 512, "vocab_size": 4096, "max_seq_len": 256}
        | {"tie_embeddings": True},
        {"batch_size": 16, "seq_len": 256},
    ),
    "tiny": (
        {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 64, "vocab_size": 128, "max_seq_len": 64},
        {"batch_size": 2, "seq_len": 64},
    ),
}


def batches(config: Config, count: int) -> list[dict[str, jax.Array]]:
    """Random tokens, one document per row."""
    rng = np.random.default_rng(0)
    rows, length = config.data.batch_size, config.data.seq_len
    made = []
    for _ in range(count):
        tokens = rng.integers(0, config.model.vocab_size, (rows, length + 1), dtype=np.int32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((rows, length), np.float32)}
        batch["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        batch["segment_ids"] = np.ones((rows, length), np.int32)
        made.append({name: jax.device_put(x) for name, x in batch.items()})
    return made


WARMUP = 2
"""Steps not counted: the first compiles, and the second may compile again for arrays that the first has committed to a device."""


def contenders(config: Config, names: list[str]) -> dict[str, tuple[Tree, Step]]:
    """Name -> (state, step), all from the same initial parameters."""
    partitioner = Partitioner(build_mesh(config.mesh, jax.devices()[:1]), Rules.from_config(config.mesh))
    spec = model_spec(config, partitioner)
    optimizer = build_optimizer(config.optimizer, config.precision, spec.param_axes)
    abstract = abstract_state(config, spec, optimizer, partitioner)
    schedule = build_schedule(config.schedule, config.optimizer.learning_rate, config.trainer.steps)
    train_step = jax.jit(make_train_step(spec, config, optimizer, schedule, partitioner), donate_argnums=0)

    def ours(state: Tree, batch: dict[str, jax.Array]) -> tuple[Tree, jax.Array]:
        state, metrics = train_step(state, batch)
        return state, metrics["loss"]

    found: dict[str, tuple[Tree, Step]] = {"ours": (init_state(config, spec, optimizer, abstract), ours)}
    for name in names:
        params = init_state(config, spec, optimizer, abstract).params
        hand_optimizer, step = hand_written_step(config, name)
        found[f"hand-written, {name}"] = ((params, hand_optimizer.init(params)), step)
    return found


def measure(config: Config, names: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """Median step time, seconds to the first finished step (tracing and compiling included) and the losses of every contender."""
    data = batches(config, steps + WARMUP)
    running = contenders(config, names)
    times_s: dict[str, list[float]] = {name: [] for name in running}
    cpu_s: dict[str, list[float]] = {name: [] for name in running}
    losses: dict[str, list[float]] = {name: [] for name in running}
    for batch in data:
        for name, (state, step) in running.items():
            start_s, cpu_start_s = time.perf_counter(), time.process_time()
            state, loss = step(state, batch)
            losses[name].append(float(loss))
            jax.block_until_ready(state)
            times_s[name].append(time.perf_counter() - start_s)
            cpu_s[name].append(time.process_time() - cpu_start_s)
            running[name] = (state, step)
    return {
        name: {
            "step_s": statistics.median(times[WARMUP:]),
            "best_s": min(times[WARMUP:]),
            "cpu_s": statistics.median(cpu_s[name][WARMUP:]),
            "first_step_s": times[0],
            "losses": losses[name],
        }
        for name, times in times_s.items()
    }


def shape_config(shape: str, dtype: str, settings: Sequence[str]) -> Config:
    """Return the config of a shape with AdamW at a constant rate; settings as in `compute.loss_chunk=512`."""
    model, data = SHAPES[shape]
    config = Config(
        model=ModelConfig(**model),
        precision=PrecisionConfig(compute=dtype),
        data=DataConfig(**data),
        optimizer=OptimizerConfig(kind="adamw"),
        schedule=ScheduleConfig(kind="constant"),
    )
    for setting in settings:
        keys, _, text = setting.partition("=")
        config = _with(config, keys.split("."), yaml.safe_load(text))
    return config


def main(arguments: list[str] | None = None) -> int:
    """Print a table and one JSON line; 1 when ours is slower than the hand-written scan or the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="reference")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--against", nargs="*", default=["scan", "unrolled"], help="scan; scan, remat; unrolled")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of ours, as in `compute.loss_chunk=512`")
    args = parser.parse_args(arguments)
    config, data = shape_config(args.shape, args.dtype, args.set), SHAPES[args.shape][1]
    results = measure(config, args.against, args.steps)
    ours = results["ours"]
    tolerance = 1e-3 if args.dtype == "float32" else 2e-2
    print(f"{args.shape}, {args.dtype}, {data['batch_size']} x {data['seq_len']} tokens, median of {args.steps} steps in turn")
    print(f"{'':28}{'step ms':>10}{'best ms':>10}{'cpu ms':>10}{'first s':>10}{'ours / it':>10}{'(cpu)':>8}{'loss':>9}")
    good = True
    for name, r in results.items():
        r["ratio"] = ours["step_s"] / r["step_s"]
        r["cpu_ratio"] = ours["cpu_s"] / r["cpu_s"]
        times = f"{r['step_s'] * 1e3:10.0f}{r['best_s'] * 1e3:10.0f}{r['cpu_s'] * 1e3:10.0f}{r['first_step_s']:10.1f}"
        print(f"{name:28}{times}{r['ratio']:10.2f}{r['cpu_ratio']:8.2f}{r['losses'][-1]:9.4f}")
        good &= bool(np.allclose(r["losses"], ours["losses"], rtol=tolerance))
    good &= all(r["ratio"] <= 1.0 for name, r in results.items() if name.endswith("scan"))
    print(json.dumps({"shape": args.shape, "dtype": args.dtype, "steps": args.steps, "set": args.set, "results": results}))
    return 0 if good else 1


def _with(section: Any, keys: list[str], value: Any) -> Any:
    inner = value if len(keys) == 1 else _with(getattr(section, keys[0]), keys[1:], value)
    return section.model_copy(update={keys[0]: inner})


if __name__ == "__main__":
    sys.exit(main())
