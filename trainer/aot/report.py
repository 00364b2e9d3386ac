"""The report of `ridge compile`: memory, collectives compared with the plan, largest buffers, a step time from the schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.configs.cluster import ClusterConfig
from ridgeline.configs.context import context_method
from ridgeline.configs.errors import UserError
from ridgeline.configs.mesh import resolve_sizes
from ridgeline.configs.schema import Config
from ridgeline.hlo.buffers import Buffer, grouped, live_at_peak
from ridgeline.hlo.collectives import Collective, collectives
from ridgeline.hlo.parse import parse
from ridgeline.hlo.roofline import Kernel, kernels, total_flops, without_flops
from ridgeline.hlo.schedule import Schedule
from ridgeline.planner.calibration import Calibration, load_calibration
from ridgeline.planner.experts import exchange_method
from ridgeline.planner.hardware import Hardware, matmul_dtype
from ridgeline.planner.memory import MemoryEstimate, memory_per_device
from ridgeline.trainer.aot.compile import Compiled, Request
from ridgeline.trainer.aot.simulated import arithmetic, simulate_step
from ridgeline.trainer.plan_comparison import SMALL_BYTES, Traffic, compare_traffic, memory_rows, traffic_rows, unplanned
from ridgeline.trainer.plan_record import compiled_collective, overlapped, source_text

EQUAL = 0.02
"""Simulated step times that differ by less than this share are equal: the calibrated rates are not more exact."""


@dataclass(frozen=True)
class Report:
    """The report of one compile."""

    compiled: Compiled
    device: Hardware
    capacity_bytes: int
    reserve_bytes: int
    """Memory of the runtime outside the compiled program: driver context, communicators."""
    estimate: MemoryEstimate
    collectives: list[Collective]
    traffic: list[Traffic]
    unplanned: list[Collective]
    """Collectives that are not in the plan."""
    wide_gathers: list[Collective]
    """All-gathers of float32 values although the compute dtype has 16 bits."""
    buffers: list[Buffer]
    """Live at the peak, grouped, largest first."""
    kernels: list[Kernel]
    dtype: str
    """Dtype of the matmuls, except those with 8-bit or 4-bit inputs."""
    schedule: Schedule
    """The compiled schedule, simulated with calibrated rates of kernels and links."""
    context_method: str | None = None
    """ring or all_to_all, where the sequence is sharded."""
    expert_exchange: str | None = None
    """gather or all_to_all, where the experts are divided over devices."""
    uncounted_loops: tuple[str, ...] = ()
    """Loops with an unknown trip count; their bodies are counted once."""
    estimated_loops: tuple[str, ...] = ()
    """Loops whose trip count depends on documents and device; their bodies are counted by the mean for rows of one document."""

    @property
    def fits(self) -> bool:
        """Whether the step and the runtime fit into the usable memory."""
        return self.needed_bytes <= self.capacity_bytes

    @property
    def needed_bytes(self) -> int:
        """Memory of a device that the step and the runtime need; gaps in XLA's heap count, since a device allocates them."""
        return self.compiled.allocated_bytes + self.reserve_bytes

    @property
    def kernels_s(self) -> float:
        """Roofline time of all kernels on one device, without communication: a lower bound of the step time."""
        return math.fsum(self.seconds(kernel) for kernel in self.kernels)

    def rates(self, kernel: Kernel) -> tuple[float, float]:
        """Return the datasheet's FLOP/s for the dtype that the kernel multiplies, and bytes/s."""
        return self.device.peak_flops[arithmetic(kernel, self.dtype)], self.device.memory_bandwidth_bytes_per_s

    def seconds(self, kernel: Kernel) -> float:
        """Return the roofline time of all executions of a kernel."""
        return kernel.seconds(*self.rates(kernel))

    @property
    def overlapped_share(self) -> float:
        """Share of the collective bytes with compute between start and done; 1 without collectives."""
        total = math.fsum(c.total_bytes for c in self.collectives)
        return math.fsum(c.total_bytes for c in self.collectives if overlapped(c)) / total if total else 1.0


