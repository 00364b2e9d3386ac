"""Read traces into columns: per host, the operations of its devices and the events of its threads.

NVIDIA and AMD GPUs have their own planes whose `Stream #` lines contain kernels and copies; those of TPUs: tpu.py. The CPU backend has
none: its operations are events of host threads with the statistics `hlo_op` and `device_ordinal` (thread names differ between versions).
An operation that goes on in the thread pool after its event, such as a large dot, ends at its marker `end: NAME`.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.explain.trace.allocators import MEMORY_STATS, MemoryEvents, memory_rows, read_memory_events
from ridgeline.explain.trace.protobuf import Value
from ridgeline.explain.trace.tpu import tpu_operations
from ridgeline.explain.trace.wire import MISSING, Line, Plane, Space, read_space
from ridgeline.rundir.analysis import DeviceFacts

WANTED = MEMORY_STATS | frozenset(
    {"hlo_op", "hlo_module", "program_id", "run_id", "device_ordinal", "correlation_id", "step_num", "name", "tf_op"}
    | {"memcpy_details", "memset_details", "cuda_graph_id", "cuda_graph_exec_id"}
)
_DROPPED = re.compile(r"ThreadpoolListener|Wait for |InvokeRendezvous|Rendezvous$|PythonRefManager")
_END = "end: "
"""The CPU backend's marker that an operation has ended; it has no statistics."""
_PAUSE_PS = 20_000_000
"""Operations of a thread with less than 20 us between them run one after another."""
_DEVICE_PLANE = re.compile(r"/device:(GPU|TPU):(\d+)\b(?! SparseCore)")
_OTHER_DEVICE = re.compile(r"/device:(?!GPU|TPU|CPU|CUSTOM)(\w+)")
_SUFFIX = re.compile(r"-p(\d{5})$")

EPOCH_NS = 10**17
"""Times above this (year 1973) are wall-clock times."""
Kind = Literal["gpu", "tpu", "cpu"]


class ProgramKey(NamedTuple):
    """What identifies a compiled program in a capture: several programs may have the same name (`jit_dot` of other shapes)."""

    module: str
    """Name of its HLO module; '' where the trace has none."""
    program_id: int | None
    """Statistic `program_id`, signed 64-bit, as the first host has it (see Host.program_ids); None where the trace has none."""


@dataclass
class Ops:
    """Operations of one device as columns; times in picoseconds since the host's zero, texts as indices into Host.strings."""

    name: np.ndarray
    """int32: the kernel's name (GPU) or the operation's (CPU)."""
    start: np.ndarray
    end: np.ndarray
    op: np.ndarray
    """HLO instruction, or MISSING."""
    module: np.ndarray
    program: np.ndarray
    run: np.ndarray
    correlation: np.ndarray
    scope: np.ndarray
    """Statistic `name` or `tf_op`: the path of jax transformations and named scopes, where the trace contains it; else MISSING."""
    details: np.ndarray
    """Of a copy or memset, or MISSING."""
    graph: np.ndarray
    """CUDA graph that the operation belongs to or is; MISSING otherwise."""
    stream: np.ndarray
    """int32: index of its line."""

    def __len__(self) -> int:
        return len(self.name)

    def take(self, rows: np.ndarray) -> Ops:
        """Return the operations of these rows (or of a mask)."""
        if len(rows) == len(self) and (rows.all() if rows.dtype == bool else (rows[1:] > rows[:-1]).all()):
            return self  # all rows in order: no copy needed
        return Ops(*(getattr(self, key)[rows] for key in self.__dataclass_fields__))


@dataclass
class Device:
    """One device of a host."""

    ordinal: int
    """Number on its host, from 0."""
    ops: Ops
    """In order of their start."""
    facts: DeviceFacts | None = None
    """What the trace contains of the device itself."""


@dataclass
class Events:
    """Events of one host thread, in order of their start."""

    thread: str
    name: np.ndarray
    start: np.ndarray
    end: np.ndarray
    correlation: np.ndarray
    run: np.ndarray
    step: np.ndarray
    """Statistic `step_num`, or MISSING."""

    def __len__(self) -> int:
        return len(self.name)


