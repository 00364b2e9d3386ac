"""analysis.json: the typed result of `ridge analyze`, and how it is read and written.

Times are in seconds. Those of components, operations, collectives and stragglers are per step and device. Unknown figures are None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from ridgeline.configs.errors import UserError
from ridgeline.configs.files import read_limited
from ridgeline.configs.format import format_seconds
from ridgeline.rundir.analysis_memory import AllocatorMemory, ProgramMemory
from ridgeline.rundir.analysis_times import Assignment, DeviceTotal, OddStep, Range, Statistics, Step
from ridgeline.rundir.files import first_problem, write_atomically
from ridgeline.rundir.jsonl import dump_json
from ridgeline.rundir.recompilation import Change, Recompilation


@dataclass(frozen=True)
class Component:
    """The compute of one part of the model in one pass."""

    component: str
    """Part of the model by its named scope; its category outside of all."""
    phase: str
    """One of hlo.module.PASSES."""
    time_s: float
    share: float
    """Of all compute."""
    runs: float
    flops: float | None
    bytes: float | None
    flops_per_s: float | None
    bytes_per_s: float | None
    ceiling_s: float | None
    """The least time by the roofline; None without FLOPs and bytes, or for a device that is not in the catalog."""
    attained: float | None
    """`ceiling_s` over `time_s`: 1 is as fast as the device allows."""
    headroom_s: float | None
    """Time above the ceiling."""


@dataclass(frozen=True)
class Operation:
    """One HLO instruction (a kernel where there is no instruction), over all devices and steps."""

    op: str
    module: str
    kernel_name: str
    """Name in the trace of its kernel, the longest of several."""
    component: str
    """Part of the model by its named scope; its category outside of all."""
    phase: str
    """One of hlo.module.PASSES."""
    time_s: float
    runs: float
    """Executions."""
    flops: float | None
    """Of matmuls, convolutions and attention; None where they are unknown: no HLO, or a custom kernel that does not state them."""
    bytes: float | None
    ceiling_s: float | None
    """See Component."""
    bound: str | None
    """`compute` or `memory`."""
    source: str | None
    """`file:line`."""
    dtype: str = ""
    """Of the inputs of its matmuls, in HLO's notation."""
    category: str = "other"
    """matmul, attention, convolution, norm, reduction, copy, ... (hlo.category.CATEGORIES)."""
    kernels: float = 0.0
    """Kernels launched; an execution may launch several."""
    matmul: tuple[int, int, int, int] | None = None
    """Batch, m, n and k, where it is one matmul."""
    program_id: int | None = None
    """Of its program in the trace (several programs may have the same name); None where the trace has none."""

    @property
    def attained(self) -> float | None:
        """`ceiling_s` over `time_s`; None where there is no ceiling."""
        return self.ceiling_s / self.time_s if self.ceiling_s is not None and self.time_s else None


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind over the same mesh axes in the same part of the model."""

    kind: str
    axes: tuple[str, ...] | None
    """Mesh axes; None: unknown, or not a product of mesh axes."""
    layer: str
    """The named scope they come from: attention, mlp, ...; `other` outside all."""
    phase: str
    """One of hlo.module.PASSES."""
    count: float
    """Runs per step and device."""
    bytes: float | None
    """Size of the unsharded tensors; None where the HLO was not saved."""
    time_s: float
    exposed_s: float
    """While no compute runs."""
    wait_s: float | None
    """Waiting for the last member; None where members cannot be matched."""
    wire_s: float | None
    """Transferring data: `time_s` less `wait_s`."""
    group_size: int | None
    algorithm_bandwidth: float | None
    """bytes/s."""
    bus_bandwidth: float | None
    """bytes/s (nccl-tests, doc/PERFORMANCE.md)."""
    instructions: tuple[str, ...]
    planned_bus_bandwidth: float | None = None
    """bytes/s, as the planner expects on the cluster of the run."""

    @property
    def wait_share(self) -> float:
        """Share of its time spent waiting for the last member; 0 where that is unknown."""
        return (self.wait_s or 0.0) / self.time_s if self.time_s else 0.0


@dataclass(frozen=True, kw_only=True)
class MatmulShape:
    """All matmuls of one shape: `batch` matmuls of [m, k] and [k, n]."""

    dtype: str
    batch: int
    m: int
    n: int
    k: int
    runs: float
    time_s: float
    flops_per_s: float | None
    of_peak: float | None
    """`flops_per_s` over the datasheet's peak."""
    attained: float | None
    """Share of the ceiling by the roofline; lower peaks apply where memory is the bottleneck."""
    bound: str | None
    """`compute` or `memory`."""
    operations: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MessageSize:
    """All collectives of one kind, group and size."""

    kind: str
    axes: tuple[str, ...] | None
    group_size: int | None
    size_bytes: float
    """Of the unsharded tensor of one execution."""
    count: float
    time_s: float
    """Of one execution: the mean, without waiting where that is known."""
    algorithm_bandwidth: float | None
    """bytes/s."""
    bus_bandwidth: float | None
    """bytes/s."""
    planned_bus_bandwidth: float | None = None
    """bytes/s, as the planner expects on the cluster of the run."""


