"""Inside compute: time, FLOPs, bytes and headroom by part of the model and by kernel.

Times are per step and device (sums over devices and steps, divided by both). FLOPs and bytes are those of the HLO (hlo.roofline): FLOPs of
matmuls and attention, and the bytes that must move to and from memory. The ceiling of a kernel is max(FLOPs / peak, bytes / bandwidth) with
the datasheet figures of the device (planner.hardware). A device without a datasheet has no ceiling.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ridgeline.explain.trace.classify import COMPUTE
from ridgeline.explain.trace.ledger import PS
from ridgeline.explain.trace.program import Programs
from ridgeline.explain.trace.read import Host, Ops
from ridgeline.explain.trace.wire import MISSING
from ridgeline.hlo.module import part_of, scope
from ridgeline.hlo.roofline import Kernel
from ridgeline.planner.hardware import Hardware
from ridgeline.rundir.analysis import Component, Operation

OTHER = "other"
"""Component of work outside every named scope; work of other programs is named after the program."""
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "tfloat32", "f64": "float64"}
"""HLO dtype of the inputs of a matmul -> name in the catalogue (XLA's default precision for float32; see planner.hardware)."""


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
      programs: the HLO saved beside.
      steps: number of steps.
      hardware: datasheet of the devices.
    """
    times: dict[tuple[str, str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    devices = sum(len(found) for found in chosen)
    for host, found in zip(hosts, chosen, strict=True):
        for ops, kinds in found:
            rows = kinds == COMPUTE
            _add(times, host, ops.take(rows))
    per = 1 / (devices * steps)
    merged = _merged(times, programs)
    return sorted((_operation(key, t * per, n * per, programs, hardware) for key, (t, n) in merged.items()), key=lambda o: -o.time_s)


def components(found: Iterable[Operation]) -> list[Component]:
    """Sum up operations by component and pass, longest first."""
    groups: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for operation in found:
        groups[operation.component, operation.phase].append(operation)
    all_s = sum(o.time_s for group in groups.values() for o in group)
    return sorted((_component(key, group, all_s) for key, group in groups.items()), key=lambda c: -c.time_s)


def _add(times: dict[tuple[str, str, str, str], list[float]], host: Host, ops: Ops) -> None:
    """Add durations and counts by (module, op, kernel name where there is no op, scope where there is no HLO)."""
    name = np.where(ops.op == MISSING, ops.name, MISSING)
    columns = np.stack([ops.module, ops.op, name, ops.scope], axis=1)
    if not len(columns):
        return
    distinct, inverse = np.unique(columns, axis=0, return_inverse=True)
    inverse = inverse.ravel()
    spent = np.bincount(inverse, weights=(ops.end - ops.start) * PS)
    count = np.bincount(inverse)
    for (module, op, kernel, path), time_s, runs in zip(distinct.tolist(), spent.tolist(), count.tolist(), strict=True):
        key = tuple("" if index == MISSING else host.strings[index] for index in (module, op, kernel, path))
        entry = times[key[0], key[1], key[2], key[3]]
        entry[0] += time_s
        entry[1] += runs


def _merged(
    times: Mapping[tuple[str, str, str, str], Sequence[float]], programs: Programs
) -> dict[tuple[str, str, str, str], tuple[float, float]]:
    """Drop the scope of the trace where the HLO has its own."""
    merged: dict[tuple[str, str, str, str], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for (module, op, kernel, path), (time_s, runs) in times.items():
        known = (program := programs.find(module)) is not None and op in program.kernels
        key = (module, op, kernel, "" if known else path)
        merged[key] = (merged[key][0] + time_s, merged[key][1] + runs)
    return merged


def _operation(key: tuple[str, str, str, str], time_s: float, runs: float, programs: Programs, hardware: Hardware | None) -> Operation:
    module, op, kernel_name, path = key
    program = programs.find(module)
    kernel = program.kernels.get(op) if program is not None else None
    if kernel is None:
        component, phase = _without_hlo(module, path, programs)
        moves = 0.0 if program is not None and op in program.opcodes else None  # an iota and the like
        least_s = moves if hardware is not None else None
        return Operation(op, module, kernel_name or op, component, phase, time_s, runs, moves, moves, least_s, None, None)
    least = _least(kernel, hardware)
    source = f"{kernel.source.file}:{kernel.source.line}" if kernel.source is not None else None
    return Operation(
        op,
        module,
        kernel_name or op,
        kernel.component,
        kernel.part,
        time_s,
        runs,
        kernel.flops * runs,
        kernel.bytes * runs,
        None if least is None else least[0] * runs,
        None if least is None else least[1],
        source,
        kernel.dtype,
    )


def _without_hlo(module: str, path: str, programs: Programs) -> tuple[str, str]:
    """Return component and pass from the path in the trace; a program whose HLO was not saved is a component of its own."""
    if programs.by_name and module and module not in programs.by_name:
        return module, "update"
    return scope(path) or OTHER, part_of(path)


def peak_flops_of(hardware: Hardware, dtype: str) -> float | None:
    """Return the datasheet peak in FLOP/s for matmuls of an HLO dtype; None when the catalogue has none."""
    name = "float8" if dtype.startswith("f8") else "float4" if dtype.startswith("f4") else DTYPES.get(dtype, "")
    return hardware.peak_flops.get(name) or (hardware.peak_flops.get("float32") if dtype == "f32" else None)


def _least(kernel: Kernel, hardware: Hardware | None) -> tuple[float, str] | None:
    """The least time of one run, and the bottleneck: `compute` or `memory`."""
    if hardware is None:
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
