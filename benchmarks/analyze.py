"""Time and peak memory of `ridge analyze` on a large synthetic GPU trace: `python benchmarks/analyze.py [GB] [DEVICES]`.

The trace has the structure of a real one: kernels with the statistics of the CUDA tracer, one host launch per kernel, collectives on their
own stream, 100 steps. Limits: 60 s and 4 GB of memory for a trace of 1 GB.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import checkout  # noqa: F401  # before ridgeline
from jax.profiler import ProfileData

HLO_OPS = 400
STEPS = 100


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def event(metadata: int, offset_ps: int, duration_ps: int, stats: bytes) -> bytes:
    return field(4, b"\x08" + varint(metadata) + b"\x10" + varint(offset_ps) + b"\x18" + varint(duration_ps) + stats)


def stat(key: int, kind: int, value: int) -> bytes:
    return field(4, b"\x08" + varint(key) + varint(kind << 3) + varint(value))


def named(number: int, key: int, name: str) -> bytes:
    return field(number, b"\x08" + varint(key) + field(2, b"\x08" + varint(key) + field(2, name.encode())))


KEYS = [
    "correlation_id",
    "hlo_op",
    "hlo_module",
    "program_id",
    "tf_op",
    "kernel_details",
    "theoretical_occupancy_pct",
    "context_id",
    "step_num",
]
KEYS += ["occupancy_min_grid_size", "occupancy_suggested_block_size"]


def make(path: Path, size_bytes: int, devices: int) -> int:
    """Write a trace of about this size; return the number of its events."""
    keys = {name: n for n, name in enumerate(KEYS, 1)}
    texts = {f"fusion.{i}" if i % 20 else f"all-reduce-start.{i}": 200 + i for i in range(HLO_OPS)}
    module, details, path_text = 190, 191, 192
    texts_of = [("hlo_module", module), ("tf_op", path_text), ("kernel_details", details), ("context_id", details)]
    numbers = [
        ("program_id", 7),
        ("theoretical_occupancy_pct", 50),
        ("occupancy_min_grid_size", 264),
        ("occupancy_suggested_block_size", 256),
    ]
    constant = b"".join([*(stat(keys[key], 7, value) for key, value in texts_of), *(stat(keys[key], 4, value) for key, value in numbers)])
    per_op = [constant + stat(keys["hlo_op"], 7, index) for index in texts.values()]
    meta = [
        named(5, n, name)
        for name, n in {**keys, **texts, "jit_train_step": module, "regs:64": details, "jit(f)/mlp/dot": path_text}.items()
    ]
    meta += [named(4, i + 1, f"kernel_{i}" if i % 20 else f"ncclDevKernel_{i}") for i in range(HLO_OPS)]
    meta += [named(4, HLO_OPS + 1, "cuLaunchKernelEx"), named(4, HLO_OPS + 2, "train")]
    one = len(event(1, 10**12, 10**7, per_op[0] + stat(1, 4, 10**7))) + len(event(HLO_OPS + 1, 10**12, 10**6, stat(1, 4, 10**7)))
    per_device = size_bytes // one // devices
    span_ps = 20_000_000
    with path.open("wb") as file:
        launches = []
        for device in range(devices):
            streams: dict[int, list[bytes]] = {14: [], 22: []}
            for n in range(per_device):
                correlation = device * per_device + n + 1
                raw = event(n % HLO_OPS + 1, n * span_ps, span_ps - 500_000, per_op[n % HLO_OPS] + stat(1, 4, correlation))
                streams[14 if n % HLO_OPS % 20 else 22].append(raw)
                launches.append(event(HLO_OPS + 1, max(0, (n - 50) * span_ps) + device * 1000, 2_000_000, stat(1, 4, correlation)))
            lines = [field(3, field(2, f"Stream #{s}(Kernel)".encode()) + b"".join(raw)) for s, raw in streams.items()]
            file.write(field(1, b"".join([field(2, f"/device:GPU:{device}".encode()), *lines, *meta])))
        step_ps = per_device * span_ps // STEPS
        steps = [event(HLO_OPS + 2, s * step_ps, step_ps - 1000, stat(keys["step_num"], 4, s)) for s in range(STEPS)]
        host = [field(3, field(2, b"python") + b"".join(steps)), field(3, field(2, b"Host Threads/7") + b"".join(launches))]
        file.write(field(1, b"".join([field(2, b"/host:CPU"), *host, *meta])))
    return 2 * per_device * devices


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("size_gb", nargs="?", type=float, default=1.0)
    parser.add_argument("devices", nargs="?", type=int, default=8)
    args = parser.parse_args()
    size_gb, devices = args.size_gb, args.devices
    with tempfile.TemporaryDirectory() as scratch:
        small = Path(scratch) / "small.xplane.pb"
        make(small, 200_000, 2)
        assert len(list(ProfileData.from_file(str(small)).planes)) == 3, "JAX's reader disagrees about the file"
        path = Path(scratch) / "node.xplane.pb"
        events = make(path, int(size_gb * 1e9), devices)
        start_s = time.monotonic()
        subprocess.run([sys.executable, "-m", "ridgeline", "analyze", str(path)], check=True, stdout=subprocess.DEVNULL)
        wall_s = time.monotonic() - start_s
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"{path.stat().st_size / 1e9:.2f} GB, {events:,} events, {devices} devices: {wall_s:.1f} s "
            f"({used.ru_utime + used.ru_stime:.1f} s of CPU), peak memory {used.ru_maxrss * 1024 / 1e9:.2f} GB"
        )


if __name__ == "__main__":
    main()
