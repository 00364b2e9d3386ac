"""Collectives of a profile: bytes, bandwidth, exposed and overlapped time, waiting, and stragglers.

A collective cannot transfer data before its last member arrives. A device waits from its own start to the start of the last member; the
rest is transfer time (on the wire). Members are matched by step, instruction and occurrence. Clocks of different hosts are aligned first,
on the ends of collectives that span them, because all members finish together (up to the time of the last hop).

Bandwidths follow nccl-tests (doc/PERFORMANCE.md): algorithm bandwidth is bytes over time, bus bandwidth is that times 2(n-1)/n for an
all-reduce, (n-1)/n for gathers, scatters and all-to-alls, 1 for point to point. Time is the transfer time, without waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ridgeline.explain.trace import intervals
from ridgeline.explain.trace.classify import COMMUNICATION
from ridgeline.explain.trace.executions import executions
from ridgeline.explain.trace.ledger import PS, Activity
from ridgeline.explain.trace.program import Program, Programs, guessed_opcode
from ridgeline.explain.trace.read import Host, Ops, ProgramKey
from ridgeline.hlo.collectives import Collective as Planned
from ridgeline.hlo.module import UNKNOWN, part_of, scope
from ridgeline.planner.communication import bus_factor
from ridgeline.rundir.analysis import Collective, MessageSize, Straggler


@dataclass
class Communication:
    """The collectives of a profile."""

    traffic: list[Collective] = field(default_factory=list)
    sizes: list[MessageSize] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)
    clock_offsets_s: dict[str, float] = field(default_factory=dict)
    """Host -> how far its clock is ahead of that of the first host, where collectives show it."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Member:
    """The operations of one device."""

    host: int
    """Index of its host."""
    label: str
    ops: Ops
    kinds: np.ndarray
    step: np.ndarray
    """int64 [n]: step number of every operation."""
    active: Activity


@dataclass
class _Calls:
    """All executions of one instruction: times [devices, calls], aligned by occurrence."""

    key: ProgramKey
    op: str
    start: np.ndarray
    end: np.ndarray
    exposed: np.ndarray
    matched: bool
    """Every device made the same calls."""
    members: list[int]
    """Devices, in the order of the rows."""
    step: np.ndarray
    """int64 [calls]: step of every call; meaningful where matched."""
    wait: np.ndarray | None = None


_Key = tuple[str, tuple[str, ...] | None, str, str, int | None]
"""Kind, axes, layer, pass, group size."""
LATE_SHARE = 0.02
"""A straggler is reported when the others wait for it for at least this share of a step."""


def communication(hosts: Sequence[Host], members: Sequence[Member], programs: Programs, *, steps: int, step_s: float) -> Communication:
    """Analyze the collectives.

    Args:
      hosts: the traces.
      members: the devices, in the order of the mesh's flat device list.
      programs: the HLO saved beside.
      steps: number of steps.
      step_s: mean time of a step.
    """
    found = Communication()
    calls = _calls(hosts, members, programs)
    if not calls:
        return found
    offsets = _clock_offsets(hosts, members, calls, programs)
    first = hosts[min(offsets)].zero_ns
    found.clock_offsets_s = {
        hosts[h].name: (hosts[h].zero_ns - first) * 1e-9 + offset * PS for h, offset in offsets.items() if h != min(offsets)
    }
    shift = np.array([offsets.get(m.host, 0) for m in members], np.int64)
    late: dict[int, float] = defaultdict(float)
    cost: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    last: dict[int, int] = defaultdict(int)
    took: dict[int, int] = defaultdict(int)
    for call in calls:
        _wait(call, shift, _groups(call, programs, members), late, cost, last, took)
    per = 1 / (len(members) * steps)
    known = [(call, _planned(call, programs)) for call in calls]
    found.traffic = _traffic(known, per)
    found.sizes = _sizes(known, per)
    unmatched = sum(call.wait is None for call in calls)
    if unmatched and len(members) > 1:
        found.notes.append(f"{unmatched} of {len(calls)} collectives could not be matched between devices: their waiting time is unknown")
    every = sorted({step for member in members for step in np.unique(member.step).tolist()})
    median_s = {d: float(np.median([by_step.get(step, 0.0) for step in every])) * PS for d, by_step in cost.items()}
    for d, each_s in sorted(median_s.items(), key=lambda pair: -pair[1]):
        if each_s >= LATE_SHARE * step_s and last[d] / max(1, took[d]) > 0.5:
            found.stragglers.append(
                Straggler(hosts[members[d].host].name, members[d].label, late[d] * PS / steps, last[d] / took[d], each_s)
            )
    return found


