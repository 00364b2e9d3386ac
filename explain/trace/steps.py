"""Steps: what marks them, the assignment of operations to them, and the start and end of a step on a device.

What marks the steps:

* annotations with a step number (`jax.profiler.StepTraceAnnotation`). Of several names, the one that launches the main program: the program
  with the most device time. Work of the other annotations on that thread belongs to no step;
* without annotations, the executions of the main program, where it has most of the device time;
* else nothing: the whole time of a device is one stretch, and not a step.

A step is one window: numbers may repeat (every epoch may count from 0), so windows are identified by Windows.key.

The host runs ahead of the device, so the start time of an operation does not determine its step. Methods, the most reliable first:

* launch correlation: the `correlation_id` of the operation gives its launch on the host, which is in (or after) the annotation of a step;
* run id: the `run_id` of the operation gives the host's call of the program (not with a single CPU device, where only the executor has the
  id);
* program id: the n-th execution of the main program is the n-th step;
* time: the last annotation that began before the operation.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Literal

import numpy as np

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.explain.trace.classify import NOTHING
from ridgeline.explain.trace.read import Device, Events, Host, Ops, ProgramKey
from ridgeline.explain.trace.wire import MISSING

Method = Literal["launch correlation", "run id", "program id", "time", "executions", "whole span"]
_EXECUTOR = re.compile(r"ThunkExecutor::")
ENOUGH = 0.9
"""A method must cover this share of the operations of a device to be used."""
MAIN = 0.5
"""Executions of a program stand for steps when it has this share of the device time."""
SIGNIFICANT, SIGNIFICANT_TIME = 0.1, 0.02
"""Operations that run equally often, are this share of a program's and take this share of its time, show the number of its executions;
fewer may be a branch that is rarely taken. With three times the share their time does not matter."""


@dataclass(frozen=True)
class Markers:
    """The step annotations of a thread of a host, in order of time."""

    step: np.ndarray
    """int64 [S]: step numbers."""
    start: np.ndarray
    end: np.ndarray
    chosen: np.ndarray
    """bool [S]: annotations of steps; the others take place between steps."""
    thread: int
    """Index into Host.threads."""


@dataclass(frozen=True)
class Windows:
    """The steps of one device: step[i] is the time from start[i] to end[i]; they do not overlap."""

    step: np.ndarray
    """int64 [S]: their numbers; MISSING where they have none."""
    start: np.ndarray
    end: np.ndarray
    of_op: np.ndarray
    """int64 [n]: index into `step` of every operation, or MISSING."""
    method: Method
    covered: float
    """Share of the operations that the method assigned directly."""
    key: np.ndarray
    """int64 [S]: identifies a step on all devices, ascending in time."""


Classified = Sequence[tuple[Host, Device, np.ndarray]]
"""The devices that have work: their host, and the kinds of their operations."""


def main_program(devices: Classified) -> tuple[ProgramKey, float] | None:
    """Return the program with the most device time, and its share of the time of all operations; None when the trace names no program."""
    time: dict[ProgramKey, int] = defaultdict(int)
    all_ps = 0
    for host, device, kinds in devices:
        ops = device.ops.take(kinds != NOTHING)
        spent = (ops.end - ops.start).astype(float)
        all_ps += int(spent.sum())
        pairs, which = np.unique(np.stack([ops.module, ops.program]), axis=1, return_inverse=True)
        for (module, program), ps in zip(pairs.T.tolist(), np.bincount(which.ravel(), spent).tolist(), strict=True):
            if module != MISSING or program != MISSING:
                time[host.program_key(module, program)] += int(ps)
    if not time or not all_ps:
        return None
    main = max(time, key=lambda key: time[key])
    return main, time[main] / all_ps


def step_annotations(devices: Classified, main: ProgramKey | None) -> dict[str, float]:
    """Return the names of the step annotations, the best first: name -> share of the main program's device time that it launches.

    A launch belongs to the innermost annotation around it, or to the last that began before. Where the trace does not contain launches, the
    calls of the function from Python count; without those the start of the operation, unless exactly one name has as many annotations as
    the program has executions.
    """
    launched: dict[str, float] = defaultdict(float)
    found: dict[str, int] = defaultdict(int)
    for host, device, _ in devices:
        marks = _marks(host)
        if not marks:
            continue
        names = sorted({name for _, name in marks})
        for _, name in marks:
            found[name] += 1
            launched[name] += 0.0
        ops = device.ops.take(_of_program(host, device.ops, main)) if main is not None else device.ops
        spent = (ops.end - ops.start).astype(float)
        times, _, _ = _launches(host, ops)
        calls = np.zeros(0, np.int64) if main is None or times is not None else _calls(host, main)
        if len(calls):
            times, spent = calls, np.full(len(calls), spent.sum() / len(calls))
        if times is None:
            runs = len(_execution_starts(ops))
            fitting = [name for name in names if sum(len(rows) for (_, other), rows in marks.items() if other == name) == runs]
            if len(fitting) == 1:
                launched[fitting[0]] += float(spent.sum())
                continue
        owner = _innermost(host, marks, names, ops.start if times is None else times)
        for index, name in enumerate(names):
            launched[name] += float(spent[owner == index].sum())
    whole = sum(launched.values()) or 1.0
    return {name: launched[name] / whole for name in sorted(found, key=lambda name: (-launched[name], -found[name], name))}


def find_markers(host: Host, name: str) -> Markers | None:
    """Return the step annotations of a host: those called `name`, on the thread with the most of them, and those of other names on that
    thread that overlap none of them. None without any of the name."""
    marks = _marks(host)
    mine = {thread: rows for (thread, other), rows in marks.items() if other == name}
    if not mine:
        return None
    thread = max(mine, key=lambda index: len(mine[index]))
    events, rows = host.threads[thread], _outermost(host.threads[thread], mine[thread])
    others = np.concatenate([found for (where, other), found in marks.items() if where == thread and other != name] or [rows[:0]])
    before = np.searchsorted(events.start[rows], events.end[others], side="left") - 1  # the last that begins before the end of the other
    others = others[(before < 0) | (events.end[rows][np.maximum(before, 0)] <= events.start[others])]
    every = np.sort(np.concatenate([rows, _outermost(events, np.sort(others))]))
    return Markers(events.step[every].astype(np.int64), events.start[every], events.end[every], np.isin(every, rows), thread)


def choose(found: Mapping[str, float], name: str | None) -> str | None:
    """Return the annotation to use: the given name, else the best; None where there is none. Raises UserError for an unknown name."""
    if name is not None and not found:
        raise UserError(f"the trace has no step annotations, so none '{name}'; jax.profiler.StepTraceAnnotation makes them")
    if name is not None and name not in found:
        raise unknown_name("step annotation", name, list(found))
    return name or next(iter(found), None)


def assign(host: Host, device: Device, markers: Markers, main: ProgramKey | None) -> Windows:
    """Place the operations of a device in steps and cut its time into them. `main`: from main_program."""
    ops = device.ops
    of_op, method, covered = _steps_of_ops(host, ops, markers, main)
    start, end = _bounds(ops, of_op, markers)
    index = np.where(markers.chosen, np.cumsum(markers.chosen) - 1, MISSING)
    of_op = np.where(of_op >= 0, index[np.maximum(of_op, 0)], MISSING)
    mine = markers.chosen
    return Windows(markers.step[mine], start[mine], end[mine], of_op, method, covered, np.arange(int(mine.sum())))


def assign_executions(host: Host, device: Device, main: ProgramKey) -> Windows | None:
    """Make every execution of the main program a step, until the next begins; None where the device does not run it.

    Work before the first execution and after the last belongs to none.
    """
    ops = device.ops
    rows = _of_program(host, ops, main)
    start = _execution_starts(ops.take(rows))
    if not len(start):
        return None
    last = int(ops.end[rows].max())
    of_op = np.searchsorted(start, ops.start, side="right") - 1
    of_op = np.where((of_op < 0) | (ops.start >= last), MISSING, of_op)
    end = np.append(start[1:], last)
    return Windows(np.full(len(start), MISSING), start, end, of_op, "executions", float(rows.mean()), np.arange(len(start)))


def whole_span(ops: Ops) -> Windows:
    """Return one window from the first to the last operation of a device."""
    start, end = np.array([ops.start.min()], np.int64), np.array([ops.end.max()], np.int64)
    return Windows(np.array([MISSING]), start, end, np.zeros(len(ops), np.int64), "whole span", 1.0, np.zeros(1, np.int64))


def match(windows: Sequence[Windows]) -> list[Windows]:
    """Give equal keys to the same steps on all devices, which are found by their numbers and order; executions by their order."""
    reference = windows[0].step.tolist()
    matched = []
    for mine in windows:
        steps = mine.step.tolist()
        key = np.arange(len(steps))
        if steps != reference and not (mine.step == MISSING).all():
            key += len(reference)  # on this device only
            for block in SequenceMatcher(None, reference, steps, autojunk=False).get_matching_blocks():
                key[block.b : block.b + block.size] = np.arange(block.a, block.a + block.size)
        matched.append(replace(mine, key=key))
    return matched


def _marks(host: Host) -> dict[tuple[int, str], np.ndarray]:
    """Return (index of the thread, name) -> rows of the events with a step number."""
    found: dict[tuple[int, str], np.ndarray] = {}
    for index, thread in enumerate(host.threads):
        rows = np.flatnonzero(thread.step != MISSING)
        for name in np.unique(thread.name[rows]).tolist():
            found[index, host.strings[name]] = rows[thread.name[rows] == name]
    return found


def _outermost(events: Events, rows: np.ndarray) -> np.ndarray:
    """Return the rows, in order of their start, that are inside no earlier one."""
    reach = np.maximum.accumulate(events.end[rows])
    return rows[np.append(True, events.start[rows][1:] >= reach[:-1])] if len(rows) else rows


def _innermost(host: Host, marks: Mapping[tuple[int, str], np.ndarray], names: Sequence[str], times: np.ndarray) -> np.ndarray:
    """Return the index of the name of the innermost annotation around each time; of the last one before where none is around it; else
    MISSING."""
    owner, begun, inside = np.full(len(times), MISSING), np.full(len(times), MISSING, np.int64), np.zeros(len(times), bool)
    for (thread, name), rows in marks.items():
        events = host.threads[thread]
        index = np.searchsorted(events.start[rows], times, side="right") - 1
        start = np.where(index >= 0, events.start[rows][np.maximum(index, 0)], MISSING)
        around = (index >= 0) & (events.end[rows][np.maximum(index, 0)] > times)
        better = (index >= 0) & ((around & ~inside) | ((around == inside) & (start > begun)))
        owner = np.where(better, names.index(name), owner)
        begun, inside = np.where(better, start, begun), inside | around
    return owner


def _calls(host: Host, program: ProgramKey) -> np.ndarray:
    """Return when Python called the function of a program."""
    name = f"PjitFunction({program.module.removeprefix('jit_')})"
    index = host.strings.index(name) if name in host.strings else MISSING
    return np.concatenate([thread.start[thread.name == index] for thread in host.threads])


def _of_program(host: Host, ops: Ops, program: ProgramKey) -> np.ndarray:
    """Return the mask of the operations of a program."""
    pairs, which = np.unique(np.stack([ops.module, ops.program]), axis=1, return_inverse=True)
    return np.array([host.program_key(*pair) == program for pair in pairs.T.tolist()], bool)[which.ravel()]


def _execution_starts(ops: Ops, expected: int | None = None) -> np.ndarray:
    """Return when each execution of a program begins.

    Executions are distinguished by their run ids; else by the first of the operations that run once per execution. An operation is an
    instruction and a kernel, as an instruction may launch several kernels. Those in loops run more often, those in branches less often.

    Args:
      ops: the operations of the program on one device.
      expected: the number of executions, where it is known.
    """
    if not len(ops):
        return np.zeros(0, np.int64)
    if (ops.run != MISSING).all():
        return np.sort(ops.start[np.unique(ops.run, return_index=True)[1]])
    _, first, which, count = np.unique(np.stack([ops.op, ops.name]), axis=1, return_index=True, return_inverse=True, return_counts=True)
    often, group = np.unique(count, return_inverse=True)
    share = np.bincount(group.ravel()) / len(count)
    spent = np.bincount(group.ravel()[which.ravel()], weights=(ops.end - ops.start).astype(float))
    usual = often[((share >= SIGNIFICANT) & (spent >= SIGNIFICANT_TIME * spent.sum())) | (share >= 3 * SIGNIFICANT)]
    least = int((usual if len(usual) else often).min())
    once = (count == least) | ((count == least + 1) & (least > 1))  # a trace that is cut within an execution has one more of some
    if (count == expected).any():
        once = count == expected
    anchor = np.flatnonzero(once)[np.argmin(ops.start[first[once]])]
    return np.sort(ops.start[which.ravel() == anchor])


def _launches(host: Host, ops: Ops) -> tuple[np.ndarray | None, Method, float]:
    """Return the time of the host at which each operation was launched (MISSING where unknown), how it was found, and the share of the
    operations for which it was; None where it is known for too few."""
    evidence: tuple[tuple[Method, np.ndarray], ...] = (
        ("launch correlation", _looked_up(ops.correlation, [(t.correlation, t) for t in host.threads])),
        ("run id", _looked_up(ops.run, [(_launched_runs(host, t), t) for t in host.threads])),
    )
    for method, times in evidence:
        share = float((times != MISSING).mean()) if len(times) else 0.0
        if share >= ENOUGH:
            return times, method, share
    return None, "time", 1.0


def _steps_of_ops(host: Host, ops: Ops, markers: Markers, main: ProgramKey | None) -> tuple[np.ndarray, Method, float]:
    times, method, _ = _launches(host, ops)
    if times is not None:
        of_op = _step_at(markers, times)
        if (share := float((of_op != MISSING).mean())) >= ENOUGH:
            return _filled(of_op), method, share
    by_program = _by_program(host, ops, markers, main)
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


def _filled(of_op: np.ndarray) -> np.ndarray:
    """Assign operations without a step to the step of the operation before."""
    rows = np.where(of_op != MISSING, np.arange(len(of_op)), 0)
    return of_op[np.maximum.accumulate(rows)]


def _by_program(host: Host, ops: Ops, markers: Markers, main: ProgramKey | None) -> np.ndarray | None:
    """Assign the n-th execution of the main program to the n-th step, if there are as many, and what follows it to the same step, or to the
    annotation between it and the next step. None otherwise."""
    if main is None:
        return None
    rows, steps = _of_program(host, ops, main), np.flatnonzero(markers.chosen)
    starts = _execution_starts(ops.take(rows), len(steps))
    if len(starts) != len(steps):
        return None
    run = np.searchsorted(starts, ops.start, side="right") - 1
    done = np.full(len(steps), MISSING, np.int64)
    np.maximum.at(done, np.maximum(run[rows], 0), ops.end[rows])
    foreign = np.append(~markers.chosen, False)
    after = foreign[steps + 1][run] & (ops.start >= done[run]) & (run >= 0)
    return np.where(run < 0, max(int(steps[0]) - 1, 0), steps[run] + after)


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
