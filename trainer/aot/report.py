"""What a compiled step says of a run before it starts: memory, collectives against the plan, what fills the memory, a second step time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.schema import Config
from ridgeline.hlo.buffers import Buffer, grouped, live_at_peak
from ridgeline.hlo.collectives import Collective, collectives
from ridgeline.hlo.parse import parse
from ridgeline.hlo.roofline import Kernel, kernels, total_flops, without_flops
from ridgeline.hlo.schedule import Schedule, play
from ridgeline.planner.calibration import Calibration, load_calibration
from ridgeline.planner.communication import hop_s, time_s
from ridgeline.planner.hardware import Hardware, matmul_dtype
from ridgeline.planner.links import Fabric
from ridgeline.planner.memory import MemoryEstimate, memory_per_device
from ridgeline.planner.step_time import host_bytes_per_s
from ridgeline.trainer.aot.compile import Compiled, Request
from ridgeline.trainer.aot.record import collective_json, overlapped, source_text
from ridgeline.trainer.aot.traffic import SMALL_BYTES, Traffic, compare_traffic, unplanned
from ridgeline.trainer.reconcile import memory_rows, traffic_rows


@dataclass(frozen=True)
class Report:
    """The whole report of one compile."""

    compiled: Compiled
    device: Hardware
    capacity_bytes: int
    reserve_bytes: int
    """Of the runtime, outside what is compiled: driver context, communicators."""
    estimate: MemoryEstimate
    collectives: list[Collective]
    traffic: list[Traffic]
    unplanned: list[Collective]
    """Those that make up what the plan does not contain."""
    wide_gathers: list[Collective]
    """Gathers of full-precision values where the compute dtype is half."""
    buffers: list[Buffer]
    """Live at the peak, grouped, largest first."""
    kernels: list[Kernel]
    dtype: str
    """Arithmetic of the products, where they read nothing narrower."""
    schedule: Schedule
    """The compiled schedule, played with calibrated rates of kernels and links."""
    uncounted_loops: tuple[str, ...] = ()
    """Loops that nothing tells the count of: what they hold is in every figure once."""

    @property
    def fits(self) -> bool:
        """Whether the step and the runtime fit into what a run may plan with."""
        return self.compiled.peak_bytes + self.reserve_bytes <= self.capacity_bytes

    @property
    def kernels_s(self) -> float:
        """The least time of all kernels on one device: no step can be faster, communication left out."""
        return math.fsum(self.seconds(kernel) for kernel in self.kernels)

    def rates(self, kernel: Kernel) -> tuple[float, float]:
        """The datasheet's FLOP/s for what the kernel multiplies, 8-bit products by their own, and bytes/s."""
        return self.device.peak_flops[arithmetic(kernel, self.dtype)], self.device.memory_bandwidth_bytes_per_s

    def seconds(self, kernel: Kernel) -> float:
        """The least time of all runs of a kernel."""
        return kernel.seconds(*self.rates(kernel))

    @property
    def overlapped_share(self) -> float:
        """Share of the collective bytes with compute between start and done; 1 without any."""
        total = math.fsum(c.total_bytes for c in self.collectives)
        return math.fsum(c.total_bytes for c in self.collectives if overlapped(c)) / total if total else 1.0


def build_report(request: Request, cluster: ClusterConfig, compiled: Compiled, calibration: Calibration | None = None) -> Report:
    """Read a compiled step. `calibration`: rates of kernels and links; None: the shipped ones."""
    config, device = request.config, request.device
    module = parse(compiled.hlo_text)
    found = collectives(module, compiled.mesh)
    estimate = memory_per_device(
        config,
        compiled.mesh,
        overlap=request.optimization_level not in (None, "O0"),
        combined=any("combine_threshold" in flag for flag in request.xla_flags),
    )
    traffic = compare_traffic(config, compiled.mesh, found)
    dtype = matmul_dtype(config.precision.compute, config.compute.matmul_precision)
    launched = kernels(module)
    rates = calibration or load_calibration()
    live = live_at_peak(module, compiled.live_ranges_text) if compiled.live_ranges_text else []
    return Report(
        compiled=compiled,
        device=device,
        capacity_bytes=int(device.memory_bytes * cluster.utilisation_cap),
        reserve_bytes=estimate.components["runtime_reserve"].bytes,
        estimate=estimate,
        collectives=found,
        traffic=traffic,
        unplanned=unplanned(config, compiled.mesh, found, traffic),
        wide_gathers=_wide_gathers(config, found),
        buffers=grouped(live),
        kernels=launched,
        dtype=dtype,
        schedule=_played(request, cluster, compiled, rates, launched, found, dtype),
        uncounted_loops=tuple(module.unknown_loops),
    )


