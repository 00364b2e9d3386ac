"""Everything a capture tells about a step: the way from files to figures, and the figures as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ridgeline.explain.trace import intervals
from ridgeline.explain.trace.capture import Capture, events_of, mesh_sizes, phases_by_cause
from ridgeline.explain.trace.classify import NOTHING, kinds
from ridgeline.explain.trace.communication import Communication, Member, Traffic, communication
from ridgeline.explain.trace.components import Component, Operation, components, operations
from ridgeline.explain.trace.frames import read_frames
from ridgeline.explain.trace.host import HostReport, causes, host_report
from ridgeline.explain.trace.ledger import CAUSES, Activity, StepLedger, activity, step_ledgers
from ridgeline.explain.trace.program import Programs, read_programs
from ridgeline.explain.trace.read import Device, Host, Ops, read_hosts
from ridgeline.explain.trace.steps import Windows, assign, find_markers
from ridgeline.planner.hardware import Hardware, find_hardware
from ridgeline.rundir.noise import percentile
from ridgeline.rundir.recompilation import recompilations

PARTIAL = 0.5
"""A step with less than this share of the usual operations is cut off, and left out."""
TIMES = ("total_s", "compute_s", "communication_s", "exposed_communication_s", "exposed_copy_s", "idle_s")

PlannedBandwidth = Callable[[str, float, tuple[str, ...]], float | None]
"""(kind, bytes of one run, axes) -> bus bandwidth in bytes/s."""


@dataclass
class Analysis:
    """What `analyze` found."""

    capture: Capture
    ledgers: list[StepLedger]
    """Per device and step; only whole steps."""
    components: list[Component]
    operations: list[Operation]
    """Compute only, longest first."""
    communication: Communication
    hosts: list[HostReport]
    processes: list[int]
    """Of the hosts."""
    method: dict[str, tuple[str, float]]
    """Device -> how its operations were given to steps, and the share placed by that evidence itself."""
    device_kind: str | None
    hardware: Hardware | None
    """None: not in the catalogue, so there are no ceilings."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know: steps left out, evidence that was missing."""
    planned_bandwidth: PlannedBandwidth | None = None

    @property
    def devices(self) -> list[str]:
        """Names of the devices, in the order of the mesh's flat list."""
        return list(dict.fromkeys(ledger.device for ledger in self.ledgers))

    @property
    def steps(self) -> list[int | None]:
        """Analysed steps."""
        return list(dict.fromkeys(ledger.step for ledger in self.ledgers))


@dataclass
class _Seen:
    """A device while it is analysed."""

    host: int
    device: Device
    label: str
    kinds: np.ndarray
    active: Activity
    windows: Windows
    whole: np.ndarray
    """bool [S]: steps that are not cut off."""


