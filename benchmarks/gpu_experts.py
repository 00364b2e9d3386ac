"""Rates of the grouped matmuls of experts on this GPU, by blocks and tiles: which ones models/moe/grouped_matmul.py should have.

`python benchmarks/gpu_experts.py [--experts 32] [--rows 4096] [--width 2048] [--hidden 768] [--float8] [--output FILE] [--tiny]`

`--rows`: mean rows of an expert; loads are drawn at random. A rate counts rows of tokens, not padding. Each kernel's result for the largest
expert is compared with numpy. A star marks the tilings of the project. Needs one NVIDIA GPU; `--tiny` runs on a CPU, interpreted, to test
this program. Exit code: 1 when a result is wrong or a tiling of the project does not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import checkout  # noqa: F401  # before ridgeline
import gpu_needs  # noqa: F401  # reports missing packages
import jax
import jax.numpy as jnp
import numpy as np

from ridgeline.models.moe.grouped_matmul import MATMUL, MATMUL_FLOAT8, OUTER, OUTER_FLOAT8, Blocks, Tiling
from ridgeline.planner.experts import BLOCK

ROUNDS, CALLS = 4, 12
LIMIT = 2.0**-7
"""Of ||x - reference|| / ||reference||: two units of the last place of bfloat16."""
MATMULS = [
    (64, Tiling(128, 64, 4, 3)), (64, Tiling(128, 64, 4, 4)), (64, Tiling(256, 64, 8, 3)), (128, Tiling(128, 64, 4, 3)),
    (128, Tiling(128, 64, 8, 3)), (128, Tiling(128, 64, 8, 4)), (128, Tiling(128, 128, 8, 3)), (128, Tiling(256, 32, 8, 4)),
    (128, Tiling(256, 64, 8, 3)), (128, Tiling(256, 64, 8, 4)), (128, Tiling(256, 128, 8, 3)),
]  # fmt: skip
"""Blocks and tilings. A step of 128 reads as many bytes in float8 as one of 64 in bfloat16."""
OUTERS = [
    (64, Tiling(128, 64, 4, 3, 64)), (64, Tiling(256, 64, 8, 4)), (128, Tiling(128, 64, 8, 3)), (128, Tiling(128, 64, 8, 3, 256)),
    (128, Tiling(128, 128, 8, 3, 64)), (128, Tiling(256, 32, 8, 4)), (128, Tiling(256, 64, 8, 3)), (128, Tiling(256, 64, 8, 4)),
]  # fmt: skip


def timed_s(run: Callable[[], jax.Array], rounds: int, calls: int) -> float:
    """Return the seconds of a call: the second best of the rounds, each of which waits once."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        results = [run() for _ in range(calls)]
        results[-1].block_until_ready()
        found.append((time.perf_counter() - begin) / calls)
    return sorted(found)[min(1, rounds - 1)]


def measure(name: str, kernel: Blocks, load: np.ndarray, width: int, hidden: int, dtype: jnp.dtype) -> tuple[float, float]:
    """Return the seconds of one of the kernels and its error for the largest expert."""
    experts, total, expert = len(load), int(load.sum()), int(np.argmax(load))
    rows, starts = kernel.rows(total, experts), np.asarray(kernel.starts(jnp.asarray(load), total))
    used = np.zeros((rows, 1), bool)
    for first, count in zip(starts, load, strict=True):
        used[first : first + count] = True
    w_DEF = jax.random.normal(jax.random.key(0), (width, experts, hidden), jnp.bfloat16).astype(dtype)
    shapes = ((rows, width), (rows, hidden))
    drawn = (jax.random.normal(jax.random.key(1 + n), shape, jnp.bfloat16) for n, shape in enumerate(shapes))
    x_RD, y_RF = (jnp.where(used, value, 0).astype(dtype) for value in drawn)
    call, given = {
        "matmul": (kernel.matmul, (x_RD, w_DEF)),
        "transposed": (partial(kernel.matmul, transposed=True), (y_RF, w_DEF)),
        "outer": (partial(kernel.outer, dtype=jnp.dtype("float32")), (x_RD, y_RF)),
    }[name]
    run = partial(jax.jit(call), *given, jnp.asarray(load))
    mine = slice(starts[expert], starts[expert] + load[expert])
    x, y, w = (np.asarray(part.astype(jnp.float32)) for part in (x_RD[mine], y_RF[mine], w_DEF[:, expert]))
    want = {"matmul": lambda: x @ w, "transposed": lambda: y @ w.T, "outer": lambda: x.T @ y}[name]()
    found = np.asarray((run()[:, expert] if name == "outer" else run()[mine]).astype(jnp.float32))
    return timed_s(run, *((1, 1) if kernel.interpret else (ROUNDS, CALLS))), float(np.linalg.norm(found - want) / np.linalg.norm(want))


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the tilings of the three kernels; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (("experts", 32), ("rows", 4096), ("width", 2048), ("hidden", 768)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    experts, mean, width, hidden = (4, 100, 256, 128) if args.tiny else (args.experts, args.rows, args.width, args.hidden)
    dtype = jnp.dtype("float8_e4m3fn" if args.float8 else "bfloat16")
    load = np.random.default_rng(0).multinomial(experts * mean, np.full(experts, 1 / experts)).astype(np.int32)
    ours = (MATMUL_FLOAT8, MATMUL_FLOAT8, OUTER_FLOAT8) if args.float8 else (MATMUL, MATMUL, OUTER)
    results, wrong = [], False
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {experts} experts x {mean} rows, {width} x {hidden}, {dtype}")
    for name, tilings, chosen in zip(("matmul", "transposed", "outer"), (MATMULS, MATMULS, OUTERS), ours, strict=True):
        for block, tiling in dict.fromkeys([*tilings, (BLOCK, chosen)]):
            star, sizes = (block, tiling) == (BLOCK, chosen), " ".join(f"{key} {value}" for key, value in tiling._asdict().items())
            label = f"{name:11}{'*' if star else ' '} block {block:3} {sizes:50}"
            try:
                seconds, error = measure(name, Blocks(block, interpret=args.tiny, tiling=tiling), load, width, hidden, dtype)
            except jax.errors.JaxRuntimeError as failure:  # more shared memory than the device has
                print(f"{label} {str(failure).splitlines()[0][:80]}", flush=True)
                wrong |= star
                continue
            rate = 2 * experts * mean * width * hidden / seconds
            wrong |= not error < LIMIT
            print(f"{label} {1e3 * seconds:8.3f} ms {rate / 1e12:6.0f} TFLOP/s  error {error:.1e}", flush=True)
            results.append({"kernel": name, "block": block, **tiling._asdict(), "seconds": seconds, "flops_per_s": rate, "error": error})
    if args.output is not None:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
