"""Read traces into columns: per host, the operations of its devices and the events of its threads.

NVIDIA and AMD GPUs have their own planes whose `Stream #` lines contain kernels and copies. The CPU backend has none: its operations are
events of host threads with the statistics `hlo_op` and `device_ordinal` (thread names differ between versions).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.explain.trace.wire import MISSING, Line, Plane, Space, read_space

WANTED = frozenset(
    {"hlo_op", "hlo_module", "program_id", "run_id", "device_ordinal", "correlation_id", "step_num", "name", "tf_op"}
    | {"memcpy_details", "memset_details", "cuda_graph_id", "cuda_graph_exec_id"}
)
_DROPPED = re.compile(r"end: |ThreadpoolListener|Wait for |InvokeRendezvous|Rendezvous$|PythonRefManager")
_DEVICE_PLANE = re.compile(r"/device:GPU:(\d+)")
_SUFFIX = re.compile(r"-p(\d{5})$")

EPOCH_NS = 10**17
"""Times above this (year 1973) are wall-clock times."""
Kind = Literal["gpu", "cpu"]


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
    model: str | None = None
    """Model name in the trace, such as `NVIDIA H100 80GB HBM3`."""


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
      UserError: a file is missing, empty, truncated or not a profile; or no file contains device work.
    """
    hosts = [read_host(path, number) for number, path in enumerate(sorted(paths))]
    if not any(len(device.ops) for host in hosts for device in host.devices):
        raise UserError(f"{paths[0]} contains no device work: the profile was taken while no step ran")
    return hosts


def read_host(path: Path, number: int = 0) -> Host:
    """Read one file. `number`: the process, where the file name does not contain it."""
    return build_host(read_space(path, WANTED, lambda name: _DROPPED.match(name) is not None), path, number)


def build_host(space: Space, path: Path, number: int = 0) -> Host:
    """Build devices and threads from the lines of a file."""
    name = path.name.removesuffix(".xplane.pb")
    process = _SUFFIX.search(name)
    gpus = [(int(found.group(1)), plane) for plane in space.planes if (found := _DEVICE_PLANE.search(plane.name))]
    hosts = [plane for plane in space.planes if plane.name.startswith("/host:CPU")]
    host = Host(
        name=name,
        process=int(process.group(1)) if process else number,
        path=path,
        kind="gpu" if gpus else "cpu",
        zero_ns=_zero_ns(space),
        strings=space.strings,
        devices=[],
        threads=[],
    )
    for plane in hosts:
        for line in plane.lines:
            if not gpus and "hlo_op" in line.stats:
                rest = line.stats["hlo_op"] == MISSING
                host.threads.append(_events(line, rest))
            else:
                host.threads.append(_events(line, np.ones(len(line.names), bool)))
        plane.lines = [line for line in plane.lines if not gpus and "hlo_op" in line.stats]  # the rest was copied: free it
    host.threads = [thread for thread in host.threads if len(thread)]
    if gpus:
        host.devices = [_gpu(ordinal, plane) for ordinal, plane in sorted(gpus, key=lambda pair: pair[0])]
    else:
        host.devices = _cpus(hosts)
    return host


def _zero_ns(space: Space) -> int:
    """Return the wall-clock time of zero. Files of JAX count from the start of the capture, a statistic of one of the planes."""
    if space.base_ns > EPOCH_NS:
        return space.base_ns
    return space.base_ns + next((int(p.stats["profile_start_time"]) for p in space.planes if "profile_start_time" in p.stats), 0)


def _gpu(ordinal: int, plane: Plane) -> Device:
    """Return the kernels and copies of a GPU. Lines other than streams repeat them in another form, or belong to the profiler."""
    streams = [line for line in plane.lines if line.name.startswith("Stream")]
    lines = streams or [line for line in plane.lines if line.name == "XLA Ops"]
    model = plane.stats.get("gpu_device_name")
    plane.lines = []
    return Device(ordinal, _ops(lines, [np.ones(len(line.names), bool) for line in lines]), None if model is None else str(model))


def _cpus(planes: list[Plane]) -> list[Device]:
    """Return the operations of the CPU backend by device: events with an `hlo_op`."""
    lines = [line for plane in planes for line in plane.lines if "hlo_op" in line.stats]
    masks = [line.stats["hlo_op"] != MISSING for line in lines]
    ordinals = [line.stats.get("device_ordinal", np.zeros(len(line.names), np.int64)) for line in lines]
    present = sorted({int(n) for mask, column in zip(masks, ordinals, strict=True) for n in np.unique(column[mask])})
    return [Device(max(n, 0), _ops(lines, [mask & (column == n) for mask, column in zip(masks, ordinals, strict=True)])) for n in present]


def _ops(lines: list[Line], masks: list[np.ndarray]) -> Ops:
    def stat(*keys: str) -> np.ndarray:
        columns = []
        for line, mask in zip(lines, masks, strict=True):
            column = np.full(len(line.names), MISSING, np.int32)
            for key in keys:
                if key in line.stats:
                    column = np.where(column == MISSING, line.stats[key], column)  # widens the type where needed
            columns.append(column[mask])
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
