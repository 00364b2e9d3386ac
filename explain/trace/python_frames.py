"""The Python functions that a host thread ran: frames of JAX's Python tracer, and where the thread was while devices were idle.

The tracer records a call as `$train.py:42 next_batch` (base name of the file and first line of the function) and a call of a C function as
`$time sleep`. A frame is the user's own unless its file belongs to JAX or Python, or a compiled function was being called around it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ridgeline.explain.trace import intervals
from ridgeline.explain.trace.ledger import PS
from ridgeline.explain.trace.load import Frames
from ridgeline.explain.trace.read import Events, Host
from ridgeline.rundir.analysis import IdleSource

_FRAME = re.compile(r"\$?(?P<file>[^\s:$]+\.py):(?P<line>\d+)(?: (?P<function>\S+)|:)")
_CALL = re.compile(r"PjitFunction\(")
_JAX = frozenset(
    (
        "abstract_arrays",
        "api",
        "api_util",
        "array",
        "array_constructors",
        "array_creation",
        "array_methods",
        "basearray",
        "compiler",
        "config",
        "core",
        "dispatch",
        "dtypes",
        "einsum",
        "fromnumeric",
        "indexing",
        "lax",
        "lax_numpy",
        "linear_util",
        "mlir",
        "numerictypes",
        "partial_eval",
        "pjit",
        "prng",
        "profiler",
        "pxla",
        "reductions",
        "tensor_contractions",
        "traceback_util",
        "tree_util",
        "ufunc_api",
        "ufuncs",
        "util",
        "weakref_lru_cache",
        "xla_bridge",
    )
)
"""Files of JAX and numpy that are between user code and a compiled function."""
_LIBRARY = re.compile(r"(site-packages|dist-packages|lib/python3|/jax/|jax/_src)")
MOST_SOURCES = 10
"""Places that are reported."""
MOST_GAPS = 1000
"""Longest gaps that are looked up in the samples."""


def own_frame(name: str) -> str | None:
    """Return `file:line` of the user's frame in the name of an event; None for another event."""
    found = _FRAME.match(name)
    if found is None or _LIBRARY.search(found["file"]):
        return None
    stem = found["file"].rpartition("/")[2].removesuffix(".py")
    return None if stem in _JAX or stem in sys.stdlib_module_names else f"{found['file']}:{found['line']}"


def any_frame(name: str) -> str | None:
    """Return `file:line` of the frame in the name of an event, the user's or not; None for another event."""
    found = _FRAME.match(name)
    return None if found is None else f"{found['file']}:{found['line']}"


def idle_sources(
    host: Host, threads: Sequence[Events], idle: np.ndarray, causes: Mapping[str, np.ndarray], sampled: Frames | None
) -> list[IdleSource]:
    """Return where the main thread was while all devices of its host were idle, longest first.

    Args:
      host: the trace.
      threads: the main thread, or several where it is unknown.
      idle: when no device had work: disjoint intervals.
      causes: what the host was doing meanwhile.
      sampled: samples of the main thread, used where the trace has no Python frames.
    """
    if not len(idle):
        return []
    stretches = [piece for thread in threads for piece in _stretches(host, thread, idle)]
    if not stretches and sampled is not None and host.has_wall_clock:
        longest = idle[np.argsort(idle[:, 0] - idle[:, 1], kind="stable")][:MOST_GAPS]
        for low, high in longest.tolist():
            line = sampled.most_often(host.zero_ns + low // 1000, host.zero_ns + high // 1000)
            stretches += [] if line is None else [(low, high, line)]
    by_source: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for low, high, source in stretches:
        by_source[source].append((low, high))
    found = []
    for source, pieces in by_source.items():
        start, end = np.array(pieces, np.int64).T
        mine = intervals.intersect(intervals.union(start, end), idle)
        if not len(mine):
            continue
        parts = Counter({cause: intervals.total(intervals.intersect(mine, times)) for cause, times in causes.items()})
        parts["other"] = intervals.total(mine) - parts.total()
        found.append(IdleSource(source, parts.most_common(1)[0][0], intervals.total(mine) * PS, len(mine)))
    return sorted(found, key=lambda each: -each.idle_s)[:MOST_SOURCES]


def _stretches(host: Host, thread: Events, idle: np.ndarray) -> list[tuple[int, int, str]]:
    """Return (start, end, place) of the innermost own frames of a thread; those without idle time are left out."""
    places: dict[int, str] = {}
    calls: list[int] = []
    for index in np.unique(thread.name).tolist():
        name = host.strings[index]
        if _CALL.match(name):
            calls.append(index)
        elif (line := own_frame(name)) is not None and (frame := _FRAME.match(name)) is not None:
            places[index] = f"{line} {frame['function']}" if frame["function"] else line
    in_calls = np.isin(thread.name, calls)
    called = intervals.union(thread.start[in_calls], thread.end[in_calls])
    rows = np.flatnonzero(np.isin(thread.name, list(places)))
    start, end = thread.start[rows], thread.end[rows]
    keep = (intervals.covered(start, end, idle) > 0) & (intervals.covered(start, start + 1, called) == 0)
    found: list[tuple[int, int, str]] = []
    stack: list[tuple[int, str]] = []
    now = 0
    for begin, stop, name in zip(start[keep].tolist(), end[keep].tolist(), thread.name[rows[keep]].tolist(), strict=True):
        now = _unwind(stack, found, now, begin)
        if stack and begin > now:
            found.append((now, begin, stack[-1][1]))
        stack.append((stop, places[name]))
        now = max(now, begin)
    _unwind(stack, found, now, sys.maxsize)
    return found


def _unwind(stack: list[tuple[int, str]], found: list[tuple[int, int, str]], now: int, until: int) -> int:
    """Close the frames that end before a time, each with the stretch since `now`; return the new `now`."""
    while stack and stack[-1][0] <= until:
        stop, place = stack.pop()
        if stop > now:
            found.append((now, stop, place))
            now = stop
    return now