@dataclass
class Host:
    """One file: a process and its devices."""

    name: str
    """Name of the host, with the process in a run of several: `node01`, `node01-p00003`."""
    process: int
    path: Path
    kind: Kind
    zero_ns: int
    """Zero of its times by the clock of the host, nanoseconds since 1970; since an unknown moment in files without wall-clock time."""
    strings: list[str]
    devices: list[Device]
    threads: list[Events]
    notes: list[str] = field(default_factory=list)
    memory_events: MemoryEvents | None = None
    """None where it has none: XLA's CPU backend, and allocators that record nothing."""
    other_devices: list[str] = field(default_factory=list)
    """Kinds of devices in the file that are not analyzed."""
    program_ids: dict[int, int] = field(default_factory=dict)
    """Program id in its file -> id in `ops.program`, where they differ. Processes number their programs by themselves."""

    modules: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Program id in its file -> start and end of the HloProto there."""

    def programs_run(self) -> set[ProgramKey]:
        """Return the programs that its devices ran."""
        columns = [np.stack([d.ops.module, d.ops.program]) for d in self.devices if len(d.ops)]
        return {self.program_key(*pair) for each in columns for pair in np.unique(each, axis=1).T.tolist()}

    def program_key(self, module: int, program: int) -> ProgramKey:
        """Return the program of a row of operations, from its columns `module` and `program`."""
        return ProgramKey("" if module == MISSING else self.strings[module], None if program == MISSING else program)

    @property
    def has_wall_clock(self) -> bool:
        """Whether its times can be compared with those of the event log."""
        return self.zero_ns > EPOCH_NS

    def label(self, device: Device) -> str:
        """Return the label of a device that is unique over all hosts."""
        return f"{self.name}/{self.kind}:{device.ordinal}"


def read_hosts(paths: Sequence[Path]) -> list[Host]:
    """Read the profiles of one capture, one file per process.

    Raises:
      UserError: a file is missing, empty, truncated or not a profile; or no file contains device work, or only that of other devices.
    """
    hosts = [read_host(path, number) for number, path in enumerate(sorted(paths))]
    known = any(len(device.ops) for host in hosts for device in host.devices if host.kind != "cpu")
    if not known and (other := sorted({name for host in hosts for name in host.other_devices})):
        raise UserError(f"{paths[0]} is a capture of {', '.join(other)} devices; ridge analyzes GPUs, TPUs and XLA's CPU backend only")
    if not any(len(device.ops) for host in hosts for device in host.devices):
        raise UserError(f"{paths[0]} contains no device work: the profile was taken while no step ran")
    _match_programs(hosts)
    return hosts


def _match_programs(hosts: Sequence[Host]) -> None:
    """Give a program the id that it has on the first host. Programs of one name are numbered in the order of their compilation; where a
    host has as many of a name as the first one, they are matched in that order."""
    first = _programs_by_name(hosts[0])
    for host in hosts[1:]:
        for name, mine in _programs_by_name(host).items():
            theirs = first.get(name, [])
            if len(mine) == len(theirs):
                host.program_ids |= {own: other for own, other in zip(mine, theirs, strict=True) if own != other}
        if host.program_ids:
            for device in host.devices:
                ids, which = np.unique(device.ops.program, return_inverse=True)
                device.ops.program = np.array([host.program_ids.get(own, own) for own in ids.tolist()], np.int64)[which]


def _programs_by_name(host: Host) -> dict[str, list[int]]:
    """Return the ids of the programs of a host by name, ascending."""
    found: dict[str, set[int]] = {}
    for device in host.devices:
        known = device.ops.program != MISSING
        pairs = np.unique(np.stack([device.ops.module[known], device.ops.program[known]], axis=1), axis=0)
        for module, program in pairs.tolist():
            found.setdefault(host.program_key(module, program).module, set()).add(program)
    return {name: sorted(ids) for name, ids in found.items()}


def read_host(path: Path, number: int = 0) -> Host:
    """Read one file. `number`: the process, where the file name does not contain it."""
    return build_host(read_space(path, WANTED, lambda name: _DROPPED.match(name) is not None), path, number)


def build_host(space: Space, path: Path, number: int = 0) -> Host:
    """Build devices and threads from the lines of a file."""
    name = path.name.removesuffix(".xplane.pb")
    process = _SUFFIX.search(name)
    planes = [(int(found[2]), found[1] == "TPU", plane) for plane in space.planes if (found := _DEVICE_PLANE.search(plane.name))]
    hosts = [plane for plane in space.planes if plane.name.startswith("/host:CPU")]
    host = Host(
        name=name,
        process=int(process.group(1)) if process else number,
        path=path,
        kind="cpu" if not planes else "tpu" if all(is_tpu for _, is_tpu, _ in planes) else "gpu",
        zero_ns=_zero_ns(space),
        strings=space.strings,
        devices=[],
        threads=[],
        modules={number: span for plane in space.planes for number, span in plane.modules.items()},
        notes=[f"{name}: the profiler reports: {text.strip()[:300]}" for text in dict.fromkeys(space.problems) if text.strip()],
        other_devices=sorted({found[1] for plane in space.planes if (found := _OTHER_DEVICE.match(plane.name))}),
    )
    memory = memory_rows(hosts, space.strings)
    markers = [number for number, text in enumerate(space.strings) if text.startswith(_END)]
    if not planes:
        _extend_to_markers([line for plane in hosts for line in plane.lines], space.strings)
    host.memory_events = read_memory_events(memory, space.strings)
    for plane in hosts:
        for line in plane.lines:
            rest = ~np.isin(line.names, markers)
            if not planes and "hlo_op" in line.stats:
                rest &= line.stats["hlo_op"] == MISSING
            rest[next((rows for other, rows in memory if other is line), [])] = False
            host.threads.append(_events(line, rest))
        plane.lines = [line for line in plane.lines if not planes and "hlo_op" in line.stats]  # the rest was copied: free it
    host.threads = [thread for thread in host.threads if len(thread)]
    if planes:
        planes.sort(key=lambda found: found[0])
        wanted = [(ordinal, plane) for ordinal, is_tpu, plane in planes if is_tpu == (host.kind == "tpu")]
        host.devices = [_accelerator(ordinal, plane, host) for ordinal, plane in wanted]
    else:
        host.devices = _cpus(hosts)
    return host


def _zero_ns(space: Space) -> int:
    """Return the wall-clock time of zero. Files of JAX count from the start of the capture, a statistic of one of the planes."""
    if space.base_ns > EPOCH_NS:
        return space.base_ns
    return space.base_ns + next((int(p.stats["profile_start_time"]) for p in space.planes if "profile_start_time" in p.stats), 0)


def _accelerator(ordinal: int, plane: Plane, host: Host) -> Device:
    """Return the kernels and copies of a GPU, or the operations of a TPU. Other lines repeat them in another form, or belong to the
    profiler."""
    streams = [line for line in plane.lines if line.name.startswith("Stream")]
    if host.kind == "tpu":
        lines = tpu_operations(plane, host.strings)
    else:
        lines = streams or [line for line in plane.lines if line.name == "XLA Ops"]
    plane.lines = []
    return Device(ordinal, _ops(lines, [np.ones(len(line.names), bool) for line in lines]), _facts(plane.stats))


def _facts(stats: Mapping[str, Value]) -> DeviceFacts | None:
    """Return the device facts in the statistics of a plane (xplane_schema.cc: clock in kHz, sizes in bytes); None without any."""

    def number(key: str) -> float | None:
        value = stats.get(key)
        return float(value) if isinstance(value, int | float) and value > 0 else None

    def text(key: str) -> str | None:
        return str(stats[key]) if stats.get(key) else None

    cores, memory, clock_khz = number("core_count"), number("memory_size"), number("clock_rate")
    tpu_gb_per_s, tpu_teraflops = number("peak_hbm_bw_gigabytes_per_second"), number("peak_teraflops_per_second")
    minor = stats.get("compute_cap_minor", 0)
    found = DeviceFacts(
        vendor=text("device_vendor"),
        model=text("gpu_device_name") or text("device_type_string"),
        cores=None if cores is None else int(cores),
        clock_hz=None if clock_khz is None else clock_khz * 1e3,
        memory_bytes=None if memory is None else int(memory),
        memory_bandwidth_bytes_per_s=number("memory_bandwidth") or (None if tpu_gb_per_s is None else tpu_gb_per_s * 1e9),
        peak_flops=None if tpu_teraflops is None else tpu_teraflops * 1e12,
        compute_capability=None if "compute_cap_major" not in stats else f"{stats['compute_cap_major']}.{minor}",
    )
    return None if found == DeviceFacts() else found


def _extend_to_markers(lines: Sequence[Line], strings: Sequence[str]) -> None:
    """Let operations of the CPU backend end at their markers.

    Most markers follow their operation on its thread at once. The others belong to operations that went on in the thread pool: a thread
    ends one of them, runs the operations that it could not run before, one after another, and writes the marker behind these. So an
    operation went on to the first of them, or to its marker, if the thread was in no operation for a quarter of that time. Markers do not
    contain the device: those of one name are taken in order of time, so two devices of a process may exchange ends; an operation ends at
    the latest where its device begins it again.
    """
    ids = {text: number for number, text in enumerate(strings)}
    marked = {number: ids[name] for number, text in enumerate(strings) if text.startswith(_END) and (name := text[len(_END) :]) in ids}
    if not marked:
        return
    op_of = np.full(len(strings), MISSING, np.int64)
    op_of[list(marked)] = list(marked.values())
    running: dict[int, list[tuple[int, int, Line, int]]] = {}  # operation -> end of its event, device, line, row
    markers: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)  # operation -> marker, end, end of the thread's one before
    for line in lines:
        is_op, device = line.stat("hlo_op") != MISSING, _ordinals(line)
        rows = np.flatnonzero(is_op | (op_of[line.names] != MISSING))
        rows = rows[np.lexsort((is_op[rows], line.start_ps[rows]))]
        names, ops = line.names[rows], is_op[rows]
        at_once = np.zeros(len(rows), bool)
        at_once[:-1] = ops[:-1] & ~ops[1:] & (op_of[names[1:]] == names[:-1])
        for row in rows[ops & ~at_once].tolist():
            end = int(line.start_ps[row] + line.duration_ps[row])
            running.setdefault(int(line.names[row]), []).append((end, int(device[row]), line, row))
        starts, ends = line.start_ps[rows[ops]], line.start_ps[rows[ops]] + line.duration_ps[rows[ops]]
        apart = np.concatenate([[True], starts[1:] - ends[:-1] >= _PAUSE_PS])[: len(starts)]
        first = np.maximum.accumulate(np.where(apart, np.arange(len(starts)), 0))  # of the operations run one after another
        for row, last in zip(rows[~ops & ~np.roll(at_once, 1)], (np.cumsum(ops) - 1)[~ops & ~np.roll(at_once, 1)].tolist(), strict=True):
            marker = int(line.start_ps[row])
            behind = last >= 0 and marker - ends[last] < _PAUSE_PS
            before = int(first[last]) - 1 if behind else last
            end = int(starts[first[last]]) if behind else marker
            markers[int(op_of[line.names[row]])].append((marker, end, int(ends[before]) if before >= 0 else 0))
    begins: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # of an operation on a device
    for line in lines:
        rows = np.flatnonzero(np.isin(line.names, list(running)) & (line.stat("hlo_op") != MISSING))
        for op, ordinal, start in zip(line.names[rows].tolist(), _ordinals(line)[rows].tolist(), line.start_ps[rows].tolist(), strict=True):
            begins[op, ordinal].append(start)
    for each in begins.values():
        each.sort()
    for op, operations in running.items():
        written = iter(sorted(markers[op]))
        for end, ordinal, line, row in sorted(operations, key=lambda ended: ended[:2]):
            found = next((marker for marker in written if marker[0] >= end), None)
            if found is None:
                break
            _, went_on_to, before = found
            if went_on_to <= end or went_on_to - max(end, before) < (went_on_to - end) / 4:
                continue
            later = bisect.bisect_left(begins[op, ordinal], end)
            line.duration_ps[row] = min([went_on_to, *begins[op, ordinal][later : later + 1]]) - line.start_ps[row]


def _ordinals(line: Line) -> np.ndarray:
    return line.stats.get("device_ordinal", np.zeros(len(line.names), np.int64))


def _cpus(planes: list[Plane]) -> list[Device]:
    """Return the operations of the CPU backend by device: events with an `hlo_op`."""
    lines = [line for plane in planes for line in plane.lines if "hlo_op" in line.stats]
    masks = [line.stats["hlo_op"] != MISSING for line in lines]
    ordinals = [_ordinals(line) for line in lines]
    present = sorted({int(n) for mask, column in zip(masks, ordinals, strict=True) for n in np.unique(column[mask])})
    return [Device(max(n, 0), _ops(lines, [mask & (column == n) for mask, column in zip(masks, ordinals, strict=True)])) for n in present]


def _ops(lines: list[Line], masks: list[np.ndarray]) -> Ops:
    def stat(*keys: str) -> np.ndarray:
        columns = [line.stat(*keys)[mask] for line, mask in zip(lines, masks, strict=True)]
        return np.concatenate(columns) if columns else np.zeros(0, np.int64)

    def own(values: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([v[mask] for v, mask in zip(values, masks, strict=True)]) if lines else np.zeros(0, np.int64)

    start = own([line.start_ps for line in lines])
    ops = Ops(
        name=own([line.names for line in lines]),
        start=start,
        end=start + own([line.duration_ps for line in lines]),
        op=stat("hlo_op"),
        module=stat("hlo_module"),
        program=stat("program_id"),
        run=stat("run_id"),
        correlation=stat("correlation_id"),
        scope=stat("name", "tf_op"),
        details=stat("memcpy_details", "memset_details"),
        graph=stat("cuda_graph_exec_id", "cuda_graph_id"),
        stream=own([np.full(len(line.names), index, np.int32) for index, line in enumerate(lines)]),
    )
    return ops.take(np.argsort(ops.start, kind="stable"))


def _events(line: Line, mask: np.ndarray) -> Events:
    rows = np.flatnonzero(mask)
    rows = rows[np.argsort(line.start_ps[rows], kind="stable")]
    missing = np.full(len(line.names), MISSING, np.int8)
    start = line.start_ps[rows]
    return Events(
        thread=line.name,
        name=line.names[rows],
        start=start,
        end=start + line.duration_ps[rows],
        correlation=line.stats.get("correlation_id", missing)[rows],
        run=line.stats.get("run_id", missing)[rows],
        step=line.stats.get("step_num", missing)[rows],
    )
