"""Rank rematerialization policies by prediction and by measured steps: `python benchmarks/remat.py [--rounds 7] [--calibration FILE]`.

There are two predictions: the planner's formulas with this machine's rates (measured as by `ridge calibrate` in the same run, unless a file
is given), and a layer measured under each policy (as by `ridge bench remat`, with four layers and no optimizer). The measured steps
alternate between policies, so that other load affects all alike, and each policy counts with its best round, in wall time or, with --clock
cpu on a busy machine, in CPU seconds. Prints the time that each policy adds to `none` by both predictions and by measurement, and how many
pairs of policies each prediction orders as measured. Pairs whose measurements differ by less than --tie are ignored.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import checkout  # noqa: F401  # before ridgeline
import jax
import numpy as np

from ridgeline.configs.cluster import LinkLevel, load_cluster
from ridgeline.configs.schema import MESH_AXES, Config, RematConfig
from ridgeline.measure import calibration as measuring
from ridgeline.measure.remat import measure_layer
from ridgeline.planner.calibration import Calibration, load_calibration
from ridgeline.planner.calibration_file import add_layer
from ridgeline.planner.hardware import hardware
from ridgeline.planner.step_time import step_time
from ridgeline.sharding.partition import Partitioner
from ridgeline.trainer.optimizers import build_optimizer
from ridgeline.trainer.schedules import build_schedule
from ridgeline.trainer.state import abstract_state, init_state, model_spec
from ridgeline.trainer.step import make_train_step

POLICIES: dict[str, dict[str, Any]] = {
    "none": {"policy": "none"},
    "attention-only": {"policy": "attention-only"},
    "dots": {"policy": "dots"},
    "names": {"policy": "names", "names": ["query", "key", "value", "attention_context", "attention_lse", "attention_out"]},
    "full": {"policy": "full"},
}


def config_of(remat: dict[str, Any], rows: int, length: int) -> Config:
    """Return the config of a policy: a Llama whose layers take most of the step."""
    return Config.model_validate(
        {
            "model": {"vocab_size": 512, "num_layers": 6, "embed_dim": 384, "num_heads": 6, "num_kv_heads": 3, "mlp_dim": 1536,
                      "max_seq_len": length},
            "precision": {"compute": "float32"},
            "compute": {"remat": remat},
            "data": {"batch_size": rows, "seq_len": length, "document_masking": False},
        }
    )  # fmt: skip


def compiled_step(config: Config) -> Any:
    """Return a function that runs one step and waits for its result."""
    partitioner = Partitioner.single()
    spec = model_spec(config, partitioner)
    optimizer = build_optimizer(config.optimizer, config.precision, spec.param_axes)
    state = init_state(config, spec, optimizer, abstract_state(config, spec, optimizer, partitioner))
    schedule = build_schedule(config.schedule, config.optimizer.learning_rate, config.trainer.steps)
    step = jax.jit(make_train_step(spec, config, optimizer, schedule, partitioner), donate_argnums=0)
    rows, length = config.data.batch_size, config.data.seq_len
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (rows, length), np.int32)
    batch = {
        "tokens": tokens,
        "targets": tokens,
        "weights": np.ones((rows, length), np.float32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
        "segment_ids": np.ones((rows, length), np.int32),
    }
    held = [state]

    def run() -> None:
        held[0], metrics = step(held[0], batch)
        jax.block_until_ready((held[0], metrics))

    run()
    return run


def calibrated(path: Path | None) -> Calibration:
    """Return the rates of this machine."""
    if path is not None:
        return load_calibration(path)
    device = hardware("cpu")
    level = LinkLevel(name="memory", kind="memory", bandwidth_gb_per_s=device.host_bandwidth_bytes_per_s / 1e9, latency_us=0.0)
    measured = measuring.calibrate("cpu", measuring.CPU, level, report=lambda line: print(f"measuring {line}", file=sys.stderr))
    return Calibration(measured.name, measured)


def compare(predicted: dict[str, float], measured: dict[str, float], tie: float) -> list[tuple[str, str]]:
    """Return the pairs that measurement puts in the other order, by more than `tie`."""
    wrong = []
    for a, b in itertools.combinations(predicted, 2):
        clear = abs(measured[a] / measured[b] - 1) > tie
        if clear and (predicted[a] - predicted[b]) * (measured[a] - measured[b]) < 0:
            wrong.append((a, b))
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 when the measured layers order a pair of policies differently from the steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tie", type=float, default=0.02, help="relative difference below which two policies count as equal")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    configs = {name: config_of(remat, args.rows, args.length) for name, remat in POLICIES.items()}
    rates, cluster = calibrated(args.calibration), load_cluster("local").config
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    layer = measure_layer(
        configs["names"],
        "cpu",
        rounds=args.rounds,
        policies=[RematConfig.model_validate(remat) for remat in POLICIES.values()],
        clock=clock,
        report=lambda line: print(f"measuring {line}", file=sys.stderr),
    )
    one = dict.fromkeys(MESH_AXES, 1)
    predictions = {
        source: {name: step_time(config, one, cluster, used).step_s for name, config in configs.items()}
        for source, used in (("formulas", rates), ("layers", Calibration("measured layers", add_layer(rates.file, layer))))
    }
    measured = measure_steps({name: compiled_step(config) for name, config in configs.items()}, args.rounds, clock)
    more = {source: more_than_none(found) for source, found in {**predictions, "steps": measured}.items()}
    print(f"none: {predictions['formulas']['none'] * 1e3:.0f} ms a step by formulas, {measured['none'] * 1e3:.0f} ms measured")
    print(f"{'ms more than none':20}{'formulas':>10}{'layers':>10}{'steps':>10}{'of none':>9}")
    for name in sorted(configs, key=lambda name: measured[name]):
        figures = "".join(f"{more[source][name] * 1e3:+10.1f}" for source in ("formulas", "layers", "steps"))
        print(f"{name:20}{figures}{measured[name] / measured['none'] - 1:+9.1%}")
    wrong = {source: compare(found, measured, args.tie) for source, found in predictions.items()}
    pairs = len(configs) * (len(configs) - 1) // 2
    for source, found in wrong.items():
        print(f"by {source}: {pairs - len(found)} of {pairs} pairs in the steps' order" + "".join(f"; not {a} and {b}" for a, b in found))
    if args.json:
        results = {"predicted_s": predictions, "measured_s": measured, "layer": layer.model_dump(mode="json"), "wrong": wrong}
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(bool(wrong["layers"]))


def measure_steps(steps: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the seconds of each step in its best round."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            begun = clock()
            step()
            best[name] = min(best[name], clock() - begun)
    return best


def more_than_none(found: dict[str, float]) -> dict[str, float]:
    """Return the seconds that each policy adds to `none`."""
    return {name: seconds - found["none"] for name, seconds in found.items()}


if __name__ == "__main__":
    sys.exit(main())
