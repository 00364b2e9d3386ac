"""The hardware catalog (planner/hardware.yaml): datasheet figures of each device, and everything else that is specific to it.

A device that is not in the catalog has no figures; none are guessed. Adding a GPU is one entry in the YAML file.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ridgeline.configs.errors import UserError, unknown_name

CATALOG = Path(__file__).with_name("hardware.yaml")
HOPPER, BLACKWELL = (9, 0), (10, 0)
"""Compute capabilities of their first GPUs."""

CYCLES_PER_BYTE = 0.0382
"""Cycles of all cores per byte of memory traffic from which XLA computes a gate's activation in each kernel that reads it."""


@dataclass(frozen=True)
class CompileTarget:
    """What XLA needs to know of a GPU architecture, besides the other figures of the catalog, to compile for it on another machine."""

    compute_capability: tuple[int, int]
    """CUDA compute capability, major and minor."""
    fpus_per_core: int
    """float32 units of one streaming multiprocessor."""
    shared_memory_per_core: int
    """Bytes of shared memory of one streaming multiprocessor."""


@dataclass(frozen=True)
class GpuProgram:
    """In what the programs that XLA builds for two GPUs differ, where it decides about memory. Defaults: as for Hopper."""

    adds_bfloat16: bool = True
    """XLA adds and multiplies bfloat16 values as such: from Hopper on. Before, it computes in float32 and rounds each result
    (xla/service/gpu/gpu_float_support.cc)."""
    transposes_float8: bool = True
    """cuBLASLt multiplies float8 arrays only where the summed dim is the last one of both, so that others are transposed first: before
    Blackwell (cuBLAS documentation, cublasLtMatmul: FP8 on devices of compute capability 8.9 and 9.0)."""
    measured_matmuls: bool = True
    """XLA has measured times of matmuls for the device, and its latency-hiding scheduler counts with them and with times of collectives.
    For others it counts with constants (jaxlib 0.10.2: tables for sm_90 and the B200; xla/service/gpu/model/sol_latency_estimator.cc)."""
    repeats_activation: bool = True
    """Kernels that read the activation of an MLP's gate compute it again, as XLA expects that to take less time than to read it
    (xla/service/gpu/transforms/priority_fusion.cc). Of consequence for fp8_delayed on Blackwell: not so on the B200, and on a GB200 with
    the clock of one, so on a GB200 and on one with as many cores or the memory of a B200 (compiled steps of Llama 3.1 8B)."""
    cores: int = 132
    """Streaming multiprocessors: XLA splits the summed dim of matmuls with fewer tiles (xla/backends/gpu/transforms/splitk_rewriter.cc)."""
    memory_bytes: int = 84_942_979_072
    """Device memory. A schedule that would need more than a share of it is ordered for less memory (planner/mlp_peak.py: BY_TIME)."""


@dataclass(frozen=True)
class Hardware:
    """One device of the catalog. These are datasheet figures; measured rates are in the calibration."""

    name: str
    """Name of the entry, as cluster files use it."""
    kinds: tuple[str, ...]
    """Regular expressions of which one must match the whole `device_kind` of JAX; empty: the entry matches no real device."""
    peak_flops: dict[str, float]
    """Dense peak FLOP/s by dtype of the matmul inputs."""
    memory_bytes: int
    """Device memory as the driver reports it, which is less than the label."""
    memory_bandwidth_bytes_per_s: float
    """Peak bandwidth of the device memory."""
    l2_bytes: int
    """Last-level cache on the device."""
    cores: int
    """Streaming multiprocessors (CPU: cores)."""
    clock_hz: float
    """Highest clock."""
    link_bandwidth_bytes_per_s: float | None
    """NVLink bandwidth of one device in ONE direction, half of what datasheets print; None: no NVLink."""
    link_latency_s: float
    """Latency of one hop over NVLink."""
    host_bandwidth_bytes_per_s: float
    """Bandwidth of the host link (PCIe, NVLink-C2C) in one direction."""
    host_latency_s: float
    """Latency of one hop over the host link."""
    tdp_w: float
    """Power limit of one device."""
    price_per_hour_usd: float | None
    """Typical on-demand price of one device; None: unknown."""
    source: str
    """Source of the peaks."""
    sources: dict[str, str]
    """Sources of the other figures: memory, links, power, price."""
    tensor_cores: bool = True
    """True: matmuls run in tiles on tensor cores. False for CPUs."""
    generation: str | None = None
    """NVIDIA's name of the architecture, e.g. `hopper`; None for other devices."""
    target: CompileTarget | None = None
    """Target of ahead-of-time compilation; None: the device cannot be compiled for without being present."""
    assumed_cluster: str | None = None
    """Shipped cluster whose links are assumed for runs that were not submitted with a cluster file; None: no links are assumed."""

    @property
    def nominal(self) -> bool:
        """Whether the figures stand for no real device (cpu): they are for trying plans, and no MFU is reported relative to them."""
        return not self.kinds

    @property
    def program(self) -> GpuProgram:
        """What is particular to the programs that XLA builds for this device; as for Hopper where it cannot be compiled for."""
        if self.target is None:
            return GpuProgram()
        capability = self.target.compute_capability
        return GpuProgram(
            adds_bfloat16=capability >= HOPPER,
            transposes_float8=capability < BLACKWELL,
            measured_matmuls=capability == HOPPER or self.name == "b200",
            repeats_activation=self.cores * self.clock_hz / self.memory_bandwidth_bytes_per_s >= CYCLES_PER_BYTE,
            cores=self.cores,
            memory_bytes=self.memory_bytes,
        )


@functools.cache
def _read() -> dict[str, Any]:
    entries: dict[str, Any] = YAML(typ="safe").load(CATALOG)
    return entries


