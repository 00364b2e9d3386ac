"""Measure this machine for the planner: matmuls by shape and dtype, attention, memory, links between local devices, the host.

Every rate comes from the median of several rounds (`measure.timer`). `planner.calibration` reads the file that `write_calibration` writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ridgeline.configs.cluster import LinkLevel
from ridgeline.configs.errors import UserError
from ridgeline.measure.collectives import collective
from ridgeline.measure.timer import ROUNDS, median_s
from ridgeline.planner.calibration_file import AttentionPoint, CalibrationFile, HostPoint, LinkCurve, MatmulPoint, MemoryPoint
from ridgeline.planner.communication import IN_SWITCH_FROM
from ridgeline.planner.hardware import CATALOG, Hardware, find_hardware, hardware

Shape = tuple[int, int, int]
INPUT_TOKENS_PER_ROW = 2048


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured work."""

    matmuls: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    stream_bytes: int
    """Bytes of each array of the memory measurement."""
    messages_bytes: tuple[int, ...]
    attention: tuple[tuple[int, int], ...]
    """(seq_len, head_dim)."""
    rest_s: float = 0.0
    """Pause before each round of matmuls and attention. After a tenth of a second of matmuls an H200 reaches its power limit and loses a
    tenth of its rate (773 to 690 TFLOP/s); what a step makes of the rates of short runs is planner.software's `in_step`."""


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
    rest_s=0.3,
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
      device_name: name of the device in the hardware catalog.
      sizes: GPU or CPU.
      level: the links between local devices, as in cluster files: their kind, whether the switch reduces (SHARP), and the latency of a hop.
        The planner adds this latency, so it is subtracted here.
      report: called with one line before each group of measurements.
    """
    devices = jax.local_devices()
    source = f"Measured on {devices[0].device_kind} with jax {jax.__version__}: median of {ROUNDS} rounds"
    report(f"matmuls: {len(sizes.matmuls)} shapes, {', '.join(sizes.dtypes)}")
    matmuls = [
        MatmulPoint(
            device=device_name,
            dtype=dtype,
            m=m,
            n=n,
            k=k,
            tflop_per_s=matmul_flops_per_s(dtype, (m, n, k), sizes.rest_s) / 1e12,
            source=source,
        )
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
                device=device_name,
                seq_len=t,
                head_dim=h,
                tflop_per_s=attention_flops_per_s(t, h, sizes.rest_s) / 1e12,
                source=f"{source}, cuDNN",
            )
            for t, h in sizes.attention
        ]
    links = []
    if len(devices) > 1:
        report(f"collectives between {len(devices)} devices: {len(sizes.messages_bytes)} sizes")
        links = list(_link_curves(device_name, sizes.messages_bytes, level, source))
    report("host")
    # on the CPU platform JAX uses the host's array without a copy
    copy = None if devices[0].platform == "cpu" else host_copy_bytes_per_s(sizes.stream_bytes // 4) / 1e9
    host = HostPoint(copy_gb_per_s=copy, dispatch_us=dispatch_s() * 1e6, source=source)
    return CalibrationFile(name=source, matmul=matmuls, attention=attention, memory=memory, links=links, host=host)


def dtype_and_precision(dtype: str) -> tuple[Any, jax.lax.Precision]:
    """Return the array dtype and the precision with which a matmul runs in this arithmetic (tfloat32: float32 on tensor cores)."""
    if dtype in ("float32", "tfloat32"):
        return jnp.dtype("float32"), jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.DEFAULT
    return jnp.dtype(dtype), jax.lax.Precision.DEFAULT


def matmul_flops_per_s(dtype: str, shape: Shape, rest_s: float = 0.0) -> float:
    """Return the FLOP/s of an [M, K] x [K, N] matmul of random numbers (zeros draw less power and run faster). `rest_s`: see Sizes."""
    m, n, k = shape
    stored, precision = dtype_and_precision(dtype)
    left, right = (jax.random.normal(jax.random.key(i), size, stored) for i, size in enumerate(((m, k), (k, n))))
    multiply = jax.jit(functools.partial(jnp.matmul, precision=precision))
    return 2 * m * n * k / median_s(lambda: multiply(left, right), rest_s=rest_s)


def memory_bytes_per_s(array_bytes: int) -> float:
    """Return the bytes/s of a*x + y on arrays of this size: two reads and one write per element."""
    x = jnp.ones(array_bytes // 4, jnp.float32)
    y = jnp.zeros(array_bytes // 4, jnp.float32)
    update = jax.jit(lambda x, y: 2.0 * x + y)
    return 3 * array_bytes / median_s(lambda: update(x, y))


def attention_flops_per_s(seq_len: int, head_dim: int, rest_s: float = 0.0) -> float:
    """Return the FLOP/s of causal cuDNN attention, forward and backward, counted as the planner does: 12*T*T/2*N*H per row.

    `rest_s`: see Sizes.
    """
    heads, rows = 4096 // head_dim, max(1, 16384 // seq_len)
    shape = (rows, seq_len, heads, head_dim)
    q, k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(3))

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    return rows * 12 * seq_len * (seq_len / 2) * heads * head_dim / median_s(lambda: gradient(q, k, v), rest_s=rest_s)


def _link_curves(device_name: str, messages_bytes: tuple[int, ...], level: LinkLevel, source: str) -> Iterator[LinkCurve]:
    """Yield the bandwidth curve of rings, from all-gathers, and that of reduction in the switch, from all-reduces of enough devices."""
    count, hop_s = jax.local_device_count(), level.latency_us * 1e-6
    mesh = Mesh(np.array(jax.local_devices()), ("x",))

    def curve(kind: str, hops: int, share: float, *, in_switch: bool) -> LinkCurve:
        times = [(full, median_s(collective(kind, ("x",), full, mesh))) for full in messages_bytes]
        measured = [(full * share, full * share / max(seconds - hops * hop_s, 1e-9) / 1e9) for full, seconds in times]
        text = f"{source}, {kind} over {count} devices"
        return LinkCurve(kind=level.kind, device=device_name, in_switch=in_switch, measured=measured, source=text)

    yield curve("all-gather", count - 1, (count - 1) / count, in_switch=False)
    if level.in_switch_reduction and count >= IN_SWITCH_FROM:
        yield curve("all-reduce", 2, 1.0, in_switch=True)


def host_copy_bytes_per_s(array_bytes: int) -> float:
    """Return the bytes/s from host memory to the first device."""
    array = np.zeros(array_bytes, np.uint8)
    device = jax.local_devices()[0]
    return array_bytes / median_s(lambda: jax.device_put(array, device))


def dispatch_s() -> float:
    """Return the seconds the host takes to dispatch one small compiled program."""
    increment = jax.jit(lambda x: x + 1)
    return median_s(functools.partial(increment, jnp.zeros(())), least_s=0.05, most=1000)


def input_tokens_per_s(directory: Path) -> float:
    """Return the tokens/s of the loader on a prepared corpus, with its default threads."""
    from ridgeline.configs.schema import DataConfig, DataSource
    from ridgeline.loaders.manifest import read_manifest
    from ridgeline.measure.loader import measure_loader

    seq_len = read_manifest(directory).pack_length or INPUT_TOKENS_PER_ROW
    data = DataConfig(train=[DataSource(path=directory)], seq_len=seq_len, batch_size=32)
    return measure_loader(data, batches=64).tokens_per_s


def device_entry(platform: str, device_kind: str) -> Hardware:
    """Return the catalog entry of a JAX device; `cpu` for any CPU. Raises UserError for a device that is not in the catalog."""
    found = hardware("cpu") if platform == "cpu" else find_hardware(device_kind)
    if found is None:
        raise UserError(f"'{device_kind}' is not in the hardware catalog; add it with its datasheet figures to {CATALOG}")
    return found


def default_link(device: Hardware) -> LinkLevel:
    """Return the links between the devices of a node when no cluster file gives them: NVLink, or the host's memory."""
    if device.link_bandwidth_bytes_per_s is None:
        return LinkLevel(name="memory", kind="memory", bandwidth_gb_per_s=device.host_bandwidth_bytes_per_s / 1e9, latency_us=0.0)
    rate, latency = device.link_bandwidth_bytes_per_s / 1e9, device.link_latency_s * 1e6
    return LinkLevel(name="nvlink", kind="nvlink", bandwidth_gb_per_s=rate, latency_us=latency)
