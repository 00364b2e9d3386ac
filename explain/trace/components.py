"""Inside compute: time, FLOPs, bytes and headroom by part of the model and by kernel.

Times are per step and device (sums over devices and steps, divided by both). FLOPs and bytes are those of the HLO (hlo.roofline), per
execution of an instruction: FLOPs of matmuls, convolutions and attention, and the bytes that must move to and from memory. The ceiling is
max(FLOPs / peak, bytes / bandwidth) with the datasheet figures of the device (planner.hardware). Without a datasheet, or with unknown
FLOPs, there is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.explain.trace.classify import COMPUTE
from ridgeline.explain.trace.executions import executions
from ridgeline.explain.trace.ledger import PS
from ridgeline.explain.trace.program import Programs
from ridgeline.explain.trace.read import Host, Ops, ProgramKey
from ridgeline.hlo.category import kernel_category
from ridgeline.hlo.module import part_of, scope
from ridgeline.hlo.roofline import Kernel
from ridgeline.planner.hardware import Hardware
from ridgeline.rundir.analysis import Component, MatmulShape, Operation

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "tfloat32", "f64": "float64"}
"""HLO dtype of the inputs of a matmul -> name in the catalog (XLA's default precision for float32; see planner.hardware)."""


def operations(
    hosts: Sequence[Host],
    chosen: Sequence[Sequence[tuple[Ops, np.ndarray]]],
    programs: Programs,
    *,
    steps: int,
    hardware: Hardware | None,
) -> list[Operation]:
    """Sum up the compute operations, longest first.

    Args:
      hosts: the traces.
      chosen: per host and device, the operations inside the analyzed steps and their kinds.
      programs: the HLO of the programs.
      steps: number of steps.
      hardware: datasheet of the devices.
    """
    sums: dict[tuple[ProgramKey, str, str, str], _Total] = defaultdict(_Total)
    devices = sum(len(found) for found in chosen)
    for host, found in zip(hosts, chosen, strict=True):
        for ops, kinds in found:
            computing = ops.take(kinds == COMPUTE)
            for each in executions(host, computing, programs):
                program = programs.find(each.key)
                known = program is not None and each.op in program.kernels
                one = sums[each.key, each.op, "" if each.op else each.name, "" if known else each.path]
                one.add(each.name, float((computing.end - computing.start)[each.rows].sum()) * PS, each.count, len(each.rows))
    per = 1 / (devices * steps)
    summed = [_operation(key, one, per, programs, hardware) for key, one in sums.items()]
    return sorted(summed, key=lambda o: -o.time_s)


@dataclass
class _Total:
    """An operation over devices and steps."""

    time_s: float = 0.0
    runs: int = 0
    kernels: int = 0
    name: str = ""
    longest_s: float = 0.0

    def add(self, name: str, time_s: float, runs: int, kernels: int) -> None:
        self.time_s, self.runs, self.kernels = self.time_s + time_s, self.runs + runs, self.kernels + kernels
        if time_s > self.longest_s:
            self.longest_s, self.name = time_s, name


def components(found: Iterable[Operation]) -> list[Component]:
    """Sum up operations by component and pass, longest first."""
    groups: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for operation in found:
        groups[operation.component, operation.phase].append(operation)
    all_s = sum(o.time_s for group in groups.values() for o in group)
    return sorted((_component(key, group, all_s) for key, group in groups.items()), key=lambda c: -c.time_s)


def matmuls(found: Iterable[Operation], hardware: Hardware | None) -> list[MatmulShape]:
    """Sum up the operations with one matmul by its shape and dtype, longest first."""
    groups: dict[tuple[str, tuple[int, ...]], list[Operation]] = defaultdict(list)
    for operation in found:
        if operation.matmul is not None and operation.flops:
            groups[operation.dtype, operation.matmul].append(operation)
    shapes = []
    for (dtype, (batch, m, n, k)), group in groups.items():
        time_s, flops = sum(o.time_s for o in group), sum(o.flops or 0.0 for o in group)
        peak = None if hardware is None else peak_flops_of(hardware, dtype)
        ceiling_s = _sum(o.ceiling_s for o in group)
        rate = flops / time_s if time_s else None
        shapes.append(
            MatmulShape(
                dtype=dtype,
                batch=batch,
                m=m,
                n=n,
                k=k,
                runs=sum(o.runs for o in group),
                time_s=time_s,
                flops_per_s=rate,
                of_peak=rate / peak if rate is not None and peak else None,
                attained=ceiling_s / time_s if ceiling_s is not None and time_s else None,
                bound=group[0].bound,
                operations=tuple(sorted({o.op for o in group})),
            )
        )
    return sorted(shapes, key=lambda shape: -shape.time_s)


def _operation(
    key: tuple[ProgramKey, str, str, str], found: _Total, per: float, programs: Programs, hardware: Hardware | None
) -> Operation:
    program_key, op, _, path = key
    program = programs.find(program_key)
    kernel = program.kernels.get(op) if program is not None else None
    runs = found.runs * per
    common: dict[str, Any] = {
        "op": op,
        "module": programs.label(program_key),
        "kernel_name": found.name,
        "time_s": found.time_s * per,
        "runs": runs,
        "kernels": found.kernels * per,
        "program_id": program_key.program_id,
    }
    if kernel is None:
        kind = kernel_category(f"{found.name} {op}")
        moves = 0.0 if program is not None and op in program.opcodes else None  # an iota and the like
        return Operation(
            **common,
            component=scope(path) or kind,
            phase=part_of(path),
            flops=moves,
            bytes=moves,
            ceiling_s=moves if hardware is not None else None,
            bound=None,
            source=None,
            category=kind,
        )
    least = _least(kernel, hardware)
    return Operation(
        **common,
        component=kernel.component,
        phase=kernel.part,
        flops=None if kernel.unknown_flops else kernel.flops * runs,
        bytes=kernel.bytes * runs,
        ceiling_s=None if least is None else least[0] * runs,
        bound=None if least is None else least[1],
        source=f"{kernel.source.file}:{kernel.source.line}" if kernel.source is not None else None,
        dtype=kernel.dtype,
        category=kernel.category,
        matmul=None if kernel.matmul is None else (kernel.matmul.batch, kernel.matmul.m, kernel.matmul.n, kernel.matmul.k),
    )


def peak_flops_of(hardware: Hardware, dtype: str) -> float | None:
    """Return the datasheet peak in FLOP/s for matmuls of an HLO dtype; None when the catalog has none."""
    name = "float8" if dtype.startswith("f8") else "float4" if dtype.startswith("f4") else DTYPES.get(dtype, "")
    return hardware.peak_flops.get(name) or (hardware.peak_flops.get("float32") if dtype == "f32" else None)


def _least(kernel: Kernel, hardware: Hardware | None) -> tuple[float, str] | None:
    """The least time of one run, and the bottleneck: `compute` or `memory`. None where the FLOPs or the peak are unknown."""
    if hardware is None or kernel.unknown_flops:
        return None
    memory_s = kernel.bytes / hardware.memory_bandwidth_bytes_per_s
    if not kernel.flops:
        return memory_s, "memory"
    peak = peak_flops_of(hardware, kernel.dtype)
    if peak is None:
        return None
    return max((memory_s, "memory"), (kernel.flops / peak, "compute"))


def _component(key: tuple[str, str], group: Sequence[Operation], all_s: float) -> Component:
    time_s = sum(o.time_s for o in group)
    flops, size, ceiling_s = (_sum(getattr(o, name) for o in group) for name in ("flops", "bytes", "ceiling_s"))
    return Component(
        component=key[0],
        phase=key[1],
        time_s=time_s,
        share=time_s / all_s if all_s else 0.0,
        runs=sum(o.runs for o in group),
        flops=flops,
        bytes=size,
        flops_per_s=flops / time_s if flops is not None and time_s else None,
        bytes_per_s=size / time_s if size is not None and time_s else None,
        ceiling_s=ceiling_s,
        attained=ceiling_s / time_s if ceiling_s is not None and time_s else None,
        headroom_s=time_s - ceiling_s if ceiling_s is not None else None,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum; None when a part is unknown."""
    found = list(values)
    return None if any(v is None for v in found) else float(sum(v for v in found if v is not None))
