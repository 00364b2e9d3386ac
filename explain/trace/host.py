"""What a host was doing: causes of idle devices, launches and the queue, waits that starve the device, compilations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ridgeline.explain.trace import intervals
from ridgeline.explain.trace.frames import Frames
from ridgeline.explain.trace.ledger import PS
from ridgeline.explain.trace.read import Events, Host
from ridgeline.explain.trace.steps import Markers
from ridgeline.explain.trace.wire import MISSING
from ridgeline.rundir.recompilation import Change, Recompilation

ACTIVITIES: dict[str, re.Pattern[str]] = {
    "compile": re.compile(r".*([Cc]ompil(e|ation)|XlaLower|LowerTo|backend_compile)"),
    "checkpoint": re.compile(r".*(checkpoint|orbax|serializ|ridge\.save)", re.I),
    "data_wait": re.compile(r".*(DatasetIterator\.__next__|ridge\.data_wait|data_wait|DataLoader)"),
    "launch": re.compile(
        r"(PjitFunction|.*Execut|ParseArguments|shard_args|DevicePut|BufferFromHost|(cu|cuda|hip)(Graph)?(Mem|Launch)|.*LaunchKernel|cuLaunch)"
    ),
}
"""Cause -> names of host events. Earlier rows win where several go on at once."""
SYNC = re.compile(
    r"(np\.asarray\(jax\.Array\)|.*block_until_ready|.*BlockHostUntil|.*Await|.*ToLiteral|(cu|cuda|hip)\w*Synchronize|ArrayImpl\._value)"
)
_PYTHON = re.compile(r"\$?(?P<file>[^\s:$]+\.py):(?P<line>\d+)[ :]")
_LIBRARY = re.compile(r"(site-packages|/jax/|jax/_src|^(array|api|pjit|profiler|contextlib|threading)\.py)")
WAIT_S = 20e-6
"""A wait or a gap shorter than this counts for nothing."""
STARVED = 0.005
"""A wait starves the device when at least this share of a step passes without work because of it."""


@dataclass
class Sync:
    """Waits of the host for work of the device, at one place in the program, that left the device without work.

    The device works during the wait, ends before it does, and has nothing to do until the host launches again. Without the wait the host
    would have come earlier by as much as it waited for that work: so much of the idle time is due to the wait, the rest to whatever the
    host did then. Reading what has long been there while the device idles is no wait but work of the host.
    """

    what: str
    source: str
    """`file:line` of the innermost frame outside libraries, from Python frames in the trace or sampled beside it; else the enclosing
    annotation or `?`."""
    count: int = 0
    wait_s: float = 0.0
    idle_after_s: float = 0.0
    """Time the device had nothing to do because of them."""


@dataclass
class Compilation:
    """A program that was compiled while steps ran."""

    program: str
    """Its name; of one seen in the trace only, what the compiler calls it."""
    count: int
    duration_s: float
    step: int | None = None
    """None: seen in the trace only."""
    arguments: tuple[Change, ...] = ()
    """What differs from the compilation before, where that is known."""
    source: str | None = None
    captured: bool = True
    """Inside the analysed time."""


@dataclass
class HostReport:
    """What one host did during the analysed time."""

    host: str
    span_s: float
    launches: int
    """Kernels and copies on a GPU host; program calls on the CPU backend."""
    launches_per_s: float
    queue_depth_mean: float | None
    """Launched and not begun, over time; None when launches cannot be matched with operations."""
    launch_to_start_s: float | None
    """Mean time between the launch of an operation and its begin."""
    gaps: int
    """Stretches longer than 20 us without any work on the device, mean over devices."""
    longest_gap_s: float
    longest_gap_cause: str
    syncs: list[Sync] = field(default_factory=list)
    compilations: list[Compilation] = field(default_factory=list)
    """Seen in the trace; and those of the run's event log, anywhere in the run, with the arguments that changed."""
    waits_s: float = 0.0
    """All waits of the host for the device while it worked, harmless ones included."""


def main_thread(host: Host, markers: Markers | None) -> list[Events]:
    """Return the thread that runs the training loop: that of the steps; else the one that calls most programs; else all."""
    if markers is not None:
        return [t for t in host.threads if t.thread == markers.thread and (t.step != MISSING).any()]
    calls = [(sum(host.strings[n].startswith("PjitFunction") for n in t.name), t) for t in host.threads]
    most = max(calls, key=lambda pair: pair[0], default=(0, None))
    return [most[1]] if most[0] and most[1] is not None else list(host.threads)