def analyze(capture: Capture, *, hardware: Hardware | None = None, planned_bandwidth: PlannedBandwidth | None = None) -> Analysis:
    """Analyse a capture.

    Args:
      capture: from find_capture.
      hardware: datasheet of the devices; None: looked up by the name the capture gives them.
      planned_bandwidth: what the plan expects of a collective.

    Raises:
      UserError: a file is damaged, or holds no work of a device.
    """
    hosts = read_hosts(capture.traces)
    device_kind = _device_kind(capture, hosts)
    hardware = hardware or (find_hardware(device_kind) if device_kind else None)
    programs = _programs(capture, hosts)
    notes = [note for host in hosts for note in host.notes]
    markers = [find_markers(host) for host in hosts]
    seen = [
        _seen(index, host, device, programs, assign(host, device, markers[index]))
        for index, host in enumerate(hosts)
        for device in host.devices
        if len(device.ops)
    ]
    notes += _leave_out_partial(seen)
    found = [causes(host, markers[i], phases_by_cause(capture, host.process)) for i, host in enumerate(hosts)]
    ledgers = [
        ledger
        for s in seen
        for ledger, whole in zip(step_ledgers(s.label, s.windows, s.active, found[s.host]), s.whole, strict=True)
        if whole
    ]
    steps = len(dict.fromkeys(ledger.step for ledger in ledgers))
    step_s = float(np.mean([ledger.total_s for ledger in ledgers]))
    inside = [_inside(s) for s in seen]
    chosen = [[part[:2] for s, part in zip(seen, inside, strict=True) if s.host == i] for i in range(len(hosts))]
    top = operations(hosts, chosen, programs, steps=steps, hardware=hardware)
    members = [
        Member(s.host, s.label, ops, found_kinds, s.windows.step[of_op], s.active)
        for s, (ops, found_kinds, of_op) in zip(seen, inside, strict=True)
    ]
    talk = communication(hosts, members, programs, steps=steps, step_s=step_s)
    if not programs.by_name:
        notes.append("no HLO beside the profile: no FLOPs, bytes or axes; opcodes are guessed from names")
    if hardware is None:
        notes.append(f"no datasheet for {device_kind or 'these devices'}: no ceilings")
    return Analysis(
        capture=capture,
        ledgers=ledgers,
        components=components(top),
        operations=top,
        communication=talk,
        hosts=[_host(capture, host, i, markers[i], found[i], seen) for i, host in enumerate(hosts) if any(s.host == i for s in seen)],
        processes=[host.process for i, host in enumerate(hosts) if any(s.host == i for s in seen)],
        method={s.label: (s.windows.method, s.windows.covered) for s in seen},
        device_kind=device_kind,
        hardware=hardware,
        notes=notes + talk.notes,
        planned_bandwidth=planned_bandwidth,
    )


def _device_kind(capture: Capture, hosts: Sequence[Host]) -> str | None:
    named = next((device.model for host in hosts for device in host.devices if device.model), None)
    kind = capture.record.get("device_kind") or named
    return str(kind) if kind else ("cpu" if hosts[0].kind == "cpu" else None)


def _programs(capture: Capture, hosts: Sequence[Host]) -> Programs:
    seen = sum(1 for host in hosts for device in host.devices if len(device.ops))
    devices = int(capture.record.get("num_devices", seen))
    return read_programs(capture.directory, devices, mesh_sizes(capture, devices))


def _seen(index: int, host: Host, device: Device, programs: Programs, windows: Windows) -> _Seen:
    found = kinds(device.ops, host, programs)
    return _Seen(index, device, host.label(device), found, activity(device.ops, found), windows, np.ones(len(windows.step), bool))


def _leave_out_partial(seen: Sequence[_Seen]) -> list[str]:
    """Mark steps that a capture holds only in part (on any device); return what to say about it."""
    cut: set[int] = set()
    common = set.intersection(*(set(s.windows.step.tolist()) for s in seen))
    for s in seen:
        count = np.bincount(s.windows.of_op[s.windows.of_op >= 0], minlength=len(s.windows.step))
        cut |= set(s.windows.step[count < PARTIAL * np.median(count)].tolist())
        cut |= set(s.windows.step.tolist()) - common
    if len(cut) >= len(common):
        return []
    for s in seen:
        s.whole = ~np.isin(s.windows.step, sorted(cut))
    return [f"step {step} is only partly in the trace and left out" for step in sorted(cut)]


def _inside(s: _Seen) -> tuple[Ops, np.ndarray, np.ndarray]:
    """Operations of whole steps that count for something, their kinds, and the index of their step."""
    of_op = s.windows.of_op
    rows = np.flatnonzero((of_op >= 0) & s.whole[np.maximum(of_op, 0)] & (s.kinds != NOTHING))
    return s.device.ops.take(rows), s.kinds[rows], of_op[rows]


def _host(capture: Capture, host: Host, index: int, markers: Any, found: Mapping[str, np.ndarray], seen: Sequence[_Seen]) -> HostReport:
    mine = [s for s in seen if s.host == index]
    start = min(int(s.windows.start[s.whole].min()) for s in mine)
    end = max(int(s.windows.end[s.whole].max()) for s in mine)
    return host_report(
        host,
        markers,
        found,
        [intervals.clip(s.active.busy, start, end) for s in mine],
        (start, end),
        int(mine[0].whole.sum()),
        recompilations(events_of(capture, host.process), host.process),
        read_frames(host.path),
    )


