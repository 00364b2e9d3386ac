"""The target of an ahead-of-time compile: a description of a GPU for XLA, on a machine without that GPU.

XLA reads a `GpuTargetConfigProto` in text form. All figures that differ between GPUs come from the hardware catalog
(planner/hardware.yaml); the others are the same for every compute capability since 8.0 (CUDA C++ Programming Guide, table "Technical
Specifications per Compute Capability"; openxla/xla, xla/backends/gpu/target_config/specs).
"""

from __future__ import annotations

from ridgeline.configs.errors import UserError
from ridgeline.planner.hardware import CompileTarget, Hardware, catalog
from ridgeline.planner.overlap import POOL_SHARE

RESERVED_SHARED_MEMORY = 1024
"""Bytes of a multiprocessor's shared memory that CUDA reserves for each block."""

CUDNN_VERSION = (9, 11, 0)
"""cuDNN version of the target: the first whose attention runs on every GPU of the catalog (B300 needs it)."""

CUDA_VERSION = "12.9.0"
"""CUDA toolkit of the target. Without one XLA assumes a version before 12.0, which has no 8-bit matmuls."""

ASSUMED_SHARE = 0.8
"""Share of the device's memory that XLA assumes as its pool when the client has no limit (GetSchedulerMemoryLimit, jaxlib 0.10.2)."""


def compute_capability(hardware: Hardware) -> tuple[int, int]:
    """Return the CUDA compute capability. Raises UserError for a device without a compile target."""
    return _target(hardware).compute_capability


def target_config(hardware: Hardware) -> str:
    """Return the target description in protobuf text form. Raises UserError for a device without a compile target."""
    target = _target(hardware)
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": target.shared_memory_per_core,
        "threads_per_core_limit": 2048,
        "core_count": hardware.cores,
        "fpus_per_core": target.fpus_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(hardware.memory_bandwidth_bytes_per_s),
        "l2_cache_size": hardware.l2_bytes,
        "clock_rate_ghz": round(hardware.clock_hz / 1e9, 4),
        # In a run the client gives the compiler the size of its pool. Without a client, XLA's assumed share must yield the same size.
        "device_memory_size": int(hardware.memory_bytes * POOL_SHARE / ASSUMED_SHARE),
        "shared_memory_per_block_optin": target.shared_memory_per_core - RESERVED_SHARED_MEMORY,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    info = " ".join(f"{name}: {value}" for name, value in fields.items())
    capability = "cuda_compute_capability {{ major: {} minor: {} }}".format(*target.compute_capability)
    major, minor, patch = CUDNN_VERSION
    cudnn = f"dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}"
    toolkit = f'runtime_version: "{CUDA_VERSION}" compile_time_toolkit_version: "{CUDA_VERSION}"'
    name = hardware.kinds[0]
    return f'gpu_device_info {{ {info} {capability} {toolkit} }} platform_name: "CUDA" {cudnn} device_description_str: "{name}"'


def _target(hardware: Hardware) -> CompileTarget:
    if hardware.target is None:
        able = ", ".join(h.name for h in catalog() if h.target is not None)
        raise UserError(f"device '{hardware.name}' cannot be compiled for ahead of time (it can for: {able})")
    return hardware.target