def build_report(request: Request, cluster: ClusterConfig, compiled: Compiled, calibration: Calibration | None = None) -> Report:
    """Analyze a compiled step. `calibration`: rates of kernels and links; None: the shipped ones."""
    config, device = request.config, request.device
    module = parse(compiled.hlo_text)
    found = collectives(module, compiled.mesh)
    estimate = memory_per_device(
        config,
        compiled.mesh,
        overlap=request.optimization_level not in (None, "O0"),
        combined=any("combine_threshold" in flag for flag in request.xla_flags),
        device=device,
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
        reserve_bytes=estimate.reserve_bytes,
        estimate=estimate,
        collectives=found,
        traffic=traffic,
        unplanned=unplanned(config, compiled.mesh, found, traffic),
        wide_gathers=_wide_gathers(config, found),
        buffers=grouped(live),
        kernels=launched,
        dtype=dtype,
        schedule=simulate_step(request, cluster, compiled, rates, module, launched, found),
        context_method=context_method(config, compiled.mesh),
        expert_exchange=exchange_method(config.model.moe, config.compute.experts, compiled.mesh),
        uncounted_loops=tuple(module.unknown_loops),
        estimated_loops=tuple(module.estimated_loops),
    )


def _wide_gathers(config: Config, found: Sequence[Collective]) -> list[Collective]:
    if config.precision.compute == "float32":
        return []
    return [c for c in found if c.kind == "all-gather" and c.dtype == "f32" and c.bytes >= 4 * SMALL_BYTES]


def bytes_at_points(report: Report) -> list[dict[str, Any]]:
    """Return the bytes of one device at each point of the plan (planner/peak_memory.py), arguments included, planned and compiled; None for
    a point that only one of them has (compiled: the peak alone where the layers are no loop).

    Raises UserError where XLA wrote no buffer assignment.
    """
    c, estimate = report.compiled, report.estimate
    heap = c.heap
    if heap is None:
        raise UserError("--heap: XLA wrote no buffer assignment for this step; leave the option out")
    apart = estimate.total_bytes - estimate.compiled_bytes  # the margin, and what is outside of the step
    planned = {"peak": estimate.compiled_bytes} | {point: size - apart for point, size in estimate.bytes_at.items()}
    live = {"peak": max(heap.live)} | {point: heap.live[position] for point, position in heap.peaks(parse(c.hlo_text)).items()}
    compiled = {point: c.argument_bytes + size for point, size in live.items()}
    points = dict.fromkeys([*compiled, *planned])
    return [{"point": point, "planned_bytes": planned.get(point), "compiled_bytes": compiled.get(point)} for point in points]


def smallest_change(request: Request, cluster: ClusterConfig, report: Report) -> list[str] | None:
    """Return the overrides of the smallest config change that should fit, by the memory model corrected with this compile; else None."""
    from ridgeline.planner.config_changes import fitting_changes

    correction = report.compiled.allocated_bytes - report.estimate.compiled_bytes
    return fitting_changes(request.config, report.compiled.mesh, report.capacity_bytes - correction, request.device)


def report_json(report: Report) -> dict[str, Any]:
    """Return the JSON contract of `ridge compile`."""
    c = report.compiled
    return {
        "argument_bytes": c.argument_bytes,
        "host_argument_bytes": c.host_argument_bytes,
        "output_bytes": c.output_bytes,
        "alias_bytes": c.alias_bytes,
        "temp_bytes": c.temp_bytes,
        "peak_bytes": c.allocated_bytes - c.gap_bytes,
        "gap_bytes": c.gap_bytes,
        "reserve_bytes": report.reserve_bytes,
        "needed_bytes": report.needed_bytes,
        "capacity_bytes": report.capacity_bytes,
        "fits": report.fits,
        "trace_s": c.trace_s,
        "lower_s": c.lower_s,
        "compile_s": c.compile_s,
        "mesh": c.mesh,
        "context_method": report.context_method,
        "expert_exchange": report.expert_exchange,
        "device": report.device.name,
        "versions": c.versions,
        "warnings": list(c.warnings),
        "uncounted_loops": list(report.uncounted_loops),
        "estimated_loops": list(report.estimated_loops),
        "collectives": [compiled_collective(x).model_dump(mode="json") for x in report.collectives],
        "overlapped_share": report.overlapped_share,
        "unplanned": [compiled_collective(x).model_dump(mode="json") for x in report.unplanned],
        "full_precision_gathers": [compiled_collective(x).model_dump(mode="json") for x in report.wide_gathers],
        "memory": [row.model_dump(mode="json") for row in memory_rows(report.estimate, c.argument_bytes, c.temp_bytes)],
        "traffic": [row.model_dump(mode="json") for row in traffic_rows(report.traffic, report.collectives)],
        "largest_buffers": [buffer_json(b) for b in report.buffers[:40]],
        "planned_memory": {
            "compiled_bytes": report.estimate.compiled_bytes,
            "components": {name: part.bytes for name, part in report.estimate.components.items()},
        },
        "roofline": roofline_json(report),
    }


