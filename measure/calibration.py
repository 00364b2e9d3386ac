"""Measure this machine for the planner: matmuls by shape and dtype, attention, memory, collectives between local devices, the host.

Every rate is that of the median of several rounds after a warm-up. A round dispatches the work several times and waits once, so that what
the host needs to launch it hides behind the device, as in a training step. Imports JAX; `planner.calibration` reads what is written here.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ridgeline.configs.cluster import LinkLevel
from ridgeline.measure.timing import ROUNDS, rounds_s
from ridgeline.planner.calibration import AttentionPoint, CalibrationFile, HostPoint, LinkCurve, MatmulPoint, MemoryPoint
from ridgeline.planner.communication import IN_SWITCH_FROM

Shape = tuple[int, int, int]
INPUT_TOKENS_PER_ROW = 2048


@dataclass(frozen=True)
class Sizes:
    """How large the measured work is."""

    matmuls: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    stream_bytes: int
    """One of the three arrays of the memory measurement."""
    messages_bytes: tuple[int, ...]
    attention: tuple[tuple[int, int], ...]
    """(seq_len, head_dim)."""


GPU = Sizes(
    (
        (8192, 8192, 8192),
        (4096, 4096, 4096),
        (2048, 2048, 2048),
        (16384, 4096, 4096),
        (8192, 1024, 8192),
        (4096, 14336, 4096),
        (8192, 8192, 512),
    ),
    ("bfloat16", "tfloat32", "float32"),
    2**30,
    tuple(2**n for n in range(16, 31, 2)),
    ((2048, 128), (8192, 128), (2048, 64)),
)
CPU = Sizes(
    ((1024, 1024, 1024), (512, 512, 512), (256, 256, 256), (2048, 256, 1024)),
    ("float32", "bfloat16"),
    2**26,
    (2**14, 2**17, 2**20, 2**23),
    (),
)


def calibrate(device_name: str, sizes: Sizes, level: LinkLevel, *, report: Callable[[str], None]) -> CalibrationFile:
    """Measure the first local device and the links between the local ones.

    Args:
      device_name: catalogue name the entries are about.
      sizes: GPU or CPU.
      level: the links between local devices, as in cluster files: their kind, whether a switch adds up all-reduces, and the latency of a
        hop, which the planner adds and which is therefore taken off here.
      report: called with a line before each group of measurements.
    """
    devices = jax.local_devices()
    source = f"Measured on {devices[0].device_kind} with jax {jax.__version__}: median of {ROUNDS} rounds"
    report(f"matmuls: {len(sizes.matmuls)} shapes, {', '.join(sizes.dtypes)}")
    matmuls = [
        MatmulPoint(device=device_name, dtype=dtype, m=m, n=n, k=k, tflop_per_s=matmul_flops_per_s(dtype, (m, n, k)) / 1e12, source=source)
        for dtype in sizes.dtypes
        for m, n, k in sizes.matmuls
    ]
    report("device memory")
    memory = [MemoryPoint(device=device_name, gb_per_s=memory_bytes_per_s(sizes.stream_bytes) / 1e9, source=f"{source}, a*x + y")]
    attention = []
    if sizes.attention:
        report("attention, forward and backward")
        attention = [
            AttentionPoint(
                device=device_name, seq_len=t, head_dim=h, tflop_per_s=attention_flops_per_s(t, h) / 1e12, source=f"{source}, cuDNN"
            )
            for t, h in sizes.attention
        ]
    links = []
    if len(devices) > 1:
        report(f"collectives between {len(devices)} devices: {len(sizes.messages_bytes)} sizes")
        links = list(_link_curves(device_name, sizes.messages_bytes, level, source))
    report("host")
    # on the CPU platform a copy to the device is none: JAX takes the host's array as it is
    copy = None if devices[0].platform == "cpu" else host_copy_bytes_per_s(sizes.stream_bytes // 4) / 1e9
    host = HostPoint(copy_gb_per_s=copy, dispatch_us=dispatch_s() * 1e6, source=source)
    return CalibrationFile(name=source, matmul=matmuls, attention=attention, memory=memory, links=links, host=host)


def time_s(work: Callable[[], Any], *, least_s: float = 0.02, most: int = 20) -> float:
    """Return the seconds of one call: the median of rounds that take `least_s` or `most` calls."""
    return statistics.median(rounds_s(work, rounds=ROUNDS, least_s=least_s, most=most))


def arithmetic(dtype: str) -> tuple[Any, jax.lax.Precision]:
    """Return the stored dtype and the precision that make a matmul run in this arithmetic (tfloat32: float32 on tensor cores)."""
    if dtype in ("float32", "tfloat32"):
        return jnp.dtype("float32"), jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.DEFAULT
    return jnp.dtype(dtype), jax.lax.Precision.DEFAULT


def matmul_flops_per_s(dtype: str, shape: Shape) -> float:
    """Return the rate of an [M, K] x [K, N] matmul of random numbers (zeros would draw less power and run faster)."""
    m, n, k = shape
    stored, precision = arithmetic(dtype)
    left, right = (jax.random.normal(jax.random.key(i), size, stored) for i, size in enumerate(((m, k), (k, n))))
    multiply = jax.jit(functools.partial(jnp.matmul, precision=precision))
    return 2 * m * n * k / time_s(lambda: multiply(left, right))


def memory_bytes_per_s(array_bytes: int) -> float:
    """Return the bandwidth of a*x + y on arrays of this size: two read, one written."""
    x = jnp.ones(array_bytes // 4, jnp.float32)
    y = jnp.zeros(array_bytes // 4, jnp.float32)
    update = jax.jit(lambda x, y: 2.0 * x + y)
    return 3 * array_bytes / time_s(lambda: update(x, y))


def attention_flops_per_s(seq_len: int, head_dim: int) -> float:
    """Return the rate of causal cuDNN attention, forward and backward, in the planner's FLOPs: 12*T*T/2*N*H per row."""
    heads, rows = 4096 // head_dim, max(1, 16384 // seq_len)
    shape = (rows, seq_len, heads, head_dim)
    q, k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(3))

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    return rows * 12 * seq_len * (seq_len / 2) * heads * head_dim / time_s(lambda: gradient(q, k, v))


