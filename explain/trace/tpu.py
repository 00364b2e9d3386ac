"""Operations of TPUs. The line `XLA Ops` of a device has them one after another, named by the text of their instruction; what program and
run they belong to is in the line `XLA Modules`. Transfers that run beside them are in other lines, which are not read: of an asynchronous
collective or copy its start and the wait for its end count.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from ridgeline.explain.trace.wire import MISSING, Line, Plane
from ridgeline.hlo.protobuf import signed

_INSTRUCTION = re.compile(r"%?([\w.\-]+) = ")
_PROGRAM = re.compile(r"(.*)\((\d+)\)$")


def tpu_operations(plane: Plane, strings: list[str]) -> list[Line]:
    """Return the operations with the statistics that those of other devices have. New texts are appended to `strings`."""
    lines = [line for line in plane.lines if line.name == "XLA Ops"]
    modules = next((line for line in plane.lines if line.name == "XLA Modules"), None)
    for line in lines:
        line.stats |= {"hlo_op": _mapped(line.names, strings, lambda text: found[1] if (found := _INSTRUCTION.match(text)) else text)}
        if modules is not None and len(modules.names):
            line.stats |= _programs(line, modules, strings)
    return lines


def _programs(line: Line, modules: Line, strings: list[str]) -> dict[str, np.ndarray]:
    order = np.argsort(modules.start_ps, kind="stable")
    start, end = modules.start_ps[order], (modules.start_ps + modules.duration_ps)[order]
    index = np.searchsorted(start, line.start_ps, side="right") - 1
    inside = (index >= 0) & (line.start_ps < end[np.maximum(index, 0)])
    names = [strings[name] for name in modules.names[order].tolist()]
    matches = [_PROGRAM.match(name) for name in names]
    programs = np.array([signed(int(found[2])) if found and int(found[2]) < 2**64 else MISSING for found in matches], np.int64)
    module = _mapped(modules.names[order], strings, lambda text: found[1] if (found := _PROGRAM.match(text)) else text)
    runs = modules.stat("run_id")[order].astype(np.int64)
    if (runs == MISSING).any():
        runs = np.arange(len(start))  # every event of the line is a run
    columns = {"hlo_module": module.astype(np.int64), "program_id": programs, "run_id": runs}
    return {key: np.where(inside, column[np.maximum(index, 0)], MISSING) for key, column in columns.items()}


def _mapped(names: np.ndarray, strings: list[str], rename: Callable[[str], str]) -> np.ndarray:
    """Return the indices of the renamed texts."""
    distinct, inverse = np.unique(names, return_inverse=True)
    found: dict[str, int] = {}
    for old in distinct.tolist():
        text = rename(strings[old])
        if text not in found:
            found[text] = len(strings)
            strings.append(text)
    return np.array([found[rename(strings[old])] for old in distinct.tolist()], np.int32)[inverse.ravel()]
