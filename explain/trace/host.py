"""What a host was doing: causes of idle devices, launches and the queue, waits that leave the device idle, compilations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from ridgeline.explain.trace import intervals
from ridgeline.explain.trace.ledger import PS
from ridgeline.explain.trace.load import Frames, HostProfile
from ridgeline.explain.trace.python_frames import any_frame, idle_sources, own_frame
from ridgeline.explain.trace.read import Events, Host
from ridgeline.explain.trace.steps import Markers
from ridgeline.explain.trace.wire import MISSING
from ridgeline.rundir.analysis import Compilation, HostActivity, Sync
from ridgeline.rundir.recompilation import Recompilation

SYNC = re.compile(
    r"(np\.asarray\(jax\.Array\)|.*block_until_ready|.*BlockHostUntil|.*Await|.*ToLiteral|(cu|cuda|hip)\w*Synchronize|ArrayImpl\._value)"
)
_LOCKED = r"\$(time sleep|(threading|queue|subprocess|selectors|socket)\.py:\d+ \w+|\S+ (acquire|recv|recv_into|poll|select|epoll))$"
ACTIVITIES: dict[str, re.Pattern[str]] = {
    "compile": re.compile(r"(?!\$)(.*([Cc]ompil(e|ation)|XlaLower|LowerTo|backend_compile)|lower_sharding_computation|trace_to_jaxpr)"),
    "checkpoint": re.compile(r".*(checkpoint|orbax|serializ|ridge\.save)", re.I),
    "data_wait": re.compile(
        r"(.*(DatasetIterator\.__next__|ridge\.data_wait|data_wait|[Dd]ata_?[Ll]oader|IteratorGetNext)"
        r"|\$\S+ (__next__|(\w+_)?(next|get|load|fetch|read)_(next_)?batch)$)"
    ),
    "launch": re.compile(
        r"(PjitFunction|.*Execut|ParseArguments|shard_args|DevicePut|BufferFromHost|(cu|cuda|hip)(Graph)?(Mem|Launch)|.*LaunchKernel|cuLaunch)"
    ),
    "blocked": re.compile(f"({SYNC.pattern}|{_LOCKED})"),
}
"""Cause -> names of host events. Where several overlap, the earlier row counts: a wait inside a data loader is a wait for data."""
_NEXT, _CONTEXT = re.compile(r"\$builtins next$"), re.compile(r"\$contextlib\.py:\d+ ")
"""`next` is a wait for data, but for its calls by contextlib."""
_CALLED = re.compile(r"PjitFunction\((?P<function>.*)\)$")
_LOWERED = re.compile(r"(.*(XlaLower|LowerTo)|lower_sharding_computation|trace_to_jaxpr)")
"""Lowering without a compilation is not counted as one."""
_MODULE = re.compile(r"\bjit_(?P<function>\w+)")
WAIT_S = 20e-6
"""Shorter waits and gaps are ignored."""
STARVED = 0.005
"""A wait is reported when the device is idle because of it for at least this share of a step."""


def main_thread(host: Host, markers: Markers | None) -> list[Events]:
    """Return the thread of the training loop: that of the step markers; else the one that calls the most programs; else all threads."""
    if markers is not None:
        return [host.threads[markers.thread]]
    calls = [(sum(host.strings[n].startswith("PjitFunction") for n in t.name), t) for t in host.threads]
    most = max(calls, key=lambda pair: pair[0], default=(0, None))
    return [most[1]] if most[0] and most[1] is not None else list(host.threads)


def causes(profile: HostProfile, markers: Markers | None) -> dict[str, np.ndarray]:
    """Return when the host was doing what, by the trace and the event log: disjoint interval sets by cause. `markers`: its steps."""
    host, phases = profile.host, profile.phases
    threads = main_thread(host, markers)
    launchers = [t for t in host.threads if (t.correlation != MISSING).any() and not any(t is other for other in threads)]
    found: dict[str, np.ndarray] = {}
    taken = intervals.EMPTY
    for cause, pattern in ACTIVITIES.items():
        sets = [_matching(host, t, pattern) for t in threads + (launchers if cause == "launch" else [])]
        if cause == "data_wait":
            sets += [intervals.subtract(_matching(host, t, _NEXT), _matching(host, t, _CONTEXT)) for t in threads]
        sets += [_phase(host, start_s, end_s) for start_s, end_s in phases.get(cause, ())]
        mine = intervals.subtract(intervals.join(*sets), taken)
        found[cause] = mine
        taken = intervals.join(taken, mine)
    return found


def host_activity(
    profile: HostProfile,
    markers: Markers | None,
    found: Mapping[str, np.ndarray],
    busy: Sequence[np.ndarray],
    span: tuple[int, int],
    steps: int,
) -> HostActivity:
    """Describe what a host did.

    Args:
      profile: what was recorded of it.
      markers: its steps.
      found: causes().
      busy: per device, when it had work.
      span: analyzed time, picoseconds.
      steps: number of steps in that time.
    """
    host, (start, end) = profile.host, span
    span_s = (end - start) * PS
    launches = _launches(host, start, end)
    depth, delay_s = _queue(host, start, end)
    gaps, longest = _gaps(busy, start, end)
    least_s = max(WAIT_S, STARVED * span_s / steps)
    threads, together = main_thread(host, markers), intervals.join(*busy)
    syncs, waits_s = _syncs(host, threads, together, (start, end), least_s, profile.frames)
    idle = intervals.subtract(np.array([[start, end]], np.int64), together)
    idle = idle[(idle[:, 1] - idle[:, 0]) * PS > WAIT_S]
    return HostActivity(
        host=host.name,
        span_s=span_s,
        launches=launches,
        launches_per_s=launches / span_s if span_s > 0 else 0.0,
        queue_depth_mean=depth,
        launch_to_start_s=delay_s,
        gaps=gaps,
        longest_gap_s=0.0 if longest is None else (longest[1] - longest[0]) * PS,
        longest_gap_cause=_main_cause(found, longest),
        syncs=syncs,
        compilations=_compilations(host, markers, (start, end), profile.recompilations, profile.frames),
        waits_s=waits_s,
        idle_sources=idle_sources(host, threads, idle, found, profile.frames),
    )


def _gaps(busy: Sequence[np.ndarray], start: int, end: int) -> tuple[int, tuple[int, int] | None]:
    """Return the number of gaps longer than WAIT_S, mean over devices, and the longest of them."""
    whole = np.array([[start, end]], np.int64)
    gaps = [intervals.subtract(whole, b) for b in busy]
    long = [g[(g[:, 1] - g[:, 0]) * PS > WAIT_S] for g in gaps]
    longest = max((g[np.argmax(g[:, 1] - g[:, 0])] for g in long if len(g)), key=lambda g: g[1] - g[0], default=None)
    count = round(float(np.mean([len(g) for g in long]))) if long else 0
    return count, None if longest is None else (int(longest[0]), int(longest[1]))


def _main_cause(found: Mapping[str, np.ndarray], gap: tuple[int, int] | None) -> str:
    """Return what the host did for most of a gap; `none` without a gap."""
    if gap is None:
        return "none"
    parts = {name: intervals.total(intervals.clip(s, *gap)) for name, s in found.items()}
    parts["other"] = gap[1] - gap[0] - sum(parts.values())
    return max(parts, key=lambda name: parts[name])


def _matching(host: Host, thread: Events, pattern: re.Pattern[str]) -> np.ndarray:
    names = [n for n in np.unique(thread.name).tolist() if pattern.match(host.strings[n])]
    rows = np.isin(thread.name, names)
    return intervals.union(thread.start[rows], thread.end[rows])


def _phase(host: Host, start_s: float, end_s: float) -> np.ndarray:
    """Return a phase of the event log in picoseconds of the trace's clock."""
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
    """Return the mean number of operations launched and not begun per device, and the mean time they waited (Little's law)."""
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
    """Return the waits after which all devices of the host were idle for `least_s` with work still to come, and the length of all waits.

    Args:
      busy: when any device of the host had work.
      span: analyzed time, picoseconds.
    """
    start, end = span
    found: dict[tuple[str, str], tuple[int, float, float]] = {}  # count, wait, idle after
    waits_s = 0.0
    charged: set[int] = set()
    for thread in threads:
        names = [n for n in np.unique(thread.name).tolist() if SYNC.match(host.strings[n])]
        rows = np.flatnonzero(np.isin(thread.name, names) & (thread.end - thread.start > WAIT_S / PS))
        rows = rows[(thread.start[rows] >= start) & (thread.end[rows] < end)]
        reach = MISSING
        for row in rows.tolist():
            if thread.end[row] <= reach:
                continue  # nested in the wait before
            reach = int(thread.end[row])
            worked = intervals.clip(busy, int(thread.start[row]), reach)
            if not len(worked):
                continue  # the result is already there: not a wait
            waits_s += (reach - int(thread.start[row])) * PS
            after = int(np.searchsorted(busy[:, 0], reach, side="left"))
            idle = int(busy[after, 0] - worked[-1, 1]) if after < len(busy) and busy[after - 1, 1] <= reach else 0
            lost_s = min(idle, intervals.total(worked)) * PS
            if lost_s < least_s or after in charged:
                continue
            charged.add(after)
            key = host.strings[int(thread.name[row])], _source(host, thread, row, frames)
            count, wait_s, lost_before_s = found.get(key, (0, 0.0, 0.0))
            found[key] = count + 1, wait_s + (reach - int(thread.start[row])) * PS, lost_before_s + lost_s
    return sorted((Sync(what, source, *figures) for (what, source), figures in found.items()), key=lambda s: -s.idle_after_s), waits_s


