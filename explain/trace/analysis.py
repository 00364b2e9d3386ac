"""Compute the analysis of a loaded capture: where the time of its steps went, on every device and host. Reads and writes no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ridgeline.explain.trace import intervals
from ridgeline.explain.trace.classify import NOTHING, kinds
from ridgeline.explain.trace.communication import Communication, Member, communication
from ridgeline.explain.trace.components import components, operations
from ridgeline.explain.trace.host import causes, host_activity
from ridgeline.explain.trace.ledger import CAUSES, Activity, activity, step_ledgers
from ridgeline.explain.trace.load import HostProfile, Profile
from ridgeline.explain.trace.read import Device, Ops
from ridgeline.explain.trace.steps import Markers, Windows, assign, find_markers
from ridgeline.planner.communication import mesh_bus_bandwidth
from ridgeline.rundir.analysis import (
    Analysis,
    Assignment,
    Collective,
    DeviceStep,
    DeviceTotal,
    HostActivity,
    Operation,
    Range,
    Statistics,
    Step,
    StepTimes,
)
from ridgeline.rundir.noise import percentile

PARTIAL = 0.5
"""A step with less than this share of the usual operations is incomplete, and left out."""
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


def analyze(profile: Profile) -> Analysis:
    """Analyze a capture. `profile`: from load_profile."""
    markers = [find_markers(each.host) for each in profile.hosts]
    work, notes = _leave_out_partial(_work(profile, markers))
    found = [causes(each, markers[i]) for i, each in enumerate(profile.hosts)]
    ledgers = [
        ledger
        for w in work
        for ledger, whole in zip(step_ledgers(w.label, w.windows, w.active, found[w.host]), w.whole, strict=True)
        if whole
    ]
    steps, devices = _by_step(ledgers), _by_device(ledgers, work)
    longest, collectives = _inside(profile, work, len(steps), float(np.mean([times.total_s for _, times in ledgers])))
    return Analysis(
        profile=str(profile.capture.directory),
        device_kind=profile.device_kind,
        hardware=None if profile.hardware is None else profile.hardware.name,
        step_assignment=[Assignment(*pair) for pair in sorted({(w.windows.method, w.windows.covered) for w in work})],
        unprofiled_step_time_s=profile.capture.record.unprofiled_step_time_s,
        devices=devices,
        steps=steps,
        summary={key: statistics([getattr(step, key) for step in steps]) for key in TIMES},
        spread={key: _range([getattr(device, key) for device in devices]) for key in TIMES},
        components=components(longest),
        operations=longest,
        collectives=[_with_plan(each, profile) for each in collectives.traffic],
        stragglers=collectives.stragglers,
        clock_offsets_s=collectives.clock_offsets_s,
        hosts=[
            _host(each, markers[i], found[i], mine, devices)
            for i, each in enumerate(profile.hosts)
            if (mine := [w for w in work if w.host == i])
        ],
        notes=[*(note for each in profile.hosts for note in each.host.notes), *notes, *_missing(profile), *collectives.notes],
    )


def _work(profile: Profile, markers: Sequence[Markers | None]) -> list[_DeviceWork]:
    """Classify the operations of every device and assign them to steps."""
    work = []
    for index, host in enumerate(each.host for each in profile.hosts):
        for device in host.devices:
            if len(device.ops):
                windows, found = assign(host, device, markers[index]), kinds(device.ops, host, profile.programs)
                whole = np.ones(len(windows.step), bool)
                work.append(_DeviceWork(index, device, host.label(device), found, activity(device.ops, found), windows, whole))
    return work


def _leave_out_partial(work: Sequence[_DeviceWork]) -> tuple[Sequence[_DeviceWork], list[str]]:
    """Mark the steps that the trace contains only in part on any device; return the work, and a note for each such step."""
    cut: set[int] = set()
    common = set.intersection(*(set(w.windows.step.tolist()) for w in work))
    for w in work:
        count = np.bincount(w.windows.of_op[w.windows.of_op >= 0], minlength=len(w.windows.step))
        cut |= set(w.windows.step[count < PARTIAL * np.median(count)].tolist())
        cut |= set(w.windows.step.tolist()) - common
    if len(cut) >= len(common):
        return work, []
    marked = [replace(w, whole=~np.isin(w.windows.step, sorted(cut))) for w in work]
    return marked, [f"step {step} is only partly in the trace and left out" for step in sorted(cut)]


def _inside(profile: Profile, work: Sequence[_DeviceWork], steps: int, step_s: float) -> tuple[list[Operation], Communication]:
    """Return the compute operations, longest first, and the collectives of the whole steps."""
    hosts = [each.host for each in profile.hosts]
    inside = [w.in_whole_steps() for w in work]
    chosen = [[part[:2] for w, part in zip(work, inside, strict=True) if w.host == i] for i in range(len(hosts))]
    members = [
        Member(w.host, w.label, ops, found, w.windows.step[of_op], w.active) for w, (ops, found, of_op) in zip(work, inside, strict=True)
    ]
    longest = operations(hosts, chosen, profile.programs, steps=steps, hardware=profile.hardware)
    return longest, communication(hosts, members, profile.programs, steps=steps, step_s=step_s)


def _missing(profile: Profile) -> list[str]:
    """Notes on evidence that is missing."""
    notes = []
    if not profile.programs.by_name:
        notes.append("no HLO beside the profile: no FLOPs, bytes or axes; opcodes are guessed from names")
    if profile.hardware is None:
        notes.append(f"no datasheet for {profile.device_kind or 'these devices'}: no ceilings")
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


def _with_plan(collective: Collective, profile: Profile) -> Collective:
    """Add the bus bandwidth that the planner expects, where cluster, mesh and size are known."""
    if profile.fabric is None or profile.mesh is None or not (collective.axes and collective.bytes and collective.count):
        return collective
    size_bytes = collective.bytes / collective.count
    planned = mesh_bus_bandwidth(collective.kind, size_bytes, profile.fabric, profile.mesh, collective.axes)
    return replace(collective, planned_bus_bandwidth=planned)


def _by_device(ledgers: Sequence[tuple[int | None, DeviceStep]], work: Sequence[_DeviceWork]) -> list[DeviceTotal]:
    """Sums over the steps, in the order of the mesh's flat device list."""
    method = {w.label: w.windows.method for w in work}
    found = []
    for device in dict.fromkeys(times.device for _, times in ledgers):
        mine = [times for _, times in ledgers if times.device == device]
        found.append(DeviceTotal(**_sums(mine), device=device, steps=len(mine), assignment=method[device]))
    return found


def _by_step(ledgers: Sequence[tuple[int | None, DeviceStep]]) -> list[Step]:
    """Means over the devices."""
    found = []
    for step in dict.fromkeys(step for step, _ in ledgers):
        mine = [times for number, times in ledgers if number == step]
        found.append(Step(**_sums(mine, 1 / len(mine)), step=step, devices=mine))
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