def roofline_json(report: Report) -> dict[str, Any]:
    """Return the roofline time of all kernels, by component and pass, and the longest kernels."""
    parts: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for k in report.kernels:
        row = parts[k.component, k.part]
        row[0] += report.seconds(k)
        row[1] += k.flops * k.count
        row[2] += k.bytes * k.count
    longest = sorted(report.kernels, key=lambda k: -report.seconds(k))[:20]
    simulated = report.schedule
    return {
        "kernels_s": report.kernels_s,
        "step_s": simulated.step_s,
        "compute_s": simulated.compute_s,
        "communication_s": simulated.communication_s,
        "exposed_communication_s": simulated.exposed_s,
        "exposed": [{"kind": kind, "axes": list(axes or ()), "seconds": s} for (kind, axes), s in simulated.exposed.items() if s > 0],
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
                "flops": None if k.unknown_flops else k.flops,
                "bytes": k.bytes,
                "dtype": k.dtype,
                "binds": None if k.unknown_flops else k.bottleneck(*report.rates(k)),
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


def other_overlap(config: Config, devices: int) -> str:
    """Return the value of compute.tensor_overlap that the config does not have. Raises UserError without tensor parallelism."""
    if resolve_sizes(config.mesh, devices)["tensor"] == 1:
        raise UserError(
            "--compare tensor_overlap: mesh.tensor is 1, so there is no tensor-parallel communication; set mesh.tensor=2 or more"
        )
    return "gather" if config.compute.tensor_overlap == "ring" else "ring"


def compare_overlap(reports: Mapping[str, Report]) -> dict[str, Any]:
    """Compare the compiled schedules of both values of compute.tensor_overlap, the config's own first.

    Returns rows (one per value), faster (of those that fit; None when they are equal or none fits), ratio (longer over shorter simulated
    step; None unless both fit), and advice in words.
    """
    rows: list[dict[str, Any]] = [
        {
            "value": value,
            "step_s": report.schedule.step_s,
            "exposed_communication_s": report.schedule.exposed_s,
            "overlapped_share": report.overlapped_share,
            "needed_bytes": report.needed_bytes,
            "fits": report.fits,
        }
        for value, report in reports.items()
    ]
    own, other = rows
    ratio: float | None
    faster: str | None
    fitting = [row for row in rows if row["fits"]]
    if len(fitting) < 2:
        faster, ratio = (fitting[0]["value"], None) if fitting else (None, None)
        advice = f"only {faster} fits: compute.tensor_overlap={faster}" if fitting else "neither fits: change that first"
    else:
        short, long = sorted(rows, key=lambda row: row["step_s"])
        ratio = long["step_s"] / short["step_s"]
        faster = short["value"] if ratio >= 1 + EQUAL else None
        if faster is None:
            advice = f"within {EQUAL:.0%} of each other: keep {own['value']}"
        elif faster == own["value"]:
            advice = f"keep {faster}: with {other['value']} the simulated step takes {ratio:.2f} times as long"
        else:
            advice = f"compute.tensor_overlap={faster} is faster: with {own['value']} the simulated step takes {ratio:.2f} times as long"
    return {"setting": "compute.tensor_overlap", "rows": rows, "faster": faster, "ratio": ratio, "advice": advice}