def _played(
    request: Request,
    cluster: ClusterConfig,
    compiled: Compiled,
    rates: Calibration,
    launched: Sequence[Kernel],
    found: Sequence[Collective],
    dtype: str,
) -> Schedule:
    """Play the schedule with calibrated rates: products as cubes of the same FLOPs, collectives over the links their axes span."""
    fabric = Fabric.from_cluster(cluster, rates, num_devices=request.devices)
    bandwidth = rates.memory_bytes_per_s(request.device)

    def kernel_s(kernel: Kernel) -> float:
        if kernel.host_copy:
            return kernel.bytes / 2 / host_bytes_per_s(request.device, rates)
        side = max(1, round((kernel.flops / 2) ** (1 / 3)))
        reads = arithmetic(kernel, dtype)
        compute_s = kernel.flops / rates.matmul_flops_per_s(request.device, reads, side, side, side) if kernel.flops else 0.0
        return max(compute_s, kernel.bytes / bandwidth)

    def collective_s(collective: Collective) -> float:
        axes = collective.axes if collective.axes is not None else tuple(axis for axis, size in compiled.mesh.items() if size > 1)
        group = fabric.axes_group(compiled.mesh, axes)
        if collective.kind == "collective-permute":
            return hop_s(collective.bytes, group).seconds
        op = collective.kind if collective.kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all") else "all-gather"
        return time_s(op, collective.bytes, group).seconds

    return play(parse(compiled.hlo_text), launched, found, kernel_s, collective_s)


def arithmetic(kernel: Kernel, dtype: str) -> str:
    """Return the catalogue's name of what a kernel multiplies: float8 or float4 where it reads them, else the run's dtype."""
    return {"f8": "float8", "f4": "float4"}.get(kernel.dtype[:2], dtype)


def _wide_gathers(config: Config, found: Sequence[Collective]) -> list[Collective]:
    if config.precision.compute == "float32":
        return []
    return [c for c in found if c.kind == "all-gather" and c.dtype == "f32" and c.bytes >= 4 * SMALL_BYTES]


def smallest_change(request: Request, cluster: ClusterConfig, report: Report) -> list[str] | None:
    """Return the overrides of the smallest change that should fit, by the memory model corrected by this compile; None: none found."""
    from ridgeline.planner.fitting import fitting_changes

    correction = report.compiled.peak_bytes - report.estimate.compiled_bytes
    return fitting_changes(request.config, report.compiled.mesh, report.capacity_bytes - correction)


def report_json(report: Report) -> dict[str, Any]:
    """Return the JSON contract of `ridge compile`."""
    c = report.compiled
    return {
        "argument_bytes": c.argument_bytes,
        "output_bytes": c.output_bytes,
        "alias_bytes": c.alias_bytes,
        "temp_bytes": c.temp_bytes,
        "peak_bytes": c.peak_bytes,
        "reserve_bytes": report.reserve_bytes,
        "capacity_bytes": report.capacity_bytes,
        "fits": report.fits,
        "trace_s": c.trace_s,
        "lower_s": c.lower_s,
        "compile_s": c.compile_s,
        "mesh": c.mesh,
        "device": report.device.name,
        "versions": c.versions,
        "warnings": list(c.warnings),
        "uncounted_loops": list(report.uncounted_loops),
        "collectives": [collective_json(x) for x in report.collectives],
        "overlapped_share": report.overlapped_share,
        "unplanned": [collective_json(x) for x in report.unplanned],
        "full_precision_gathers": [collective_json(x) for x in report.wide_gathers],
        "memory": memory_rows(report.estimate, c.argument_bytes, c.temp_bytes),
        "traffic": traffic_rows(report.traffic, report.collectives),
        "largest_buffers": [buffer_json(b) for b in report.buffers[:40]],
        "planned_memory": {
            "compiled_bytes": report.estimate.compiled_bytes,
            "components": {name: part.bytes for name, part in report.estimate.components.items()},
        },
        "roofline": roofline_json(report),
    }


def roofline_json(report: Report) -> dict[str, Any]:
    """Return the roofline walk: least time of all kernels, by component and pass, and the longest ones."""
    parts: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for k in report.kernels:
        row = parts[k.component, k.part]
        row[0] += report.seconds(k)
        row[1] += k.flops * k.count
        row[2] += k.bytes * k.count
    longest = sorted(report.kernels, key=lambda k: -report.seconds(k))[:20]
    played = report.schedule
    return {
        "kernels_s": report.kernels_s,
        "step_s": played.step_s,
        "compute_s": played.compute_s,
        "communication_s": played.communication_s,
        "exposed_communication_s": played.exposed_s,
        "exposed": [{"kind": kind, "axes": list(axes or ()), "seconds": s} for (kind, axes), s in played.exposed.items() if s > 0],
        "flops": total_flops(report.kernels),
        "unknown_flops": without_flops(report.kernels),
        "components": [
            {"component": name, "part": part, "seconds": s, "flops": f, "bytes": b}
            for (name, part), (s, f, b) in sorted(parts.items(), key=lambda item: -item[1][0])
        ],
        "longest": [
            {
                "name": k.name,
                "component": k.component,
                "part": k.part,
                "seconds": report.seconds(k),
                "count": k.count,
                "flops": k.flops,
                "bytes": k.bytes,
                "dtype": k.dtype,
                "binds": k.binds(*report.rates(k)),
                "op_name": k.op_name,
                "source": source_text(k.source),
            }
            for k in longest
        ],
    }


def buffer_json(b: Buffer) -> dict[str, Any]:
    """Return one (grouped) buffer as plain values."""
    shape = f"{b.dtype}[{','.join(map(str, b.dims))}]"
    return {"what": b.what, "bytes": b.bytes, "copies": b.copies, "shape": shape, "op_name": b.op_name, "source": source_text(b.source)}
