"""The measurements on the devices themselves, with JAX: arithmetic, matmul rate, memory bandwidth, links between nodes, collectives.

Every figure is the median of several repeats after a warm-up, each waited for to its end. Sizes follow the device's memory.
Runs inside the probe process (measure/probe.py); nothing here judges.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_GIB = 2**30


def median_time_s(run: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of `run`, which must have been called once before (compilation)."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def busy_devices() -> list[jax.Device]:
    """Return the devices to load: all local GPUs, but one CPU device, because virtual ones share the cores."""
    local = jax.local_devices()
    return local[:1] if local[0].platform == "cpu" else local


def device_memory_bytes(device: jax.Device) -> int | None:
    """Return what JAX may allocate on a device; None where it does not say (CPU)."""
    stats = device.memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def arithmetic(quick: bool) -> list[str]:
    """Multiply matrices of small integers on every local device; return a complaint per wrong sum.

    The sum of all entries of A B is (column sums of A) . (row sums of B): exact in int64 on the host, and exact on the device because all
    products and partial sums are integers below 2**24 (float32 accumulation). Compared modulo 2**32, where any single wrong entry shows.
    """
    gpu = jax.local_devices()[0].platform != "cpu"
    size, rounds = (4096 if gpu else 512), (2 if quick else 10 if gpu else 3)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, (size, size), dtype=np.int8) for _ in range(2))
    right = int(a.sum(axis=0, dtype=np.int64) @ b.sum(axis=1, dtype=np.int64)) % 2**32

    @jax.jit
    def total(a: jax.Array, b: jax.Array) -> jax.Array:
        product = jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return product.astype(jnp.int32).sum(dtype=jnp.int32)

    wrong = []
    for device in jax.local_devices() if gpu else busy_devices():
        on_device = jax.device_put((a, b), device)
        got = [int(total(*on_device)) % 2**32 for _ in range(rounds)]
        if bad := [value for value in got if value != right]:
            wrong.append(f"device {device.id}: {len(bad)} of {rounds} products wrong (sum {bad[0]}, right is {right})")
    return wrong


def matmul_rates(dtype: str, quick: bool) -> list[float]:
    """Return FLOP/s of large square matmuls per loaded device, all devices at work at once.

    Args:
      dtype: of the inputs: bfloat16, float16, float32 (plain units: `highest` precision), tfloat32 (float32 inputs, `default`).
    """
    devices = busy_devices()
    gpu = devices[0].platform != "cpu"
    size = 8192 if gpu else 512 if quick else 1024
    chain = (10 if quick else 40) if gpu else 4
    precision = {"float32": jax.lax.Precision.HIGHEST}.get(dtype, jax.lax.Precision.DEFAULT)
    kind = {"tfloat32": "float32"}.get(dtype, dtype)

    @functools.partial(jax.jit, static_argnums=2)
    def multiply(x: jax.Array, w: jax.Array, count: int) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: jnp.matmul(x, w, precision=precision), x)

    operands = []
    for device in devices:
        with jax.default_device(device):
            keys = jax.random.split(jax.random.key(0), 2)
            # Columns of norm one: the chain neither overflows nor underflows, and random bits draw the power that training draws.
            operands.append([jax.random.normal(key, (size, size), kind) * scale for key, scale in zip(keys, (1, size**-0.5), strict=True)])
    return _concurrent_rates(
        [functools.partial(multiply, x, w, chain) for x, w in operands], work=2 * size**3 * chain, repeats=3 if gpu and quick else 9
    )


def memory_rates(quick: bool) -> list[float]:
    """Return bytes/s of `x = s * x + y` over arrays far larger than any cache, per loaded device: two reads and one write per element."""
    devices = busy_devices()
    limit = device_memory_bytes(devices[0])
    size_bytes = (64 << 20 if quick else 256 << 20) if limit is None else min((1 if quick else 2) * _GIB, limit // 8)
    rounds = 1 if limit is None else 8

    @functools.partial(jax.jit, donate_argnums=0)
    def scale_and_add(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * 0.5 + y

    state = []
    for device in devices:
        with jax.default_device(device):
            state.append([jnp.ones(size_bytes // 4, jnp.float32), jnp.ones(size_bytes // 4, jnp.float32)])

    def step(index: int) -> jax.Array:
        for _ in range(rounds):
            state[index][0] = scale_and_add(*state[index])
        return state[index][0]

    runs = [functools.partial(step, index) for index in range(len(devices))]
    return _concurrent_rates(runs, work=3 * size_bytes * rounds, repeats=5 if quick else 9)


def _concurrent_rates(runs: Sequence[Callable[[], jax.Array]], work: float, repeats: int) -> list[float]:
    """Run on all devices at once, each timed by a thread of its own; return work per second and device (median over repeats)."""
    jax.block_until_ready([run() for run in runs])

    def timed(run: Callable[[], jax.Array]) -> float:
        begun = time.perf_counter()
        run().block_until_ready()
        return time.perf_counter() - begun

    with ThreadPoolExecutor(len(runs)) as pool:
        times = [list(pool.map(timed, runs)) for _ in range(repeats)]
    return [work / statistics.median(of_device) for of_device in zip(*times, strict=True)]
