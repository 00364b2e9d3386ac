"""Compute the analysis of a loaded capture: where the time of its steps went, on every device and host. Reads and writes no file.

All figures are of the same windows: the whole steps less warm-up. Means are over the devices that compute. Besides, each device has its
idle time over two spans of the capture: from its own first to its own last operation, and from the first to the last of its host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median, median_high
from typing import Any, Literal, TypeVar

import numpy as np

from ridgeline.configs.format import format_seconds
from ridgeline.explain.trace import intervals
from ridgeline.explain.trace.allocators import allocator_memory, by_allocator
from ridgeline.explain.trace.classify import NOTHING, kinds
from ridgeline.explain.trace.communication import Communication, Member, communication
from ridgeline.explain.trace.components import components, matmuls, operations
from ridgeline.explain.trace.host import causes, host_activity
from ridgeline.explain.trace.ledger import CAUSES, PS, Activity, activity, step_ledgers
from ridgeline.explain.trace.load import HostProfile, Profile
from ridgeline.explain.trace.memory import memory
from ridgeline.explain.trace.read import Device, Ops
from ridgeline.explain.trace.steps import (
    MAIN,
    Markers,
    Windows,
    assign,
    assign_executions,
    choose,
    find_markers,
    main_program,
    match,
    step_annotations,
    whole_span,
)
from ridgeline.explain.trace.wire import MISSING
from ridgeline.planner.communication import mesh_bus_bandwidth
from ridgeline.planner.hardware import hardware_names
from ridgeline.rundir.analysis import Analysis, Collective, HostActivity, MessageSize, Operation
from ridgeline.rundir.analysis_times import PARTS, Assignment, DeviceStep, DeviceTotal, OddStep, Range, Statistics, Step, StepTimes
from ridgeline.rundir.noise import percentile

PARTIAL = 0.5
"""A step with less than this share of the usual operations is incomplete, and left out."""
WARM_UP = 2.0
"""A leading step is warm-up when it takes more than this many times the median of the steps after it."""
OUTLIER = 1.5
"""A step is named when it takes more than this many times the median."""
TIMES = ("total_s", "compute_s", "communication_s", "exposed_communication_s", "exposed_copy_s", "idle_s")
"""Times of a step that have statistics over the steps and a range over the devices."""


@dataclass(frozen=True)
class _DeviceWork:
    """The operations of one device, classified and assigned to steps."""

    host: int
    """Index of its host."""
    device: Device
    label: str
    kinds: np.ndarray
    active: Activity
    windows: Windows
    whole: np.ndarray
    """bool [S]: steps that the trace contains completely."""

    def in_whole_steps(self) -> tuple[Ops, np.ndarray, np.ndarray]:
        """Return the operations of whole steps that are work, their kinds, and the index of their step."""
        of_op = self.windows.of_op
        rows = np.flatnonzero((of_op >= 0) & self.whole[np.maximum(of_op, 0)] & (self.kinds != NOTHING))
        return self.device.ops.take(rows), self.kinds[rows], of_op[rows]


def analyze(profile: Profile, *, annotation: str | None = None, warm_up: int | None = None) -> Analysis:
    """Analyze a capture.

    Args:
      profile: from load_profile.
      annotation: name of the annotations that are the steps; None: those that launch the main program.
      warm_up: number of leading steps to leave out; None: those that take more than WARM_UP times the median of the steps after them.

    Raises:
      UserError: there is no such annotation.
    """
    devices, idle_devices = _computing(_classified(profile))
    steps = _marked(profile, devices, annotation)
    work, partial = _leave_out_partial(steps)
    work, warm = _leave_out_warm_up(work, steps, warm_up)
    found = [causes(each, steps.markers[i]) for i, each in enumerate(profile.hosts)]
    ledgers = [
        (int(key), int(step), ledger)
        for w in work
        for key, step, ledger, whole in zip(
            w.windows.key, w.windows.step, step_ledgers(w.label, w.windows, w.active, found[w.host]), w.whole, strict=True
        )
        if whole
    ]
    by_step, by_device = _by_step(ledgers), _by_device(ledgers, work, profile)
    longest, collectives = _inside(profile, work, len(by_step), percentile(sorted(step.total_s for step in by_step), 0.5))
    return Analysis(
        profile=str(profile.capture.directory),
        device_kind=profile.device_kind,
        hardware=profile.hardware.name if profile.hardware is not None and profile.hardware.name in hardware_names() else None,
        step_assignment=[Assignment(*pair) for pair in sorted({(w.windows.method, w.windows.covered) for w in work})],
        unprofiled_step_time_s=profile.capture.record.unprofiled_step_time_s,
        devices=by_device,
        steps=by_step,
        summary={key: statistics([getattr(step, key) for step in by_step]) for key in TIMES},
        spread={key: _range([getattr(device, key) for device in by_device]) for key in TIMES},
        components=components(longest),
        operations=longest,
        matmuls=matmuls(longest, profile.hardware),
        message_sizes=[_with_plan(each, each.size_bytes, profile) for each in collectives.sizes],
        collectives=[_with_plan(each, (each.bytes or 0.0) / max(each.count, 1e-9), profile) for each in collectives.traffic],
        memory=memory(profile.programs),
        allocators=[
            allocator_memory(each.host.name, name, events, each.host.strings)
            for each in profile.hosts
            for name, events in by_allocator(each.host.memory_events, each.host.strings)
        ],
        stragglers=collectives.stragglers,
        clock_offsets_s=collectives.clock_offsets_s,
        hosts=[
            _host(each, steps.markers[i], found[i], mine, by_device)
            for i, each in enumerate(profile.hosts)
            if (mine := [w for w in work if w.host == i])
        ],
        notes=[
            *(note for each in profile.hosts for note in each.host.notes),
            *steps.notes,
            *idle_devices,
            *(f"{odd.name} {odd.why} and left out" for odd in [*partial, *warm]),
            *_missing(profile),
            *collectives.notes,
        ],
        unit=steps.unit,
        marker=steps.marker,
        annotations=steps.annotations,
        main_program=steps.main,
        left_out=[*partial, *warm],
        device_facts=profile.facts,
        outliers=_outliers(by_step, steps),
    )


def _classified(profile: Profile) -> list[_DeviceWork]:
    """Classify the operations of every device that has any."""
    work = []
    for index, host in enumerate(each.host for each in profile.hosts):
        for device in host.devices:
            if len(device.ops):
                found, windows = kinds(device.ops, host, profile.programs), whole_span(device.ops)
                work.append(_DeviceWork(index, device, host.label(device), found, activity(device.ops, found), windows, np.ones(1, bool)))
    return work


def _computing(work: Sequence[_DeviceWork]) -> tuple[Sequence[_DeviceWork], list[str]]:
    """Leave out the devices that compute nothing, unless none computes; return the others, and a note for each that is left out."""
    idle = [w for w in work if not len(w.active.compute)]
    if len(idle) == len(work):
        return work, []
    notes = [f"{w.label} only copies or communicates ({format_seconds(intervals.total(w.active.busy) * PS)}) and is left out" for w in idle]
    return [w for w in work if len(w.active.compute)], notes


@dataclass(frozen=True)
class _Steps:
    """The work in steps, and what marks them."""

    work: Sequence[_DeviceWork]
    unit: Literal["step", "execution", "capture"]
    markers: Sequence[Markers | None]
    """Of each host."""
    marker: str | None
    annotations: Mapping[str, float]
    main: str | None
    notes: Sequence[str]

    def name(self, step: int | None, window: int) -> str:
        """Name a step by its number, and by its position where the number repeats."""
        if step is None:
            return f"{self.unit} {window}"
        repeats = (self.work[0].windows.step == step).sum() > 1
        return f"step {step}" + (f" (number {window + 1} of the capture)" if repeats else "")


def _marked(profile: Profile, work: Sequence[_DeviceWork], annotation: str | None) -> _Steps:
    """Assign the work to steps."""
    hosts = [each.host for each in profile.hosts]
    devices = [(hosts[w.host], w.device, w.kinds) for w in work]
    found = main_program(devices)
    main = None if found is None else found[0]
    names = step_annotations(devices, main)
    name = choose(names, annotation)
    program, notes = None if main is None else main.module or f"program {main.program_id}", []
    markers = [None if name is None else find_markers(host, name) for host in hosts]
    bare = sorted({hosts[w.host].name for w in work if markers[w.host] is None})
    if name is not None and not bare:
        windows = [assign(hosts[w.host], w.device, mine, main) for w in work if (mine := markers[w.host]) is not None]
        if len(names) > 1:
            others = ", ".join(f"'{other}' {share:.0%}" for other, share in names.items() if other != name)
            notes.append(f"steps are the annotations '{name}', which launch {names[name]:.0%} of the time of {program}; others: {others}")
        return _Steps(_in_windows(work, windows), "step", markers, name, names, program, notes)
    if name is not None:
        notes.append(f"{', '.join(bare)} has no annotation '{name}'")
    unmarked: list[Markers | None] = [None] * len(hosts)
    executions = [] if found is None or found[1] < MAIN else [assign_executions(hosts[w.host], w.device, found[0]) for w in work]
    if found is not None and executions and all(each is not None for each in executions):
        notes.append(f"no step annotations: the executions of {program} are the steps, which has {found[1]:.0%} of the device time")
        return _Steps(_in_windows(work, [e for e in executions if e is not None]), "execution", unmarked, program, names, program, notes)
    notes.append(f"no step annotations and no program with {MAIN:.0%} of the device time: figures are of the whole capture, not of steps")
    return _Steps(work, "capture", unmarked, None, names, program, notes)


def _in_windows(work: Sequence[_DeviceWork], windows: Sequence[Windows]) -> list[_DeviceWork]:
    return [replace(w, windows=mine, whole=np.ones(len(mine.step), bool)) for w, mine in zip(work, match(windows), strict=True)]


def _leave_out_partial(steps: _Steps) -> tuple[Sequence[_DeviceWork], list[OddStep]]:
    """Mark the steps that the trace contains only in part on any device; return the work, and these steps."""
    work = steps.work
    cut: set[int] = set()
    common = set.intersection(*(set(w.windows.key.tolist()) for w in work))
    for w in work:
        count = np.bincount(w.windows.of_op[w.windows.of_op >= 0], minlength=len(w.windows.step))
        cut |= set(w.windows.key[count < PARTIAL * np.median(count)].tolist())
        cut |= set(w.windows.key.tolist()) - common
    if len(cut & common) >= len(common):
        return work, []
    return _without(work, cut), _odd(work, steps, sorted(cut), "is only partly in the trace")


def _leave_out_warm_up(work: Sequence[_DeviceWork], steps: _Steps, count: int | None) -> tuple[Sequence[_DeviceWork], list[OddStep]]:
    """Mark the leading steps that are warm-up; return the work, and these steps."""
    totals = _totals(work)
    keys, times = list(totals), list(totals.values())
    if count is None:
        count = 0
        while count < max(1, len(times) // 4) and len(times) - count > 2 and times[count] > WARM_UP * median_high(times[count + 1 :]):
            count += 1
    warm = keys[: min(count, len(keys) - 1)]
    return (_without(work, set(warm)), _odd(work, steps, warm, "is warm-up")) if warm else (work, [])


def _totals(work: Sequence[_DeviceWork]) -> dict[int, float]:
    """Return key -> time of the whole steps, mean over the devices, in order of time."""
    times: dict[int, list[float]] = {}
    for w in work:
        for key, length in zip(w.windows.key[w.whole].tolist(), (w.windows.end - w.windows.start)[w.whole].tolist(), strict=True):
            times.setdefault(key, []).append(length * PS)
    return {key: float(np.mean(times[key])) for key in sorted(times)}


def _without(work: Sequence[_DeviceWork], keys: set[int]) -> list[_DeviceWork]:
    return [replace(w, whole=w.whole & ~np.isin(w.windows.key, sorted(keys))) for w in work]


def _odd(work: Sequence[_DeviceWork], steps: _Steps, keys: Sequence[int], why: str) -> list[OddStep]:
    totals = _totals(work)
    rest = median([total_s for key, total_s in totals.items() if key not in keys])
    numbers = {key: step for w in work for key, step in zip(w.windows.key.tolist(), w.windows.step.tolist(), strict=True)}
    return [
        OddStep(
            steps.name(_number(numbers[key]), key),
            _number(numbers[key]),
            key,
            totals.get(key, 0.0),
            totals.get(key, 0.0) / rest if rest else 0.0,
            why,
        )
        for key in keys
    ]


def _outliers(found: Sequence[Step], steps: _Steps) -> list[OddStep]:
    """Return the steps that took more than OUTLIER times the median, longest first, with the part that grew most."""
    usual_s = median([step.total_s for step in found])
    outliers = []
    for step in sorted((step for step in found if step.total_s > OUTLIER * usual_s), key=lambda step: -step.total_s):
        grown = {part: getattr(step, part) - median([getattr(each, part) for each in found]) for part in PARTS}
        part = max(grown, key=lambda name: grown[name])
        why = f"{part.removesuffix('_s').replace('_', ' ')} is {format_seconds(grown[part])} above its median"
        if part == "idle_s":
            why += f" (host: {max(step.idle_by_cause, key=lambda cause: step.idle_by_cause[cause]).replace('_', ' ')})"
        times = step.total_s / usual_s if usual_s else 0.0
        outliers.append(OddStep(steps.name(step.step, step.window), step.step, step.window, step.total_s, times, why))
    return outliers


def _number(step: int) -> int | None:
    return None if step == MISSING else step


def _inside(profile: Profile, work: Sequence[_DeviceWork], steps: int, step_s: float) -> tuple[list[Operation], Communication]:
    """Return the compute operations, longest first, and the collectives of the whole steps."""
    hosts = [each.host for each in profile.hosts]
    inside = [w.in_whole_steps() for w in work]
    chosen = [[part[:2] for w, part in zip(work, inside, strict=True) if w.host == i] for i in range(len(hosts))]
    members = [
        Member(w.host, w.label, ops, found, w.windows.key[of_op], w.active) for w, (ops, found, of_op) in zip(work, inside, strict=True)
    ]
    longest = operations(hosts, chosen, profile.programs, steps=steps, hardware=profile.hardware)
    return longest, communication(hosts, members, profile.programs, steps=steps, step_s=step_s)


def _missing(profile: Profile) -> list[str]:
    """Notes on evidence that is missing."""
    notes = list(profile.programs.notes)
    if not profile.programs.by_key:
        notes.append("no HLO beside the profile or in it: no FLOPs, bytes or axes; opcodes are guessed from names")
    if profile.hardware is None:
        notes.append(f"no datasheet for {profile.device_kind or 'these devices'}: no ceilings")
    elif not profile.hardware.peak_flops:
        bandwidth = profile.hardware.memory_bandwidth_bytes_per_s / 1e9
        notes.append(f"no datasheet for {profile.hardware.name}: ceilings use the memory bandwidth in the trace ({bandwidth:,.0f} GB/s)")
    return notes


def _host(
    each: HostProfile, markers: Markers | None, found: Mapping[str, np.ndarray], mine: Sequence[_DeviceWork], devices: Sequence[DeviceTotal]
) -> HostActivity:
    start = min(int(w.windows.start[w.whole].min()) for w in mine)
    end = max(int(w.windows.end[w.whole].max()) for w in mine)
    busy = [intervals.clip(w.active.busy, start, end) for w in mine]
    activity = host_activity(each, markers, found, busy, (start, end), int(mine[0].whole.sum()))
    labels = [device.device for device in devices if device.device.rpartition("/")[0] == activity.host]
    return replace(activity, process=each.host.process, devices=labels)


_Sized = TypeVar("_Sized", Collective, MessageSize)


def _with_plan(collective: _Sized, size_bytes: float, profile: Profile) -> _Sized:
    """Add the bus bandwidth that the planner expects for the size of one execution, where cluster, mesh and size are known."""
    if profile.fabric is None or profile.mesh is None or not (collective.axes and size_bytes):
        return collective
    planned = mesh_bus_bandwidth(collective.kind, size_bytes, profile.fabric, profile.mesh, collective.axes)
    return replace(collective, planned_bus_bandwidth=planned)


def _by_device(ledgers: Sequence[tuple[int, int, DeviceStep]], work: Sequence[_DeviceWork], profile: Profile) -> list[DeviceTotal]:
    """Sums over the steps, in the order of the mesh's flat device list; and the idle time over the capture."""
    found = []
    for w in work:
        ops = [device.ops for device in profile.hosts[w.host].host.devices if len(device.ops)]
        span_ps = int(w.device.ops.end.max() - w.device.ops.start.min())
        capture_ps = max(int(each.end.max()) for each in ops) - min(int(each.start.min()) for each in ops)
        busy_ps = intervals.total(w.active.busy)
        mine = [times for _, _, times in ledgers if times.device == w.label]
        found.append(
            DeviceTotal(
                **_sums(mine),
                device=w.label,
                steps=len(mine),
                assignment=w.windows.method,
                span_s=span_ps * PS,
                span_idle_s=(span_ps - busy_ps) * PS,
                capture_s=capture_ps * PS,
                capture_idle_s=(capture_ps - busy_ps) * PS,
            )
        )
    return found


