"""Forward + backward time of each attention backend on this machine, in one process, rounds interleaved.

python tests/bench/attention_backends.py [--dtype bfloat16] [--chunks 64 128 256 512]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from models.attention import attend

SHAPES = [(4, 512, 8, 8, 64), (8, 256, 8, 8, 64), (2, 1024, 8, 2, 64), (4, 256, 4, 4, 32)]


def compile_gradient(backend: str, chunk: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.stages.Compiled:
    """Compile the gradients of a sum over the attention output, with segment ids as in training."""
    segment_ids = jnp.ones(q.shape[:2], jnp.int32)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(attend(q, k, v, segment_ids=segment_ids, backend=backend, chunk=chunk)).astype(jnp.float32))

    return jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, k, v).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--backends", nargs="+", default=["reference", "xla"])
    args = parser.parse_args()
    for batch, length, heads, kv_heads, width in SHAPES:
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads)]
        q, k, v = (jax.random.normal(key, shape, args.dtype) for key, shape in zip(keys, shapes, strict=True))
        variants = {name: (name, 1) for name in args.backends}
        variants |= {f"chunked {chunk}": ("chunked", chunk) for chunk in args.chunks if chunk <= length}
        compiled = {name: compile_gradient(*variant, q, k, v) for name, variant in variants.items()}
        times_ms: dict[str, list[float]] = {name: [] for name in compiled}
        for _ in range(args.rounds + 1):
            for name, run in compiled.items():
                start = time.perf_counter()
                jax.block_until_ready(run(q, k, v))
                times_ms[name].append(1e3 * (time.perf_counter() - start))
        print(f"B{batch} T{length} N{heads} K{kv_heads} H{width} {args.dtype}:")
        for name, times in times_ms.items():
            temp_bytes = compiled[name].memory_analysis().temp_size_in_bytes
            print(f"  {name:12} {statistics.median(times[1:]):8.1f} ms (min {min(times[1:]):.1f})  temp {temp_bytes / 2**20:7.1f} MiB")


if __name__ == "__main__":
    main()