@dataclass(frozen=True)
class Straggler:
    """A device that the other devices wait for."""

    host: str
    device: str
    late_s: float
    """How much later than the median member it reached collectives, summed over a step."""
    last_share: float
    """Share of its collectives that it reached last."""
    cost_s: float
    """Time the other devices waited for it, per other device: the median step."""


@dataclass(frozen=True)
class Sync:
    """Waits of the host for the device, at one place in the program, that left the device without work.

    The device works during the wait, finishes before the wait ends, and is idle until the host launches again. Without the wait the host
    would have launched earlier by as much as it waited for that work. That much of the idle time is due to the wait; the rest is due to
    the work of the host afterwards. Reading a result that is already there is not a wait.
    """

    what: str
    """The call that waits."""
    source: str
    """`file:line` of the innermost frame outside libraries, from the trace or from samples; else the enclosing annotation or `?`."""
    count: int
    wait_s: float
    idle_after_s: float
    """Time the device was idle because of the waits."""


@dataclass(frozen=True)
class IdleSource:
    """A place in the program where the main thread was while no device of its host had work."""

    source: str
    """`file:line function`: frames of the trace have the first line of the function, samples the line itself."""
    cause: str
    """What the host was doing there most of the time (explain.trace.ledger.CAUSES)."""
    idle_s: float
    count: int
    """Number of idle stretches."""


@dataclass(frozen=True)
class Compilation:
    """A program that was compiled while steps ran."""

    program: str
    """Name of the function; the compiler's event where the trace does not show the function."""
    count: int
    duration_s: float
    step: int | None = None
    """Number of the first step with one; None where it is unknown."""
    arguments: tuple[Change, ...] = ()
    """What differs from the compilation before, where that is known."""
    source: str | None = None
    captured: bool = True
    """During the analyzed time."""
    traced: bool = False
    """Known from the trace only, which does not show the arguments."""

    def describe(self) -> str:
        """Describe it in one line."""
        if self.traced or self.step is None:
            at = "" if self.step is None else f"step {self.step}: "
            where = "" if self.source is None else f" at {self.source}"
            times = "" if self.count == 1 else f" {self.count} times"
            return f"{at}{self.program} was compiled{times}{where} in {format_seconds(self.duration_s)}"
        return Recompilation(self.program, self.step, self.duration_s, self.arguments, self.source).describe()


@dataclass(frozen=True)
class HostActivity:
    """What one host did during the analyzed time."""

    host: str
    span_s: float
    launches: int
    """Kernels and copies on a GPU host; program calls on the CPU backend."""
    launches_per_s: float
    queue_depth_mean: float | None
    """Operations launched and not yet begun, mean over time; None when launches cannot be matched with operations."""
    launch_to_start_s: float | None
    """Mean time from the launch of an operation to its start."""
    gaps: int
    """Stretches of more than 20 us without work on the device, mean over devices."""
    longest_gap_s: float
    longest_gap_cause: str
    syncs: Sequence[Sync] = ()
    compilations: Sequence[Compilation] = ()
    """From the trace, and from the event log anywhere in the run with the arguments that changed."""
    waits_s: float = 0.0
    """All waits of the host for a working device, harmless ones included."""
    process: int = 0
    devices: Sequence[str] = ()
    idle_sources: Sequence[IdleSource] = ()
    """Where the main thread was while all devices were idle, longest first; none where the capture has no Python frames."""


