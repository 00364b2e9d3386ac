"""Describe a GPU that is not here to XLA: the target of an ahead-of-time compile.

XLA takes a `GpuTargetConfigProto` in text form. What differs between products (memory, bandwidth, cache, multiprocessors, clock) comes
from the hardware catalogue; what belongs to a generation (shared memory, registers, vector units) from the CUDA C++ Programming Guide,
table "Technical Specifications per Compute Capability", as in openxla/xla, xla/backends/gpu/target_config/specs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.configs.errors import UserError
from ridgeline.planner.hardware import Hardware
from ridgeline.planner.overlap import POOL_SHARE


@dataclass(frozen=True)
class _Generation:
    major: int
    minor: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int


_AMPERE = _Generation(8, 0, 64, 167936, 166912)
_HOPPER = _Generation(9, 0, 128, 233472, 232448)
_BLACKWELL = _Generation(10, 0, 128, 233472, 232448)
_BLACKWELL_ULTRA = _Generation(10, 3, 128, 233472, 232448)

_GENERATIONS = {
    "a100": _AMPERE,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "gh200": _HOPPER,
    "b200": _BLACKWELL,
    "gb200": _BLACKWELL,
    "b300": _BLACKWELL_ULTRA,
    "gb300": _BLACKWELL_ULTRA,
}
"""First part of a catalogue name -> generation."""

CUDNN_VERSION = (9, 11, 0)
"""cuDNN that the target is said to have: the first whose attention runs on every GPU of the catalogue (B300 needs it)."""

CUDA_VERSION = "12.9.0"
"""CUDA toolkit that the target is said to have: without one XLA takes it for older than 12.0, which has no 8-bit products."""

ASSUMED_SHARE = 0.8
"""Share of the device's memory that XLA takes for its pool where the client does not tell (GetSchedulerMemoryLimit, jaxlib 0.10.2)."""


def compute_capability(hardware: Hardware) -> tuple[int, int]:
    """Return the CUDA compute capability. Raises UserError for what is no NVIDIA GPU of a known generation."""
    generation = _generation(hardware)
    return generation.major, generation.minor


def target_config(hardware: Hardware) -> str:
    """Return the target description in protobuf text form. Raises UserError for what is no NVIDIA GPU of a known generation."""
    g = _generation(hardware)
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": g.shared_memory_per_core,
        "threads_per_core_limit": 2048,
        "core_count": hardware.cores,
        "fpus_per_core": g.fpus_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(hardware.memory_bandwidth_bytes_per_s),
        "l2_cache_size": hardware.l2_bytes,
        "clock_rate_ghz": round(hardware.clock_hz / 1e9, 4),
        # A run's client tells the compiler its pool; a compile without a GPU has none, so that XLA is made to arrive at the same bytes.
        "device_memory_size": int(hardware.memory_bytes * POOL_SHARE / ASSUMED_SHARE),
        "shared_memory_per_block_optin": g.shared_memory_per_block_optin,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    info = " ".join(f"{name}: {value}" for name, value in fields.items())
    capability = f"cuda_compute_capability {{ major: {g.major} minor: {g.minor} }}"
    major, minor, patch = CUDNN_VERSION
    cudnn = f"dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}"
    toolkit = f'runtime_version: "{CUDA_VERSION}" compile_time_toolkit_version: "{CUDA_VERSION}"'
    name = hardware.kinds[0]
    return f'gpu_device_info {{ {info} {capability} {toolkit} }} platform_name: "CUDA" {cudnn} device_description_str: "{name}"'


def _generation(hardware: Hardware) -> _Generation:
    found = _GENERATIONS.get(hardware.name.split("-")[0])
    if found is None:
        raise UserError(f"device '{hardware.name}' cannot be compiled for ahead of time (it can for: {', '.join(_GENERATIONS)})")
    return found
