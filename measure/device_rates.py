"""Check and time each local device for the preflight: exact arithmetic, matmul rate, memory bandwidth.

Every rate is the median over several calls after a warm-up, each call waited for. Array sizes follow the device's memory. This module runs
inside the probe process (measure/probe.py); launch/preflight judges the results.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from ridgeline.measure.timer import DeviceTimer

_GIB = 2**30


def busy_devices() -> list[jax.Device]:
    """Return the devices to load: all local GPUs, but only one CPU device, because virtual CPU devices share the cores."""
    local = jax.local_devices()
    return local[:1] if local[0].platform == "cpu" else local


def device_memory_bytes(device: jax.Device) -> int | None:
    """Return how many bytes JAX may allocate on a device; None where it does not report a limit (CPU)."""
    stats = device.memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def arithmetic(quick: bool) -> list[str]:
    """Multiply matrices of small integers on every local device; return one message per device with a wrong result.

    The sum of all entries of A B equals (column sums of A) . (row sums of B): exact in int64 on the host, and exact on the device because
    all products and partial sums are integers below 2**24 (float32 accumulation). Sums are compared modulo 2**32, which detects any single
    wrong entry.
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
            wrong.append(f"device {device.id}: {len(bad)} of {rounds} matmuls wrong (sum {bad[0]}, expected {right})")
    return wrong


def matmul_rates(dtype: str, quick: bool) -> list[float]:
    """Return the FLOP/s of large square matmuls per loaded device, with all devices working at once.

    Args:
      dtype: of the inputs: bfloat16, float16, float32 (`highest` precision), tfloat32 (float32 inputs, `default` precision).
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
            # Columns of norm one keep the chain from overflowing or underflowing; random bits draw as much power as training does.
            operands.append([jax.random.normal(key, (size, size), kind) * scale for key, scale in zip(keys, (1, size**-0.5), strict=True)])
    runs = [functools.partial(multiply, x, w, chain) for x, w in operands]
    return _concurrent_rates(runs, work=2 * size**3 * chain, rounds=3 if gpu and quick else 9)


def memory_rates(quick: bool) -> list[float]:
    """Return the bytes/s of `x = s * x + y` over arrays larger than any cache, per loaded device: two reads and one write per element."""
    devices = busy_devices()
    limit = device_memory_bytes(devices[0])
    size_bytes = (64 << 20 if quick else 256 << 20) if limit is None else min((1 if quick else 2) * _GIB, limit // 8)
    repeats = 1 if limit is None else 8

    @functools.partial(jax.jit, donate_argnums=0)
    def scale_and_add(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * 0.5 + y

    state = []
    for device in devices:
        with jax.default_device(device):
            state.append([jnp.ones(size_bytes // 4, jnp.float32), jnp.ones(size_bytes // 4, jnp.float32)])

    def step(index: int) -> jax.Array:
        for _ in range(repeats):
            state[index][0] = scale_and_add(*state[index])
        return state[index][0]

    runs = [functools.partial(step, index) for index in range(len(devices))]
    return _concurrent_rates(runs, work=3 * size_bytes * repeats, rounds=5 if quick else 9)


def _concurrent_rates(runs: Sequence[Callable[[], jax.Array]], work: float, rounds: int) -> list[float]:
    """Run on all devices at once, each timed by its own thread; return work per second for each device (median over rounds)."""
    timers = [DeviceTimer.of(run, most=1) for run in runs]
    for timer in timers:
        timer.warm_up()
    with ThreadPoolExecutor(len(timers)) as pool:
        for _ in range(rounds):
            list(pool.map(DeviceTimer.round, timers))
    return [work / statistics.median(timer.rounds_s) for timer in timers]