def causes(host: Host, markers: Markers | None, phases: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, np.ndarray]:
    """Return when the host was doing what: disjoint interval sets by cause.

    Args:
      host: the trace.
      markers: its steps.
      phases: cause -> (start, end) in seconds since 1970, from the run's event log.
    """
    threads = main_thread(host, markers)
    launchers = [t for t in host.threads if (t.correlation != MISSING).any() and not any(t is other for other in threads)]
    found: dict[str, np.ndarray] = {}
    taken = intervals.EMPTY
    for cause, pattern in ACTIVITIES.items():
        sets = [_matching(host, t, pattern) for t in threads + (launchers if cause == "launch" else [])]
        sets += [_phase(host, start_s, end_s) for start_s, end_s in phases.get(cause, ())]
        mine = intervals.subtract(intervals.join(*sets), taken)
        found[cause] = mine
        taken = intervals.join(taken, mine)
    return found


def host_report(
    host: Host,
    markers: Markers | None,
    found: Mapping[str, np.ndarray],
    busy: Sequence[np.ndarray],
    span: tuple[int, int],
    steps: int,
    recompilations: Sequence[Recompilation] = (),
    frames: Frames | None = None,
) -> HostReport:
    """Describe a host.

    Args:
      host: the trace.
      markers: its steps.
      found: causes().
      busy: per device, when it had work.
      span: analysed time, picoseconds.
      steps: how many steps that is.
      recompilations: of this process, from the run's event log.
      frames: where its main thread was, sampled during the capture.
    """
    start, end = span
    span_s = (end - start) * PS
    launches = _launches(host, start, end)
    depth, delay_s = _queue(host, start, end)
    whole = np.array([[start, end]], np.int64)
    gaps = [intervals.subtract(whole, b) for b in busy]
    long = [g[(g[:, 1] - g[:, 0]) * PS > WAIT_S] for g in gaps]
    longest = max((g[np.argmax(g[:, 1] - g[:, 0])] for g in long if len(g)), key=lambda g: g[1] - g[0], default=None)
    cause = "none"
    if longest is not None:
        parts = {name: intervals.total(intervals.clip(s, int(longest[0]), int(longest[1]))) for name, s in found.items()}
        parts["other"] = int(longest[1] - longest[0]) - sum(parts.values())
        cause = max(parts, key=lambda name: parts[name])
    least_s = max(WAIT_S, STARVED * span_s / steps)
    syncs, waits_s = _syncs(host, main_thread(host, markers), intervals.join(*busy), (start, end), least_s, frames)
    return HostReport(
        host=host.name,
        span_s=span_s,
        launches=launches,
        launches_per_s=launches / span_s if span_s > 0 else 0.0,
        queue_depth_mean=depth,
        launch_to_start_s=delay_s,
        gaps=round(float(np.mean([len(g) for g in long]))) if long else 0,
        longest_gap_s=0.0 if longest is None else float(longest[1] - longest[0]) * PS,
        longest_gap_cause=cause,
        syncs=syncs,
        compilations=_compilations(host, start, end, recompilations),
        waits_s=waits_s,
    )


def _matching(host: Host, thread: Events, pattern: re.Pattern[str]) -> np.ndarray:
    names = [n for n in np.unique(thread.name).tolist() if pattern.match(host.strings[n])]
    rows = np.isin(thread.name, names)
    return intervals.union(thread.start[rows], thread.end[rows])


def _phase(host: Host, start_s: float, end_s: float) -> np.ndarray:
    """A phase of the event log on the clock of the trace."""
    if not host.has_wall_clock:
        return intervals.EMPTY
    low, high = (round((min(max(t - host.zero_ns / 1e9, -1e6), 1e6)) * 1e12) for t in (start_s, end_s))
    return np.array([[low, high]], np.int64) if high > low else intervals.EMPTY


def _launches(host: Host, start: int, end: int) -> int:
    pattern = re.compile(r".*(Launch|Memcpy|Memset)" if host.kind == "gpu" else r".*Execute \(")
    count = 0
    for thread in host.threads:
        names = [n for n in np.unique(thread.name).tolist() if pattern.match(host.strings[n])]
        count += int((np.isin(thread.name, names) & (thread.start >= start) & (thread.start < end)).sum())
    return count