def _by_step(ledgers: Sequence[tuple[int, int, DeviceStep]]) -> list[Step]:
    """Means over the devices, in order of time."""
    by_key: dict[int, list[tuple[int, DeviceStep]]] = {}
    for key, step, times in ledgers:
        by_key.setdefault(key, []).append((step, times))
    found = []
    for key in sorted(by_key):
        mine = [times for _, times in by_key[key]]
        found.append(Step(**_sums(mine, 1 / len(mine)), step=_number(by_key[key][0][0]), devices=mine, window=key))
    return found


_SUMMED = tuple(field.name for field in fields(StepTimes) if field.name != "idle_by_cause")


def _sums(times: Sequence[StepTimes], scale: float = 1.0) -> dict[str, Any]:
    sums: dict[str, Any] = {key: scale * sum(getattr(each, key) for each in times) for key in _SUMMED}
    return sums | {"idle_by_cause": {cause: scale * sum(each.idle_by_cause[cause] for each in times) for cause in CAUSES}}


def statistics(values: Sequence[float]) -> Statistics:
    """Return mean, median, 95th percentile, minimum and maximum."""
    ordered = sorted(values)
    return Statistics(float(np.mean(ordered)), percentile(ordered, 0.5), percentile(ordered, 0.95), ordered[0], ordered[-1])


def _range(values: Sequence[float]) -> Range:
    return Range(min(values), max(values))
