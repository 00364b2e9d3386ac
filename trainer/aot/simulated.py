"""The schedule of a compiled step, simulated at the rates of the plan (planner/kernels.py), on the slowest of the devices."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.hlo.collectives import Collective
from ridgeline.hlo.module import Module
from ridgeline.hlo.roofline import Kernel
from ridgeline.hlo.schedule import Schedule, simulate
from ridgeline.planner.attention_time import counted_flops, fused_flops_per_s
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.collectives import planned_collectives
from ridgeline.planner.communication import hop_s, time_s
from ridgeline.planner.hardware import matmul_dtype
from ridgeline.planner.links import Fabric
from ridgeline.planner.step_time import host_bytes_per_s
from ridgeline.planner.stragglers import slowest_over_mean
from ridgeline.trainer.aot.compile import Compiled, Request


def simulate_step(
    request: Request,
    cluster: ClusterConfig,
    compiled: Compiled,
    rates: Calibration,
    module: Module,
    launched: Sequence[Kernel],
    found: Sequence[Collective],
) -> Schedule:
    """Simulate a compiled step. `launched` and `found` are the kernels and collectives of `module`.

    Matmuls have the rate of their own shape (`matmul_shape`), those of experts times that of grouped matmuls; fused attention takes the
    share of its pass; collectives run over the links that their axes span.
    """
    fabric, device, model = Fabric.from_cluster(cluster, rates, num_devices=request.devices), request.device, request.config.model
    dtype = matmul_dtype(request.config.precision.compute, request.config.compute.matmul_precision)
    bandwidth = rates.memory_bytes_per_s(device)
    slowest = slowest_over_mean(request.devices) if device.tensor_cores else 1.0

    def arithmetic_s(kernel: Kernel) -> float:
        if kernel.category == "attention":
            backend = "cudnn" if "fmha" in kernel.target else "pallas"
            rate = fused_flops_per_s(device, rates, dtype, request.config.data.seq_len, model.head_width, backend)
            return counted_flops(kernel.flops, backend, backward=kernel.part == "backward") / rate
        reads = arithmetic(kernel, dtype)
        rate = rates.matmul_flops_per_s(device, reads, *matmul_shape(kernel)) * rates.software.in_step_share(reads, device)
        return kernel.flops / rate / (rates.software.grouped_rate if kernel.grouped else 1.0)

    def kernel_s(kernel: Kernel) -> float:
        if kernel.host_copy:
            return kernel.bytes / 2 / host_bytes_per_s(request.device, rates)
        return slowest * max(arithmetic_s(kernel) if kernel.flops else 0.0, kernel.bytes / bandwidth)

    def collective_s(collective: Collective) -> float:
        axes = collective.axes if collective.axes is not None else tuple(axis for axis, size in compiled.mesh.items() if size > 1)
        group = fabric.axes_group(compiled.mesh, axes)
        if collective.kind == "collective-permute":
            return hop_s(collective.bytes, group).seconds
        kind = collective.kind.removeprefix("ragged-")
        op = kind if kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all") else "all-gather"
        return time_s(op, sent_bytes.get((collective.kind, collective.bytes), collective.bytes), group).seconds

    planned = planned_collectives(request.config, compiled.mesh)
    sent_bytes: dict[tuple[str, int], int] = {(item.kind, item.bytes): item.sent_bytes for item in planned if item.used_bytes is not None}
    return simulate(module, launched, found, kernel_s, collective_s)


def matmul_shape(kernel: Kernel) -> tuple[int, int, int]:
    """Return the (m, n, k) whose rate a kernel's matmul has.

    The tiles of a batch fill the device together, as those of one matmul with the rows of all. Several in one kernel count as a cube.
    """
    if kernel.matmul is None:
        side = max(1, round((kernel.flops / 2) ** (1 / 3)))
        return side, side, side
    return kernel.matmul.batch * kernel.matmul.m, kernel.matmul.n, kernel.matmul.k


def arithmetic(kernel: Kernel, dtype: str) -> str:
    """Return the dtype that a kernel multiplies, as the hardware catalog names it: float8, float4, that of float32, or the run's dtype."""
    names = {"f8": "float8", "f4": "float4", "f32": matmul_dtype("float32", "default")}
    return names.get(kernel.dtype, names.get(kernel.dtype[:2], dtype))
