"""Time of each attention backend, forward and backward, on this machine; for each shape the fastest is printed last.

`python benchmarks/attention_backends.py [--dtype bfloat16] [--chunks 64 128 256 512] [--documents 1 8]`

All backends run in one process with alternating rounds. On a GPU, every backend that supports the request (cudnn, pallas, chunked, ...) is
timed on the shapes of benchmarks/gpu.py in bfloat16, with one and with several documents per row. Use the fastest for
compute.attention.backend.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import checkout  # noqa: F401  # before ridgeline
import jax
import jax.numpy as jnp
import numpy as np

from ridgeline.models.attention import AttentionRequest, attend, backend_names
from ridgeline.models.attention.dispatch import BACKENDS

Shape = tuple[int, int, int, int, int]
"""Rows, tokens per row, query heads, key/value heads, head width."""
CPU_SHAPES: list[Shape] = [(4, 512, 8, 8, 64), (8, 256, 8, 8, 64), (2, 1024, 8, 2, 64), (4, 256, 4, 4, 32)]
GPU_SHAPES: list[Shape] = [(64, 1024, 32, 8, 64), (8, 8192, 32, 8, 64), (8, 4096, 24, 8, 128), (6, 4096, 32, 8, 128), (3, 8192, 32, 8, 128)]


def compile_gradient(
    backend: str, chunk: int, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
) -> jax.stages.Compiled:
    """Compile the gradients of a sum over the attention output."""

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(attend(q, k, v, segment_ids=segment_ids, backend=backend, chunk=chunk)).astype(jnp.float32))

    return jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, k, v).compile()


def packed(batch: int, length: int, documents: int) -> jax.Array | None:
    """Return segment ids of rows with this many documents of log-normal length; None for one document per row."""
    if documents == 1:
        return None
    source = np.random.default_rng(0)
    rows = np.zeros((batch, length), np.int32)
    for row in rows:
        ends = np.cumsum(source.lognormal(0, 1, documents))
        row[:] = 1 + np.searchsorted(ends / ends[-1], (np.arange(length) + 0.5) / length)
    return jnp.asarray(rows)


def able(shape: Shape, dtype: str, documents: int) -> list[str]:
    """Backends that take this request on this machine."""
    _, length, heads, kv_heads, width = shape
    request = AttentionRequest(
        jax.default_backend(), jnp.dtype(dtype), width, heads, kv_heads, True, None, packed=documents > 1, length=length
    )
    return [name for name in backend_names() if name in BACKENDS and BACKENDS[name].refusal(request) is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    gpu = jax.default_backend() == "gpu"
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512] if gpu else [64, 128, 256, 512])
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 8], help="documents per row")
    parser.add_argument("--backends", nargs="+", help="default: all that support the request, without those that store scores on a GPU")
    args = parser.parse_args()
    for shape, documents in itertools.product(GPU_SHAPES if gpu else CPU_SHAPES, args.documents):
        batch, length, heads, kv_heads, width = shape
        segment_ids = packed(batch, length, documents)
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads)]
        q, k, v = (jax.random.normal(key, shape, args.dtype) for key, shape in zip(keys, shapes, strict=True))
        storing = ("reference", "xla") if gpu else ()
        names = [name for name in able(shape, args.dtype, documents) if name in (args.backends or set(BACKENDS) - set(storing))]
        variants = {name: (name, 1) for name in names if name != "chunked"}
        variants |= {f"chunked {chunk}": ("chunked", chunk) for chunk in args.chunks if chunk <= length and "chunked" in names}
        compiled = {name: compile_gradient(*variant, q, k, v, segment_ids) for name, variant in variants.items()}
        times_ms: dict[str, list[float]] = {name: [] for name in compiled}
        for _ in range(args.rounds + 1):
            for name, run in compiled.items():
                start = time.perf_counter()
                jax.block_until_ready(run(q, k, v))
                times_ms[name].append(1e3 * (time.perf_counter() - start))
        print(f"B{batch} T{length} N{heads} K{kv_heads} H{width} {args.dtype}, {documents} documents per row:")
        for name, times in times_ms.items():
            temp_bytes = compiled[name].memory_analysis().temp_size_in_bytes
            print(f"  {name:12} {statistics.median(times[1:]):8.1f} ms (min {min(times[1:]):.1f})  temp {temp_bytes / 2**20:7.1f} MiB")
        print(f"  fastest: {min(times_ms, key=lambda name: statistics.median(times_ms[name][1:]))}")


if __name__ == "__main__":
    main()