def statistics(values: Sequence[float]) -> dict[str, float]:
    """Return mean, p50, p95, min and max."""
    ordered = sorted(values)
    return {
        "mean": float(np.mean(ordered)),
        "p50": percentile(ordered, 0.5),
        "p95": percentile(ordered, 0.95),
        "min": ordered[0],
        "max": ordered[-1],
    }


def to_json(analysis: Analysis, *, top: int = 20) -> dict[str, Any]:
    """Return the analysis as plain values; the contract of `ridge analyze --json`. `top`: how many operations to list."""
    record = analysis.capture.record
    methods = sorted(set(analysis.method.values()))
    return {
        "profile": str(analysis.capture.directory),
        "device_kind": analysis.device_kind,
        "hardware": None if analysis.hardware is None else analysis.hardware.name,
        "step_assignment": [{"method": method, "covered": covered} for method, covered in methods],
        "unprofiled_step_time_s": record.get("unprofiled_step_time_s"),
        "devices": [_device_json(analysis, device) for device in analysis.devices],
        "steps": [_step_json(analysis, step) for step in analysis.steps],
        "summary": {key: statistics([s[key] for s in (_step_json(analysis, step) for step in analysis.steps)]) for key in TIMES},
        "spread": {key: _spread([_device_json(analysis, device)[key] for device in analysis.devices]) for key in TIMES},
        "components": [asdict(c) for c in analysis.components],
        "operations": [asdict(o) for o in analysis.operations[:top]],
        "collectives": [_traffic_json(t, analysis.planned_bandwidth) for t in analysis.communication.traffic],
        "stragglers": [asdict(s) for s in analysis.communication.stragglers],
        "clock_offsets_s": analysis.communication.clock_offsets_s,
        "hosts": [
            asdict(host) | {"process": process, "devices": [d for d in analysis.devices if d.rpartition("/")[0] == host.host]}
            for host, process in zip(analysis.hosts, analysis.processes, strict=True)
        ],
        "notes": analysis.notes,
    }


def _device_json(analysis: Analysis, device: str) -> dict[str, Any]:
    mine = [ledger for ledger in analysis.ledgers if ledger.device == device]
    return {"device": device, **_sums(mine), "steps": len(mine), "assignment": analysis.method[device][0]}


def _step_json(analysis: Analysis, step: int | None) -> dict[str, Any]:
    """Mean over devices, and the parts of each."""
    mine = [ledger for ledger in analysis.ledgers if ledger.step == step]
    mean = _sums(mine)
    scale = 1 / len(mine)
    return {
        "step": step,
        **{key: value * scale for key, value in mean.items() if key != "idle_by_cause"},
        "idle_by_cause": {cause: value * scale for cause, value in mean["idle_by_cause"].items()},
        "devices": [{"device": ledger.device, **_sums([ledger]), "operations": ledger.operations} for ledger in mine],
    }


def _sums(ledgers: Sequence[StepLedger]) -> dict[str, Any]:
    sums: dict[str, Any] = {key: sum(getattr(ledger, key) for ledger in ledgers) for key in TIMES}
    sums["overlapped_communication_s"] = sums["communication_s"] - sums["exposed_communication_s"]
    sums["idle_by_cause"] = {cause: sum(ledger.idle_by_cause[cause] for ledger in ledgers) for cause in CAUSES}
    sums["residual_s"] = sum(ledger.residual_s for ledger in ledgers)
    return sums


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "max": max(values)}


def _traffic_json(traffic: Traffic, planned: PlannedBandwidth | None) -> dict[str, Any]:
    expected = None
    if planned is not None and traffic.axes and traffic.bytes is not None and traffic.count:
        expected = planned(traffic.kind, traffic.bytes / traffic.count, traffic.axes)
    return asdict(traffic) | {"planned_bus_bandwidth": expected}