def _source(host: Host, thread: Events, row: int, sampled: Frames | None) -> str:
    """Return the innermost Python frame around an event, preferably outside libraries; else the line sampled most often during it; else
    the enclosing annotation."""
    line = _frame_around(host, thread, row)
    if line is None and sampled is not None and host.has_wall_clock:
        line = sampled.most_often(*(host.zero_ns + int(t) // 1000 for t in (thread.start[row], thread.end[row])))
    return line or next(iter(_around(host, thread, row)), "?")


def _around(host: Host, thread: Events, row: int) -> list[str]:
    """Return the names of the events around an event, the innermost first."""
    rows = np.flatnonzero((thread.start[:row] <= thread.start[row]) & (thread.end[:row] >= thread.end[row]))
    return [host.strings[int(thread.name[i])] for i in rows[::-1]]


def _frame_around(host: Host, thread: Events, row: int) -> str | None:
    """Return the innermost Python frame around an event, preferably the user's own."""
    names = _around(host, thread, row)
    return next((line for line in map(own_frame, names) if line), None) or next((line for line in map(any_frame, names) if line), None)


def _compilations(
    host: Host, markers: Markers | None, span: tuple[int, int], logged: Sequence[Recompilation], sampled: Frames | None
) -> list[Compilation]:
    """Return the compilations within the analyzed time, by function and place, and all of the event log.

    A compilation shows as several events, on several threads: it is one where they are in one call of a function, or overlap.
    """
    (start, end), zero_s = span, host.zero_ns / 1e9
    known, seen = [], [intervals.EMPTY]
    for r in logged:
        moment = (r.time_s - zero_s) / PS if host.has_wall_clock else -1.0
        known.append(Compilation(r.program, 1, r.duration_s, r.step, r.arguments, r.source, start <= moment < end))
        seen.append(_phase(host, r.time_s - r.duration_s, r.time_s))
    in_log, taken = intervals.join(*seen), intervals.join(*seen)
    found: dict[tuple[str, str | None], list[tuple[int, int]]] = {}
    for begin, stop, function, source, in_call in _compiled(host, start, end, sampled):
        one = np.array([[begin, stop]], np.int64)
        if not len(intervals.intersect(one, in_log if in_call else taken)):
            taken = intervals.join(taken, one)
            found.setdefault((function, source), []).append((begin, stop))
    traced = []
    for (function, source), times in found.items():
        first = -1 if markers is None else int(np.searchsorted(markers.start, times[0][0], side="right")) - 1
        step = None if markers is None or first < 0 or not markers.chosen[first] else int(markers.step[first])
        duration_s = sum(stop - begin for begin, stop in times) * PS
        traced.append(Compilation(function, len(times), duration_s, step, (), source, traced=True))
    return [*traced, *known]


def _compiled(host: Host, start: int, end: int, sampled: Frames | None) -> list[tuple[int, int, str, str | None, bool]]:
    """Return (start, end, function, source, whether in a call of the function) of what may be compilations: those in calls first, then the
    longest first."""
    in_calls: list[tuple[int, int, str, str | None, bool]] = []
    others: list[tuple[int, int, str, str | None, bool]] = []
    for thread in host.threads:
        text = {n: host.strings[n] for n in np.unique(thread.name).tolist()}
        here = np.isin(thread.name, [n for n, name in text.items() if ACTIVITIES["compile"].match(name)])
        calls = np.isin(thread.name, [n for n, name in text.items() if _CALLED.match(name)])
        of_call: dict[int, list[int]] = {}
        for row in np.flatnonzero(here & (thread.start >= start) & (thread.start < end)).tolist():
            around = np.flatnonzero(calls[:row] & (thread.end[:row] >= thread.end[row]))
            of_call.setdefault(int(around[-1]) if len(around) else ~row, []).append(row)
        for call, rows in of_call.items():
            if all(_LOWERED.match(text[int(thread.name[row])]) for row in rows):
                continue
            begin, stop = int(thread.start[rows].min()), int(thread.end[rows].max())
            name = text[int(thread.name[call if call >= 0 else rows[0]])]
            function = (_CALLED if call >= 0 else _MODULE).search(name)
            line = _frame_around(host, thread, rows[0])
            if line is None and sampled is not None and host.has_wall_clock:
                line = sampled.most_often(host.zero_ns + begin // 1000, host.zero_ns + stop // 1000)
            (in_calls if call >= 0 else others).append((begin, stop, name if function is None else function["function"], line, call >= 0))
    return in_calls + sorted(others, key=lambda each: each[0] - each[1])