def _calls(hosts: Sequence[Host], members: Sequence[Member], programs: Programs) -> list[_Calls]:
    rows: dict[tuple[ProgramKey, str], dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]] = defaultdict(dict)
    for index, member in enumerate(members):
        chosen = np.flatnonzero(member.kinds == COMMUNICATION)
        ops = member.ops.take(chosen)
        exposed = ops.end - ops.start - intervals.covered(ops.start, ops.end, member.active.compute)
        for each in executions(hosts[member.host], ops, programs):
            mine, first = each.rows, each.first
            end = np.maximum.reduceat(ops.end[mine], first)
            alone = np.add.reduceat(exposed[mine], first)
            key = each.key, each.op or each.name
            before = rows[key].get(index)
            found = (ops.start[mine][first], end, np.minimum(alone, end - ops.start[mine][first]), member.step[chosen][mine][first])
            rows[key][index] = found if before is None else _appended(before, found)
    return [_one(key, by_device) for key, by_device in rows.items()]


def _appended(first: tuple[np.ndarray, ...], second: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Join the calls of work without an instruction, in order of their start."""
    start, end, exposed, step = (np.concatenate(pair) for pair in zip(first, second, strict=True))
    order = np.argsort(start, kind="stable")
    return start[order], end[order], exposed[order], step[order]


def _one(key: tuple[ProgramKey, str], by_device: Mapping[int, tuple[np.ndarray, ...]]) -> _Calls:
    devices = sorted(by_device)
    steps = [by_device[d][3] for d in devices]
    matched = all(len(s) == len(steps[0]) and (s == steps[0]).all() for s in steps)
    if matched:
        start, end, exposed = (np.stack([by_device[d][i] for d in devices]) for i in range(3))
    else:
        start, end, exposed = (np.concatenate([by_device[d][i] for d in devices])[None] for i in range(3))
    return _Calls(key[0], key[1], start, end, exposed, matched, devices, steps[0])


def _groups(call: _Calls, programs: Programs, members: Sequence[Member]) -> list[list[int]] | None:
    """Return the groups of devices that communicate, as rows of a call; None when unknown."""
    program = programs.find(call.key)
    if program is None:
        return [list(range(len(call.members)))]
    groups = program.groups.get(_instruction(program, call.op))
    if groups is None or program.num_devices != len(members):
        return None
    row = {device: index for index, device in enumerate(call.members)}
    return [[row[d] for d in group if d in row] for group in groups.tolist()]


def _wait(
    call: _Calls,
    shift: np.ndarray,
    groups: list[list[int]] | None,
    late: dict[int, float],
    cost: dict[int, dict[int, float]],
    last: dict[int, int],
    took: dict[int, int],
) -> None:
    """Split every call of an instruction into waiting and transfer, and record the last member."""
    if not call.matched or groups is None or len(call.members) < 2:
        return
    start = call.start - shift[call.members][:, None]
    end = call.end - shift[call.members][:, None]
    call.wait = np.zeros(start.shape, np.int64)
    for group in groups:
        if len(group) < 2:
            continue
        mine, devices = start[group], [call.members[row] for row in group]
        arrival = mine.max(axis=0)
        call.wait[group] = np.clip(np.minimum(arrival, end[group]) - mine, 0, None)
        slowest = mine.argmax(axis=0)
        ordered = np.sort(mine, axis=0)
        # The last device is responsible only for the time between the last two arrivals.
        blame = ordered[-1] - ordered[-2]
        lateness = np.clip(mine - np.median(mine, axis=0), 0, None).sum(axis=1)
        for row, device in enumerate(devices):
            late[device] += float(lateness[row])
            for step, lost in zip(call.step[slowest == row].tolist(), blame[slowest == row].tolist(), strict=True):
                cost[device][step] += lost
            last[device] += int((slowest == row).sum())
            took[device] += mine.shape[1]


def _clock_offsets(hosts: Sequence[Host], members: Sequence[Member], calls: Sequence[_Calls], programs: Programs) -> dict[int, int]:
    """Return host -> picoseconds to subtract from its times so that the ends of shared collectives agree."""
    offsets = dict.fromkeys(sorted({m.host for m in members}), 0)
    if len(offsets) < 2:
        return offsets
    first = min(offsets)
    differences: dict[int, list[np.ndarray]] = defaultdict(list)
    for call in calls:
        groups = _groups(call, programs, members)
        if not call.matched or groups is None:
            continue
        for group in groups:
            by_host: dict[int, list[int]] = defaultdict(list)
            for row in group:
                by_host[members[call.members[row]].host].append(row)
            if first in by_host:
                reference = np.median(call.end[by_host[first]], axis=0)
                for host, rows in by_host.items():
                    if host != first:
                        differences[host].append(np.median(call.end[rows], axis=0) - reference)
    for host, found in differences.items():
        offsets[host] = round(float(np.median(np.concatenate(found))))
    return offsets


def _planned(call: _Calls, programs: Programs) -> Planned | None:
    """Return the collective in the HLO; None where it is unknown."""
    program = programs.find(call.key)
    return None if program is None else program.collectives.get(_instruction(program, call.op))


def _traffic(calls: Sequence[tuple[_Calls, Planned | None]], per: float) -> list[Collective]:
    groups: dict[_Key, list[tuple[_Calls, float | None]]] = defaultdict(list)
    key: _Key
    for call, known in calls:
        if known is None:
            key = (_kind(call.op), None, "other", UNKNOWN, None)
            groups[key].append((call, None))
        else:
            where = known.op_name
            key = (known.kind, known.axes, scope(where) or "other", part_of(where), known.group_size)
            groups[key].append((call, float(known.bytes)))
    return sorted((_summed(key, found, per) for key, found in groups.items()), key=lambda t: -t.time_s)


def _sizes(calls: Sequence[tuple[_Calls, Planned | None]], per: float) -> list[MessageSize]:
    """Sum up the collectives of known size by kind, group and size; by size within a kind."""
    groups: dict[tuple[str, tuple[str, ...] | None, int, int], list[tuple[_Calls, float | None]]] = defaultdict(list)
    for call, known in calls:
        if known is not None:
            groups[known.kind, known.axes, known.group_size, known.bytes].append((call, float(known.bytes)))
    sizes = []
    for (kind, axes, group_size, size), found in groups.items():
        each = _summed((kind, axes, "", "", group_size), found, per)
        time_s = each.wire_s if each.wire_s is not None else each.time_s
        sizes.append(
            MessageSize(
                kind=kind,
                axes=axes,
                group_size=group_size,
                size_bytes=float(size),
                count=each.count,
                time_s=time_s / each.count if each.count else 0.0,
                algorithm_bandwidth=each.algorithm_bandwidth,
                bus_bandwidth=each.bus_bandwidth,
            )
        )
    return sorted(sizes, key=lambda s: (s.kind, s.axes or (), s.group_size or 0, s.size_bytes))


def _summed(key: _Key, found: Sequence[tuple[_Calls, float | None]], per: float) -> Collective:
    kind, axes, layer, phase, size = key
    time_s = sum(float((c.end - c.start).sum()) for c, _ in found) * PS * per
    exposed_s = sum(float(c.exposed.sum()) for c, _ in found) * PS * per
    waits = [c.wait for c, _ in found]
    wait_s = None if any(w is None for w in waits) else sum(float(w.sum()) for w in waits if w is not None) * PS * per
    sizes = [b for _, b in found]
    moved = None if any(b is None for b in sizes) else sum(b * c.start.size for c, b in found if b is not None) * per
    wire_s = None if wait_s is None else time_s - wait_s
    basis_s = wire_s if wire_s is not None else time_s
    bandwidth = moved / basis_s if moved is not None and basis_s > 0 else None
    return Collective(
        kind=kind,
        axes=axes,
        layer=layer,
        phase=phase,
        count=sum(c.start.size for c, _ in found) * per,
        bytes=moved,
        time_s=time_s,
        exposed_s=exposed_s,
        wait_s=wait_s,
        wire_s=wire_s,
        group_size=size,
        algorithm_bandwidth=bandwidth,
        bus_bandwidth=None if bandwidth is None or size is None else bandwidth * _bus_factor(kind, size),
        instructions=tuple(sorted(c.op for c, _ in found)),
    )


def _bus_factor(kind: str, size: int) -> float:
    return bus_factor(kind, size) if kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all") else 1.0


def _instruction(program: Program, op: str) -> str:
    """Return the instruction that has the replica groups: of a start and done pair, the start."""
    if op in program.collectives:
        return op
    for computation in program.module.computations.values():
        instruction = computation.by_name.get(op)
        if instruction is None:
            continue
        if guessed_opcode(op).endswith("-done") and instruction.operands:
            return _instruction(program, instruction.operands[0])
        inner = [i.name for name in instruction.called for i in program.module.computations[name].instructions]
        return next((name for name in inner if name in program.collectives), op)
    return op


def _kind(op: str) -> str:
    """Guess the kind of a collective that is not in the HLO from the name of its instruction or kernel."""
    lowered = guessed_opcode(op).lower().replace("-", "")
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "broadcast", "send", "recv"):
        if kind.replace("-", "") in lowered:
            return kind
    return "all-reduce" if "psum" in lowered else "point to point" if "memcpy" in lowered else "unknown"
