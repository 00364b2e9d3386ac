"""What a host was doing: causes of idle devices, launches and the queue, waits that leave the device idle, compilations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from ridgeline.explain.trace import intervals
from ridgeline.explain.trace.ledger import PS
from ridgeline.explain.trace.load import Frames, HostProfile
from ridgeline.explain.trace.read import Events, Host
from ridgeline.explain.trace.steps import Markers
from ridgeline.explain.trace.wire import MISSING
from ridgeline.rundir.analysis import Compilation, HostActivity, Sync
from ridgeline.rundir.recompilation import Recompilation

ACTIVITIES: dict[str, re.Pattern[str]] = {
    "compile": re.compile(r".*([Cc]ompil(e|ation)|XlaLower|LowerTo|backend_compile)"),
    "checkpoint": re.compile(r".*(checkpoint|orbax|serializ|ridge\.save)", re.I),
    "data_wait": re.compile(r".*(DatasetIterator\.__next__|ridge\.data_wait|data_wait|DataLoader)"),
    "launch": re.compile(
        r"(PjitFunction|.*Execut|ParseArguments|shard_args|DevicePut|BufferFromHost|(cu|cuda|hip)(Graph)?(Mem|Launch)|.*LaunchKernel|cuLaunch)"
    ),
}
"""Cause -> names of host events. Where several overlap, the earlier row counts."""
SYNC = re.compile(
    r"(np\.asarray\(jax\.Array\)|.*block_until_ready|.*BlockHostUntil|.*Await|.*ToLiteral|(cu|cuda|hip)\w*Synchronize|ArrayImpl\._value)"
)
_PYTHON = re.compile(r"\$?(?P<file>[^\s:$]+\.py):(?P<line>\d+)[ :]")
_LIBRARY = re.compile(r"(site-packages|/jax/|jax/_src|^(array|api|pjit|profiler|contextlib|threading)\.py)")
WAIT_S = 20e-6
"""Shorter waits and gaps are ignored."""
STARVED = 0.005
"""A wait is reported when the device is idle because of it for at least this share of a step."""


def main_thread(host: Host, markers: Markers | None) -> list[Events]:
    """Return the thread of the training loop: that of the step markers; else the one that calls the most programs; else all threads."""
    if markers is not None:
        return [t for t in host.threads if t.thread == markers.thread and (t.step != MISSING).any()]
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
    syncs, waits_s = _syncs(host, main_thread(host, markers), intervals.join(*busy), (start, end), least_s, profile.frames)
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
        compilations=_compilations(host, start, end, profile.recompilations),
        waits_s=waits_s,
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
    found: dict[str, tuple[int, float]] = {}
    for thread in host.threads:
        names = {n for n in np.unique(thread.name).tolist() if ACTIVITIES["compile"].match(host.strings[n])}
        rows = np.flatnonzero(np.isin(thread.name, list(names)) & (thread.start >= start) & (thread.start < end))
        reach = MISSING
        for row in rows.tolist():
            if thread.end[row] > reach:  # the outermost only
                reach = int(thread.end[row])
                name = host.strings[int(thread.name[row])]
                count, duration_s = found.get(name, (0, 0.0))
                found[name] = count + 1, duration_s + float(thread.end[row] - thread.start[row]) * PS
    known = []
    for r in logged:
        moment = (r.time_s - host.zero_ns / 1e9) / PS if host.has_wall_clock else -1.0
        known.append(Compilation(r.program, 1, r.duration_s, r.step, r.arguments, r.source, start <= moment < end))
    return [*(Compilation(name, *figures) for name, figures in found.items()), *known]
