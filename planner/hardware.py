"""What the datasheets promise: compute, memory, links, power and price of a device. An unknown device has none; nothing is guessed."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from ridgeline.configs.errors import UserError, unknown_name

CATALOGUE = Path(__file__).with_name("hardware.yaml")


@dataclass(frozen=True)
class Hardware:
    """One device of the catalogue (planner/hardware.yaml), as bought: what it reaches is the calibration's matter."""

    name: str
    kinds: tuple[str, ...]
    """Regular expressions over the whole `device_kind` of JAX; none: never recognised, only named in cluster files."""
    peak_flops: dict[str, float]
    """Dense peak FLOP/s by dtype of the matmul inputs."""
    memory_bytes: int
    """Device memory as the driver reports it, which is less than the label says."""
    memory_bandwidth_bytes_per_s: float
    """Peak of the device memory."""
    l2_bytes: int
    """Last-level cache on the device."""
    cores: int
    """Streaming multiprocessors (CPU: cores)."""
    clock_hz: float
    """Highest clock."""
    link_bandwidth_bytes_per_s: float | None
    """NVLink of one device in ONE direction, half of what datasheets print; None: no NVLink."""
    link_latency_s: float
    """One hop of a small message over NVLink."""
    host_bandwidth_bytes_per_s: float
    """Host link (PCIe, NVLink-C2C) in one direction."""
    host_latency_s: float
    """One hop of a small message over the host link."""
    tdp_w: float
    """Power limit of one device."""
    price_per_hour_usd: float | None
    """Typical on-demand price of one device; None: none known."""
    source: str
    """Of the peaks."""
    sources: dict[str, str]
    """Of everything else: memory, links, power, price."""
    tensor_cores: bool = True
    """Matmuls run in tiles on tensor cores; false for CPUs."""

    @property
    def nominal(self) -> bool:
        """True when the figures stand for no real device (cpu): good for trying plans, but no MFU is worth anything against them."""
        return not self.kinds


@functools.cache
def catalogue() -> tuple[Hardware, ...]:
    """Read the catalogue."""
    entries = YAML(typ="safe").load(CATALOGUE)
    common = entries.pop("sources")
    latencies = entries.pop("latencies")
    return tuple(_entry(name, latencies | entry, common) for name, entry in entries.items())


def _entry(name: str, entry: dict[str, Any], common: dict[str, str]) -> Hardware:
    link = entry["nvlink_gb_per_s"]
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
    )


def hardware_names() -> list[str]:
    """Return the names of the catalogue's entries."""
    return [h.name for h in catalogue()]


def hardware(name: str) -> Hardware:
    """Return an entry by name, as cluster files name it. Raises UserError naming the nearest."""
    for entry in catalogue():
        if entry.name == name:
            return entry
    raise unknown_name("device", name, hardware_names())


def find_hardware(device_kind: str) -> Hardware | None:
    """Find the catalogue entry of a JAX `device_kind`; None when it is not listed."""
    matches = [h for h in catalogue() if any(re.fullmatch(kind, device_kind) for kind in h.kinds)]
    assert len(matches) <= 1, f"{device_kind!r} matches {[m.name for m in matches]} in {CATALOGUE.name}"
    return matches[0] if matches else None


def check_block_scaled(device: Hardware, matmul: str, kind: str | None = None) -> None:
    """Refuse block-scaled products (mxfp8, nvfp4) on a device without them: they came with 4-bit ones. Raises UserError."""
    if "float4" not in device.peak_flops:
        able = ", ".join(h.name for h in catalogue() if "float4" in h.peak_flops)
        name = device.name if kind is None else f"{device.name} ({kind})"
        raise UserError(f"precision.matmul={matmul}: {name} has no block-scaled tensor cores ({able} have); use precision.matmul=fp8")


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the dense datasheet peak in FLOP/s of one device.

    Args:
      device_kind: `jax.Device.device_kind`.
      dtype: of the matmul inputs: float32 (plain units), tfloat32, bfloat16, float16, float8, float4. See `matmul_dtype`.

    Returns:
      FLOP/s, or None when the device or the dtype is not in the catalogue.
    """
    found = find_hardware(device_kind)
    return None if found is None else found.peak_flops.get(dtype)


def matmul_dtype(compute: str, matmul_precision: str) -> str:
    """Name the arithmetic an NVIDIA GPU uses for matmuls of a compute dtype.

    XLA runs float32 matmuls in TF32 at `default` and `high` precision and in plain float32 at `highest` (jax.lax.Precision).
    """
    return "tfloat32" if compute == "float32" and matmul_precision != "highest" else compute
