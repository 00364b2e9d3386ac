"""One trace of everything, for ui.perfetto.dev and chrome://tracing: devices by stream, host threads, phases of the run, memory.

Device and host times are those of the capture, hosts aligned on the collectives that they share; phases of the run are those of its event
log, on the same wall clock. A capture without wall-clock times has no phases.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ridgeline.configs.errors import UserError
from ridgeline.explain.gantt import perfetto_trace
from ridgeline.explain.trace.allocators import by_allocator
from ridgeline.explain.trace.classify import COMMUNICATION, COMPUTE, COPY, kinds
from ridgeline.explain.trace.load import Profile
from ridgeline.explain.trace.read import Device, Host
from ridgeline.explain.trace.wire import MILLION, MISSING
from ridgeline.rundir.analysis import Analysis

_KINDS = {COMPUTE: "compute", COMMUNICATION: "communication", COPY: "copy"}
_FIRST_DEVICE, _FIRST_THREAD = 1000, 10
"""Numbers of processes and threads in the trace: phases of process n are process n, its devices follow from 1000 n + 1000."""


def write_perfetto(profile: Profile, analysis: Analysis, path: Path) -> None:
    """Write the trace; compressed when the name ends in `.gz`.

    Raises:
      UserError: the file cannot be written.
    """
    try:
        with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
            _write(file, trace_events(profile, analysis))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def trace_events(profile: Profile, analysis: Analysis) -> Iterator[dict[str, Any]]:
    """Yield the events in Chrome's trace event format; times in microseconds since the first."""
    hosts = [each.host for each in profile.hosts]
    clock = all(host.has_wall_clock for host in hosts)
    events = profile.capture.run.events if profile.capture.run is not None and clock else []
    first = min(host.zero_ns for host in hosts)
    phases = perfetto_trace(events)
    origin_ns = min(first, round(phases["otherData"]["origin_s"] * 1e9)) if events else first
    shift_us = (phases["otherData"]["origin_s"] - origin_ns / 1e9) * 1e6 if events else 0.0
    for event in phases["traceEvents"]:
        yield (event | {"ts": event["ts"] + shift_us}) if "ts" in event else event
    for number, host in enumerate(hosts):
        zero_us = (host.zero_ns - origin_ns) / 1e3 - analysis.clock_offsets_s.get(host.name, 0.0) * 1e6
        if not events:
            yield _name("process_name", host.process, 0, host.name)
        yield from _threads(host, zero_us)
        yield from _memory(host, zero_us)
        for device in host.devices:
            pid = _FIRST_DEVICE * (number + 1) + device.ordinal
            yield _name("process_name", pid, 0, host.label(device))
            yield from _device(profile, host, device, pid, zero_us)


def _threads(host: Host, zero_us: float) -> Iterator[dict[str, Any]]:
    for number, thread in enumerate(host.threads):
        tid = _FIRST_THREAD + number
        yield _name("thread_name", host.process, tid, thread.thread)
        for name, start, end, step in zip(
            thread.name.tolist(), thread.start.tolist(), thread.end.tolist(), thread.step.tolist(), strict=True
        ):
            args = {} if step == MISSING else {"step": step}
            yield _event(host.strings[name], "host", host.process, tid, zero_us + start / 1e6, (end - start) / 1e6, args)


def _memory(host: Host, zero_us: float) -> Iterator[dict[str, Any]]:
    """Yield the memory in use of every allocator, and its fragmentation, after every event."""
    for name, events in by_allocator(host.memory_events, host.strings):
        for time, in_use, share in zip(events.time.tolist(), events.in_use.tolist(), events.fragmentation.tolist(), strict=True):
            at = {"ph": "C", "pid": host.process, "ts": zero_us + time / 1e6}
            yield at | {"name": f"{name}: memory in use", "args": {"bytes": in_use}}
            if share != MISSING:
                yield at | {"name": f"{name}: fragmentation", "args": {"share": share / MILLION}}


def _device(profile: Profile, host: Host, device: Device, pid: int, zero_us: float) -> Iterator[dict[str, Any]]:
    ops = device.ops
    found = kinds(ops, host, profile.programs)
    for stream in np.unique(ops.stream).tolist():
        yield _name("thread_name", pid, stream, f"stream {stream}")
    known: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in range(len(ops)):
        key = int(ops.module[row]), int(ops.program[row]), int(ops.op[row])
        if key not in known:
            known[key] = _described(profile, host, *key)
        start, end = int(ops.start[row]), int(ops.end[row])
        name = known[key].get("operation") or host.strings[int(ops.name[row])]
        args = known[key] | {"kernel": host.strings[int(ops.name[row])]}
        live = args.pop("live_bytes", None)
        if live is not None:
            yield {"ph": "C", "name": "program memory", "pid": pid, "ts": zero_us + start / 1e6, "args": {"bytes": live}}
        yield _event(
            name, _KINDS.get(int(found[row]), "other"), pid, int(ops.stream[row]), zero_us + start / 1e6, (end - start) / 1e6, args
        )


def _described(profile: Profile, host: Host, module: int, program: int, op: int) -> dict[str, Any]:
    """Return what is known of an instruction."""
    if op == MISSING:
        return {}
    key = host.program_key(module, program)
    found = profile.programs.find(key)
    kernel = None if found is None else found.kernels.get(host.strings[op])
    described: dict[str, Any] = {"operation": host.strings[op], "program": profile.programs.label(key)}
    live = None if found is None else found.live_bytes.get(host.strings[op])
    if live is not None:
        described["live_bytes"] = live
    if kernel is not None:
        source = None if kernel.source is None else f"{kernel.source.file}:{kernel.source.line}"
        flops = "unknown" if kernel.unknown_flops else kernel.flops
        described |= {"component": kernel.component, "pass": kernel.part, "flops": flops, "bytes": kernel.bytes, "source": source}
    return described


def _event(name: str, category: str, pid: int, tid: int, ts: float, dur: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _write(file: TextIO, events: Iterator[dict[str, Any]]) -> None:
    """Write event by event: the list of a large trace would take many times the memory of its columns."""
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for number, event in enumerate(events):
        file.write((",\n" if number else "\n") + json.dumps(event))
    file.write("\n]}\n")
