"""Executions of instructions. One execution may launch several kernels (cuDNN's attention backward: three), which count once.

An instruction runs as often as its program runs, times the loops around it (`Program.runs`). Where that does not divide the number of its
kernels (branches, loops of unknown length, no HLO), the kernels' names do: each execution launches the same kernels, so the executions are
the greatest common divisor of their counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ridgeline.explain.trace.program import Programs
from ridgeline.explain.trace.read import Host, Ops, ProgramKey
from ridgeline.explain.trace.wire import MISSING


@dataclass(frozen=True)
class Executed:
    """One instruction on one device; work without an instruction: one kernel."""

    key: ProgramKey
    op: str
    """HLO instruction; '' without one."""
    name: str
    """Of the kernel that takes the most time."""
    path: str
    """Scope in the trace; '' where it has none."""
    rows: np.ndarray
    """Its kernels, in order of their start: int64 [kernels]."""
    count: int
    """Executions; they divide the kernels into as many equal parts."""

    @property
    def first(self) -> np.ndarray:
        """Index of the first kernel of every execution: int64 [count]."""
        return np.arange(self.count) * (len(self.rows) // self.count)


def executions(host: Host, ops: Ops, programs: Programs) -> Iterator[Executed]:
    """Yield the instructions of the operations of a device."""
    if not len(ops):
        return
    bare = ops.op == MISSING
    columns = np.stack([ops.module, ops.program, ops.op, np.where(bare, ops.name, MISSING), np.where(bare, ops.scope, MISSING)])
    distinct, inverse = np.unique(columns, axis=1, return_inverse=True)
    inverse = inverse.ravel()
    order = np.argsort(inverse, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(inverse))[:-1])
    keys = [host.program_key(module, program) for module, program in distinct[:2].T.tolist()]
    common = [_common(ops.name[rows]) for rows in parts]
    texts = [("" if op == MISSING else host.strings[op]) for op in distinct[2].tolist()]
    runs = _program_runs(programs, keys, texts, common)
    for key, op, rows, fallback in zip(keys, texts, parts, common, strict=True):
        program = programs.find(key)
        each = None if program is None else program.runs.get(op)
        expected = round(each * runs[key]) if each is not None and key in runs else 0
        count = fallback if not op else expected if expected and len(rows) % expected == 0 else fallback
        spent = np.bincount(np.unique(ops.name[rows], return_inverse=True)[1], weights=(ops.end - ops.start)[rows])
        name = int(np.unique(ops.name[rows])[spent.argmax()])
        path = int(ops.scope[rows[0]])
        yield Executed(key, op, host.strings[name], "" if path == MISSING else host.strings[path], rows, len(rows) if not op else count)


def _common(names: np.ndarray) -> int:
    """Return the greatest common divisor of how often each kernel occurs."""
    return math.gcd(*np.unique(names, return_counts=True)[1].tolist())


def _program_runs(programs: Programs, keys: list[ProgramKey], ops: list[str], common: list[int]) -> dict[ProgramKey, float]:
    """Return program -> its runs: what most of its instructions show."""
    votes: dict[ProgramKey, Counter[float]] = {}
    for key, op, count in zip(keys, ops, common, strict=True):
        program = programs.find(key)
        each = None if program is None else program.runs.get(op)
        if each and count % each == 0:
            votes.setdefault(key, Counter())[count / each] += 1
    return {key: found.most_common(1)[0][0] for key, found in votes.items()}