@functools.cache
def catalog() -> tuple[Hardware, ...]:
    """Return every entry of the catalog."""
    entries = dict(_read())
    common, latencies, _ = (entries.pop(key) for key in ("sources", "latencies", "other_generations"))
    return tuple(_entry(name, latencies | entry, common) for name, entry in entries.items())


def _entry(name: str, entry: dict[str, Any], common: dict[str, str]) -> Hardware:
    link, target = entry["nvlink_gb_per_s"], entry.get("target")
    return Hardware(
        name=name,
        kinds=tuple(entry["kinds"]),
        peak_flops={dtype: float(peak) for dtype, peak in entry["peak_flops"].items()},
        memory_bytes=int(entry["memory_bytes"]),
        memory_bandwidth_bytes_per_s=float(entry["memory_gb_per_s"]) * 1e9,
        l2_bytes=int(entry["l2_bytes"]),
        cores=int(entry["cores"]),
        clock_hz=float(entry["clock_ghz"]) * 1e9,
        link_bandwidth_bytes_per_s=None if link is None else float(link) * 1e9,
        link_latency_s=float(entry["nvlink_us"]) * 1e-6,
        host_bandwidth_bytes_per_s=float(entry["host_gb_per_s"]) * 1e9,
        host_latency_s=float(entry["host_us"]) * 1e-6,
        tdp_w=float(entry["tdp_w"]),
        price_per_hour_usd=None if entry["price_usd"] is None else float(entry["price_usd"]),
        source=entry["source"],
        sources=common | entry.get("sources", {}),
        tensor_cores=entry.get("tensor_cores", True),
        generation=entry.get("generation"),
        target=None if target is None else CompileTarget(**target | {"compute_capability": tuple(target["compute_capability"])}),
        assumed_cluster=entry.get("assumed_cluster"),
    )


def hardware_names() -> list[str]:
    """Return the names of the catalog's entries."""
    return [h.name for h in catalog()]


def hardware(name: str) -> Hardware:
    """Return an entry by name, as cluster files use it. Raises UserError with the nearest name."""
    for entry in catalog():
        if entry.name == name:
            return entry
    raise unknown_name("device", name, hardware_names())


def find_hardware(device_kind: str) -> Hardware | None:
    """Return the catalog entry of a JAX `device_kind`; None when there is none."""
    matches = [h for h in catalog() if any(re.fullmatch(kind, device_kind) for kind in h.kinds)]
    assert len(matches) <= 1, f"{device_kind!r} matches {[m.name for m in matches]} in {CATALOG.name}"
    return matches[0] if matches else None


def find_by_size(vendor: str, cores: int | None, memory_bytes: int | None) -> Hardware | None:
    """Return the only entry of a vendor with this number of cores and about this memory; None when there is none. For devices that are
    known by neither name nor `device_kind`."""
    found = [
        h
        for h in catalog()
        if any(kind.startswith(vendor) for kind in h.kinds)
        and h.cores == cores
        and memory_bytes is not None
        and abs(h.memory_bytes - memory_bytes) < 0.02 * h.memory_bytes
    ]
    return found[0] if len(found) == 1 else None


def unlisted(
    name: str, *, memory_bytes: int, memory_bandwidth_bytes_per_s: float, cores: int, clock_hz: float, peak_flops: float | None = None
) -> Hardware:
    """Return a device that is not in the catalog, of which only these figures are known: it has no links.

    peak_flops: of bfloat16 matmuls, FLOP/s; None: unknown.
    """
    return Hardware(
        name=name,
        kinds=(),
        peak_flops={} if peak_flops is None else {"bfloat16": peak_flops},
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=memory_bandwidth_bytes_per_s,
        l2_bytes=0,
        cores=cores,
        clock_hz=clock_hz,
        link_bandwidth_bytes_per_s=None,
        link_latency_s=0.0,
        host_bandwidth_bytes_per_s=0.0,
        host_latency_s=0.0,
        tdp_w=0.0,
        price_per_hour_usd=None,
        source="reported by the device",
        sources={},
    )


def generation_of(model: str) -> str:
    """Return the generation of an NVIDIA GPU (`hopper`, ...) by the model name that the driver reports; `unknown` for an unknown name."""
    found = find_hardware(model)
    if found is not None and found.generation is not None:
        return found.generation
    others: dict[str, str] = _read()["other_generations"]
    return next((name for name, pattern in others.items() if re.search(pattern, model, re.I)), "unknown")


def check_block_scaled(device: Hardware, matmul: str, kind: str | None = None) -> None:
    """Raise UserError when block-scaled matmuls (mxfp8, nvfp4) are set for a device without them: they came with 4-bit matmuls."""
    if "float4" not in device.peak_flops:
        able = ", ".join(h.name for h in catalog() if "float4" in h.peak_flops)
        name = device.name if kind is None else f"{device.name} ({kind})"
        raise UserError(f"precision.matmul={matmul}: {name} has no block-scaled tensor cores ({able} have); use precision.matmul=fp8")


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the dense datasheet peak in FLOP/s of one device.

    Args:
      device_kind: `jax.Device.device_kind`.
      dtype: of the matmul inputs: float32 (plain units), tfloat32, bfloat16, float16, float8, float4. See `matmul_dtype`.

    Returns:
      FLOP/s, or None when the device or the dtype is not in the catalog.
    """
    found = find_hardware(device_kind)
    return None if found is None else found.peak_flops.get(dtype)


def matmul_dtype(compute: str, matmul_precision: str) -> str:
    """Return the arithmetic that an NVIDIA GPU uses for matmuls of a compute dtype.

    XLA runs float32 matmuls in TF32 at `default` and `high` precision and in plain float32 at `highest` (jax.lax.Precision).
    """
    return "tfloat32" if compute == "float32" and matmul_precision != "highest" else compute