def _link_curves(device_name: str, messages_bytes: tuple[int, ...], level: LinkLevel, source: str) -> Iterator[LinkCurve]:
    """Yield the curve of rings, from all-gathers, and that of the switch, from all-reduces of enough devices."""
    count, hop_s = jax.local_device_count(), level.latency_us * 1e-6

    def curve(what: str, function: Callable[[jax.Array], jax.Array], spec: P, hops: int, share: float, *, in_switch: bool) -> LinkCurve:
        times = collective_times_s(function, spec, messages_bytes)
        measured = [(full * share, full * share / max(seconds - hops * hop_s, 1e-9) / 1e9) for full, seconds in times]
        text = f"{source}, {what} over {count} devices"
        return LinkCurve(kind=level.kind, device=device_name, in_switch=in_switch, measured=measured, source=text)

    gather = functools.partial(jax.lax.all_gather, axis_name="x", tiled=True)
    yield curve("all-gather", gather, P("x"), count - 1, (count - 1) / count, in_switch=False)
    if level.in_switch_reduction and count >= IN_SWITCH_FROM:
        yield curve("all-reduce", functools.partial(jax.lax.psum, axis_name="x"), P(), 2, 1.0, in_switch=True)


def collective_times_s(function: Callable[[jax.Array], jax.Array], spec: P, messages_bytes: tuple[int, ...]) -> Iterator[tuple[int, float]]:
    """Yield (bytes of the full tensor, seconds) of a collective over the local devices; `spec` lays out its argument."""
    mesh = Mesh(np.array(jax.local_devices()), ("x",))
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False))
    for full in messages_bytes:
        argument = jax.device_put(jnp.ones(full // 4, jnp.float32), jax.NamedSharding(mesh, spec))
        yield full, time_s(functools.partial(run, argument))


def host_copy_bytes_per_s(array_bytes: int) -> float:
    """Return the bandwidth from host memory to the first device."""
    array = np.zeros(array_bytes, np.uint8)
    device = jax.local_devices()[0]
    return array_bytes / time_s(lambda: jax.device_put(array, device))


def dispatch_s() -> float:
    """Return the host time to start one small compiled program."""
    increment = jax.jit(lambda x: x + 1)
    return time_s(functools.partial(increment, jnp.zeros(())), least_s=0.05, most=1000)


def input_tokens_per_s(directory: Path) -> float:
    """Return the tokens per second at which this host reads rows of a prepared corpus, with the loader's default threads."""
    from ridgeline.configs.schema import DataConfig, DataSource
    from ridgeline.loaders.manifest import read_manifest
    from ridgeline.measure.loader import bench

    seq_len = read_manifest(directory).pack_length or INPUT_TOKENS_PER_ROW
    data = DataConfig(train=[DataSource(path=directory)], seq_len=seq_len, batch_size=32)
    return bench(data, batches=64).tokens_per_s
