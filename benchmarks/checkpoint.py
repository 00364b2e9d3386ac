"""Checkpoint speed relative to the disk: `python benchmarks/checkpoint.py [--gb 1] [--directory DIR] [--repeats 5]`.

All measurements use the same files in the same run. The sequential read speed of the disk is the faster of buffered and direct reads of the
checkpoint's own files. Page caches are dropped before every read, or, where that is not permitted, those of the checkpoint's files
(POSIX_FADV_DONTNEED); the report states which.

The machine may be shared, so every result is the best of its repeats, after one round that is not counted (the first access to memory is
slow on a virtual machine).

Required: restore and manifest verification each reach at least 50 % of the sequential read speed (checkpoint bytes / wall time). A resume
does both in one pass over the files, and is limited by the cores rather than the disk on small machines; its speed is only reported.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import checkout  # noqa: F401  # before ridgeline
import jax
import jax.numpy as jnp

from ridgeline.configs.schema import CheckpointConfig
from ridgeline.trainer.checkpoint import directories as checkpoint_dirs
from ridgeline.trainer.checkpoint import integrity, payload
from ridgeline.trainer.checkpoint.checkpointer import Checkpointer

CHUNK_BYTES = 4 << 20


def drop_caches(files: list[Path]) -> str:
    """Drop the page cache, so that the next read comes from the disk; return the method."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return "drop_caches"
    except OSError:
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return "fadvise (no right to drop all caches)"


def read_buffered(files: list[Path]) -> None:
    buffer = bytearray(CHUNK_BYTES)
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while stream.readinto(buffer):
                pass


def read_direct(files: list[Path]) -> None:
    buffer = mmap.mmap(-1, CHUNK_BYTES)  # page-aligned, as O_DIRECT wants
    for file in files:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        while os.readv(descriptor, [buffer]) == CHUNK_BYTES:
            pass
        os.close(descriptor)


def timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def make_state(size_bytes: int) -> dict[str, object]:
    """Parameters and two moments in float32, 12 scanned matrices each, filled with noise."""
    columns = size_bytes // (3 * 12 * 4 * 1024)
    make = jax.jit(lambda key: jax.random.normal(key, (1024, columns), jnp.float32))
    keys = iter(jax.random.split(jax.random.key(0), 36))
    state = {part: {f"layer{i}": make(next(keys)) for i in range(12)} for part in ("params", "mu", "nu")}
    return jax.block_until_ready({**state, "step": jnp.int32(1)})


def sha256_bytes_per_s(threads: int) -> float:
    data = os.urandom(64 << 20)
    with ThreadPoolExecutor(threads) as pool:
        seconds = timed(lambda: list(pool.map(lambda _: hashlib.sha256(data).digest(), range(4 * threads))))
    return 4 * threads * len(data) / seconds


def measure(directory: Path, size_bytes: int, repeats: int) -> dict[str, object]:
    """Return all results: best seconds, and speeds in checkpoint bytes per second."""
    state = make_state(size_bytes)
    device = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), jax.sharding.PartitionSpec())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)
    saver = Checkpointer(directory, CheckpointConfig(keep_last=1))
    blocking_s, total_s = [], []
    for step in range(1, repeats + 1):
        start_s = time.perf_counter()
        blocking_s.append(saver.save(step, state, {}).blocking_s)
        saver.wait()
        total_s.append(time.perf_counter() - start_s)
    del state
    step_dir = checkpoint_dirs.step_dir(directory, repeats)
    sizes = integrity.list_files(step_dir)
    files, checkpoint_bytes = [step_dir / name for name in sizes], sum(sizes.values())

    readings: dict[str, Callable[[], object]] = {
        "sequential_buffered": lambda: read_buffered(files),
        "sequential_direct": lambda: read_direct(files),
        "verify": lambda: integrity.verify(step_dir),
        "load_without_verification": lambda: jax.block_until_ready(payload.load(step_dir, abstract)),
        "restore_with_verification": lambda: jax.block_until_ready(Checkpointer(directory, CheckpointConfig()).restore(abstract)),
    }
    assert integrity.verify(step_dir) == []
    seconds: dict[str, list[float]] = {name: [] for name in readings}
    how = ""
    for number in range(repeats + 1):  # interleaved, so that a slow moment of the machine hits all alike
        for name, reading in readings.items():
            gc.collect()  # Orbax keeps what it loaded in reference cycles
            how = drop_caches(files)
            taken_s = timed(reading)
            if number:
                seconds[name].append(taken_s)
    speeds = {name: checkpoint_bytes / min(values) for name, values in seconds.items()}
    disk = max(speeds["sequential_buffered"], speeds["sequential_direct"])
    return {
        "checkpoint_bytes": checkpoint_bytes,
        "files": len(files),
        "cores": len(os.sched_getaffinity(0)),
        "caches": how,
        "save_blocking_s": min(blocking_s),
        "save_total_s": min(total_s),
        "sha256_1_thread_bytes_per_s": sha256_bytes_per_s(1),
        "sha256_all_threads_bytes_per_s": sha256_bytes_per_s(len(os.sched_getaffinity(0))),
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "bytes_per_s": speeds,
        "of_sequential_read": {name: speed / disk for name, speed in speeds.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state in GB (1e9 bytes)")
    parser.add_argument("--directory", type=Path, default=None, help="directory on the disk to measure; default: a temporary one here")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory or Path.cwd(), prefix=".bench-checkpoint-") as temporary:
        figures = measure(Path(temporary) / "checkpoints", int(arguments.gb * 1e9), arguments.repeats)
    print(json.dumps(figures, indent=1))
    shares = figures["of_sequential_read"]
    assert isinstance(shares, dict)
    slow = {name: round(shares[name], 3) for name in ("verify", "load_without_verification") if shares[name] < 0.5}
    print(f"TOO SLOW, less than half of the sequential read speed: {slow}" if slow else "ok: at least half of the sequential read speed")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