@dataclass(frozen=True)
class DeviceFacts:
    """What the profiler recorded of the devices."""

    vendor: str | None = None
    model: str | None = None
    """`NVIDIA H100 80GB HBM3`; of AMD devices the target, `gfx942`."""
    cores: int | None = None
    clock_hz: float | None = None
    memory_bytes: int | None = None
    memory_bandwidth_bytes_per_s: float | None = None
    compute_capability: str | None = None
    """`9.0`"""
    peak_flops: float | None = None
    """FLOP/s of bfloat16 matmuls; recorded of TPUs."""


@dataclass(frozen=True)
class Analysis:
    """The content of analysis.json, and of `ridge analyze --json`."""

    profile: str
    """Directory of the capture."""
    device_kind: str | None
    hardware: str | None
    """Name in the planner's catalog; None: unknown device, no ceilings."""
    step_assignment: Sequence[Assignment]
    unprofiled_step_time_s: float | None
    """Usual step time of the run without the profiler."""
    devices: Sequence[DeviceTotal]
    steps: Sequence[Step]
    """Whole steps only."""
    summary: Mapping[str, Statistics]
    """Time of a step -> statistics over the steps."""
    spread: Mapping[str, Range]
    """Time of a step -> lowest and highest sum of a device."""
    components: Sequence[Component]
    """Longest first."""
    operations: Sequence[Operation]
    """Compute only, longest first."""
    collectives: Sequence[Collective]
    """Longest first."""
    stragglers: Sequence[Straggler]
    clock_offsets_s: Mapping[str, float]
    """Host -> how far its clock is ahead of that of the first host, where collectives show it."""
    hosts: Sequence[HostActivity]
    matmuls: Sequence[MatmulShape] = ()
    """Longest first."""
    message_sizes: Sequence[MessageSize] = ()
    """By kind, group and size."""
    memory: Sequence[ProgramMemory] = ()
    """Of the programs that ran, by peak; empty where the profile has no buffer assignments."""
    allocators: Sequence[AllocatorMemory] = ()
    """By host and allocator; empty where the trace has no events of allocators (XLA's CPU backend)."""
    notes: Sequence[str] = field(default_factory=list)
    """What a reader should know: steps left out, missing evidence."""
    unit: Literal["step", "execution", "capture"] = "step"
    """What `steps` are: annotated steps; without annotations executions of the main program; else the capture as a whole."""
    marker: str | None = None
    """Name of the annotation or of the program that makes the steps."""
    annotations: Mapping[str, float] = field(default_factory=dict)
    """Step annotation in the trace -> share of the main program's time that it launches."""
    main_program: str | None = None
    """The program with the most device time."""
    left_out: Sequence[OddStep] = ()
    """Steps in no figure: warm-up, and those that the trace contains only in part."""
    device_facts: DeviceFacts | None = None
    """None: the trace has none."""
    outliers: Sequence[OddStep] = ()
    """Steps that took much longer than the median. They are in all figures."""

    @property
    def per(self) -> str:
        """What figures "per step" are per: `step`, `execution of jit_f`, `capture`."""
        return f"execution of {self.marker}" if self.unit == "execution" else self.unit


def to_json(analysis: Analysis, *, top: int = 20) -> dict[str, Any]:
    """Return the analysis as plain values, with the `top` longest operations."""
    return dataclasses.asdict(dataclasses.replace(analysis, operations=list(analysis.operations[:top])))


def write_analysis(file: Path, analysis: Analysis, *, top: int) -> None:
    """Write the file atomically, because others read it while the run goes on; with the `top` longest operations. Raises OSError."""
    write_atomically(file, (dump_json(to_json(analysis, top=top)) + "\n").encode())


def read_analysis(file: Path) -> Analysis:
    """Read the file.

    Raises:
      UserError: it cannot be read, is not JSON, or a key is missing or has another type. The message is one line.
    """
    try:
        return _adapter().validate_json(read_limited(file))
    except ValidationError as error:
        raise UserError(f"{file} is damaged: {first_problem(error)}; run `ridge analyze --save` again") from None


@cache
def _adapter() -> TypeAdapter[Analysis]:
    return TypeAdapter(Analysis)
