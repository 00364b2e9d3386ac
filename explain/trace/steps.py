"""Steps: the assignment of operations to steps, and the start and end of a step on a device.

The host runs ahead of the device, so the start time of an operation does not determine its step. Methods, the most reliable first:

* launch correlation: the `correlation_id` of the operation gives its launch on the host, which is in (or after) the annotation of a step;
* run id: the `run_id` of the operation gives the host's call of the program (not with a single CPU device, where only the executor has the
  id);
* program id: the n-th execution of the main program is the n-th step;
* time: the last annotation that began before the operation.

Without annotations the whole span of the devices is one step.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ridgeline.explain.trace.read import Device, Events, Host, Ops
from ridgeline.explain.trace.wire import MISSING

Method = Literal["launch correlation", "run id", "program id", "time", "whole span"]
_EXECUTOR = re.compile(r"ThunkExecutor::")
ENOUGH = 0.9
"""A method must cover this share of the operations of a device to be used."""


@dataclass(frozen=True)
class Markers:
    """The annotations of steps on a host, in order of time."""

    step: np.ndarray
    """int64 [S]: step numbers."""
    start: np.ndarray
    end: np.ndarray
    thread: str


@dataclass(frozen=True)
class Windows:
    """The steps of one device: step[i] is the time from start[i] to end[i]; they do not overlap."""

    step: np.ndarray
    """int64 [S]; MISSING for the whole span."""
    start: np.ndarray
    end: np.ndarray
    of_op: np.ndarray
    """int64 [n]: index into `step` of every operation, or MISSING."""
    method: Method
    covered: float
    """Share of the operations that the method assigned directly."""


def find_markers(host: Host) -> Markers | None:
    """Return the step annotations (events with `step_num`) of the thread with the most of them; None without any."""
    found = [(thread, np.flatnonzero(thread.step != MISSING)) for thread in host.threads]
    found = [(thread, rows) for thread, rows in found if len(rows)]
    if not found:
        return None
    thread, rows = max(found, key=lambda pair: len(pair[1]))
    name = Counter(thread.name[rows].tolist()).most_common(1)[0][0]
    rows = rows[thread.name[rows] == name]
    return Markers(thread.step[rows], thread.start[rows], thread.end[rows], thread.thread)


def assign(host: Host, device: Device, markers: Markers | None) -> Windows:
    """Place the operations of a device in steps and cut its time into them."""
    ops = device.ops
    if markers is None:
        every = [d.ops for d in host.devices if len(d.ops)]
        span = min(int(o.start.min()) for o in every), max(int(o.end.max()) for o in every)
        return Windows(np.array([MISSING]), np.array([span[0]]), np.array([span[1]]), np.zeros(len(ops), np.int64), "whole span", 1.0)
    of_op, method, covered = _steps_of_ops(host, ops, markers)
    start, end = _bounds(ops, of_op, markers)
    return Windows(markers.step, start, end, of_op, method, covered)


def _steps_of_ops(host: Host, ops: Ops, markers: Markers) -> tuple[np.ndarray, Method, float]:
    by_launch = _step_at(markers, _looked_up(ops.correlation, [(t.correlation, t) for t in host.threads]))
    share = _share(by_launch)
    if share >= ENOUGH:
        return _filled(by_launch), "launch correlation", share
    by_run = _step_at(markers, _looked_up(ops.run, [(_launched_runs(host, t), t) for t in host.threads]))
    share = _share(by_run)
    if share >= ENOUGH:
        return _filled(by_run), "run id", share
    by_program = _by_program(ops, markers)
    if by_program is not None:
        return by_program, "program id", 1.0
    return _step_at(markers, ops.start), "time", 1.0


def _launched_runs(host: Host, thread: Events) -> np.ndarray:
    """Return the run ids of the launches of a thread, without the waits of an executor, which have the id too but are much later."""
    waits = [n for n in np.unique(thread.name).tolist() if _EXECUTOR.match(host.strings[n])]
    return np.where(np.isin(thread.name, waits), MISSING, thread.run)


def _looked_up(ids: np.ndarray, threads: list[tuple[np.ndarray, Events]]) -> np.ndarray:
    """Return the earliest host time at which each id occurs; MISSING where it does not."""
    known = [(column, events.start) for column, events in threads if len(column) and (column != MISSING).any()]
    if not known or not (ids != MISSING).any():
        return np.full(len(ids), MISSING, np.int64)
    keys = np.concatenate([column[column != MISSING] for column, _ in known])
    times = np.concatenate([start[column != MISSING] for column, start in known])
    order = np.lexsort((times, keys))
    keys, times = keys[order], times[order]
    where = np.minimum(np.searchsorted(keys, ids), len(keys) - 1)
    return np.where((keys[where] == ids) & (ids != MISSING), times[where], MISSING)


def _step_at(markers: Markers, times: np.ndarray) -> np.ndarray:
    """Return the index of the last annotation that began before each time; MISSING before the first and for missing times."""
    index = np.searchsorted(markers.start, times, side="right") - 1
    return np.where(times == MISSING, MISSING, index)


def _share(of_op: np.ndarray) -> float:
    return float((of_op != MISSING).mean()) if len(of_op) else 0.0


def _filled(of_op: np.ndarray) -> np.ndarray:
    """Assign operations without a step to the step of the operation before."""
    rows = np.where(of_op != MISSING, np.arange(len(of_op)), 0)
    return of_op[np.maximum.accumulate(rows)]


def _by_program(ops: Ops, markers: Markers) -> np.ndarray | None:
    """Split at the first operation of the main program that occurs once per step; None when there is none."""
    known = (ops.op != MISSING) & ((ops.program != MISSING) | (ops.module != MISSING))
    if not known.any():
        return None
    program = np.where(ops.program != MISSING, ops.program, ops.module)
    time = Counter[int]()
    values, index = np.unique(program[known], return_inverse=True)
    for value, spent in zip(values, np.bincount(index, weights=(ops.end - ops.start)[known]), strict=True):
        time[int(value)] = int(spent)
    main = known & (program == time.most_common(1)[0][0])
    names, first, count = np.unique(ops.op[main], return_index=True, return_counts=True)
    once = count == len(markers.step)
    if not once.any():
        return None
    starts = ops.start[main]
    anchor = names[once][np.argmin(starts[first[once]])]
    cuts = np.sort(ops.start[main & (ops.op == anchor)])
    return np.maximum(np.searchsorted(cuts, ops.start, side="right") - 1, 0)


def _bounds(ops: Ops, of_op: np.ndarray, markers: Markers) -> tuple[np.ndarray, np.ndarray]:
    """Return start and end of the steps. A step begins with its annotation or when the work of the step before ends, whichever is later; it
    ends where the next begins, the last one when both its annotation and its work are over."""
    done = np.full(len(markers.step), MISSING, np.int64)
    placed = of_op >= 0
    np.maximum.at(done, of_op[placed], ops.end[placed])
    done = np.maximum.accumulate(done)
    start = markers.start.copy()
    start[1:] = np.maximum(start[1:], done[:-1])
    start = np.maximum.accumulate(start)
    end = np.append(start[1:], max(int(markers.end[-1]), int(done[-1]), int(start[-1])))
    return start, end