def _queue(host: Host, start: int, end: int) -> tuple[float | None, float | None]:
    """Mean number of operations launched and not begun per device, and mean time they waited (Little's law joins the two)."""
    launched = [(t.correlation[known], t.end[known]) for t in host.threads if (known := t.correlation != MISSING).any()]
    if not launched or end <= start:
        return None, None
    keys, times = (np.concatenate([pair[i] for pair in launched]) for i in (0, 1))
    order = np.argsort(keys, kind="stable")
    keys, times = keys[order], times[order]
    waits: list[np.ndarray] = []
    for device in host.devices:
        ops = device.ops
        where = np.minimum(np.searchsorted(keys, ops.correlation), len(keys) - 1)
        known = (keys[where] == ops.correlation) & (ops.start >= start) & (ops.start < end)
        waits.append(np.maximum(ops.start[known] - times[where[known]], 0))
    together = np.concatenate(waits)
    if not len(together):
        return None, None
    return float(together.sum()) / (end - start) / len(host.devices), float(together.mean()) * PS


def _syncs(
    host: Host, threads: Sequence[Events], busy: np.ndarray, span: tuple[int, int], least_s: float, frames: Frames | None
) -> tuple[list[Sync], float]:
    """Find waits that left every device of the host without work for `least_s`, though work was to come; and the length of all waits.

    Args:
      busy: when any device of the host had work.
      span: analysed time, picoseconds.
    """
    start, end = span
    found: dict[tuple[str, str], Sync] = {}
    waits_s = 0.0
    charged: set[int] = set()
    for thread in threads:
        names = [n for n in np.unique(thread.name).tolist() if SYNC.match(host.strings[n])]
        rows = np.flatnonzero(np.isin(thread.name, names) & (thread.end - thread.start > WAIT_S / PS))
        rows = rows[(thread.start[rows] >= start) & (thread.end[rows] < end)]
        reach = MISSING
        for row in rows.tolist():
            if thread.end[row] <= reach:
                continue  # inside the one before
            reach = int(thread.end[row])
            worked = intervals.clip(busy, int(thread.start[row]), reach)
            if not len(worked):
                continue  # what it reads is there already
            waits_s += (reach - int(thread.start[row])) * PS
            after = int(np.searchsorted(busy[:, 0], reach, side="left"))
            idle = int(busy[after, 0] - worked[-1, 1]) if after < len(busy) and busy[after - 1, 1] <= reach else 0
            lost_s = min(idle, intervals.total(worked)) * PS
            if lost_s < least_s or after in charged:
                continue
            charged.add(after)
            key = host.strings[int(thread.name[row])], _source(host, thread, row, frames)
            sync = found.setdefault(key, Sync(*key))
            sync.count += 1
            sync.wait_s += (reach - int(thread.start[row])) * PS
            sync.idle_after_s += lost_s
    return sorted(found.values(), key=lambda s: -s.idle_after_s), waits_s


def _source(host: Host, thread: Events, row: int, sampled: Frames | None) -> str:
    """The innermost Python frame around an event, outside libraries where there is one; else the frame sampled most often during it; else
    the annotation around it."""
    around = np.flatnonzero((thread.start[:row] <= thread.start[row]) & (thread.end[:row] >= thread.end[row]))
    names = [host.strings[int(thread.name[i])] for i in around[::-1]]
    frames = [found for name in names if (found := _PYTHON.match(name))]
    own = [f for f in frames if not _LIBRARY.search(f.group("file"))] or frames
    if own:
        return f"{own[0].group('file')}:{own[0].group('line')}"
    if sampled is not None and host.has_wall_clock:
        low_ns, high_ns = (host.zero_ns + int(t) // 1000 for t in (thread.start[row], thread.end[row]))
        if (line := sampled.most_often(low_ns, high_ns)) is not None:
            return line
    return names[0] if names else "?"


def _compilations(host: Host, start: int, end: int, logged: Sequence[Recompilation]) -> list[Compilation]:
    found: dict[str, Compilation] = {}
    for thread in host.threads:
        names = {n for n in np.unique(thread.name).tolist() if ACTIVITIES["compile"].match(host.strings[n])}
        rows = np.flatnonzero(np.isin(thread.name, list(names)) & (thread.start >= start) & (thread.start < end))
        reach = MISSING
        for row in rows.tolist():
            if thread.end[row] > reach:  # the outermost only
                reach = int(thread.end[row])
                name = host.strings[int(thread.name[row])]
                seen = found.setdefault(name, Compilation(name, 0, 0.0))
                seen.count += 1
                seen.duration_s += float(thread.end[row] - thread.start[row]) * PS
    known = []
    for r in logged:
        moment = (r.time_s - host.zero_ns / 1e9) / PS if host.has_wall_clock else -1.0
        known.append(Compilation(r.program, 1, r.duration_s, r.step, r.arguments, r.source, start <= moment < end))
    return [*found.values(), *known]
