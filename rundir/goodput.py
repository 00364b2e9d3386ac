"""The run ledger: the wall time of a run over all its starts, divided into categories that sum to it.

The ledger is that of process 0: all processes wait for each other at every step. Its events are converted to intervals that do not overlap,
each of one of CATEGORIES (docs/DIAGNOSIS.md: the run ledger).

Goodput is productive time over wall time (Google, "ML Productivity Goodput", 2023). The time between a start that ended and the next start
by hand is not part of the wall time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from ridgeline.configs.errors import UserError
from ridgeline.rundir.directory import RunDir
from ridgeline.rundir.events import Event
from ridgeline.rundir.phases import Phase, phases

CATEGORIES = {
    "queue": "From submission, or the end of the previous start, to the start of the next one by the scheduler.",
    "startup": "Launch, imports, rendezvous, init, setup, and the first step (which includes loading the program).",
    "restore": "Reading the checkpoint.",
    "compile": "Tracing, lowering and compiling, or loading programs that an earlier start compiled.",
    "productive": "Steps that count.",
    "data_wait": "The loop waiting for the loader.",
    "evaluation": "Evaluation sets.",
    "checkpoint": "The loop waiting for saves.",
    "check": "Replayed steps and comparisons of corruption_check.",
    "profile": "Starting, stopping and writing a capture.",
    "lost": "Steps that a later start repeated, or that were never saved, with evaluation and data waiting between them.",
    "hang": "From the last progress to the watchdog's abort.",
    "teardown": "Closing files, waiting for the last save, the end of the processes.",
    "unexplained": "None of the above.",
}
"""Category -> its meaning."""

OF_PHASE = {
    "launch": "startup",
    "import": "startup",
    "rendezvous": "startup",
    "init": "startup",
    "setup": "startup",
    "first_step": "startup",
    "restore": "restore",
    "compile": "compile",
    "train": "productive",
    "data_wait": "data_wait",
    "evaluation": "evaluation",
    "save": "checkpoint",
    "check": "check",
    "profile": "profile",
    "teardown": "teardown",
}
"""Phase of the event log -> category."""
_REDONE = frozenset({"productive", "data_wait", "evaluation", "check", "profile"})
"""Categories that become `lost` when a later start resumes from before them."""
_TOLERANCE_S = 1e-6
_CLOCK_S = 1e-5
"""Wall clock times that are nearer than this are the same: sums of such numbers are exact to less than a microsecond."""


@dataclass(frozen=True)
class Stretch:
    """An interval of wall time of one category."""

    start_s: float
    """Wall clock, seconds since 1970."""
    end_s: float
    category: str
    restart: int
    in_loop: bool = False
    """Inside the training loop."""

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Ledger:
    """The wall time of a run by category."""

    seconds: dict[str, float]
    """Category -> seconds, for every category of CATEGORIES; they sum to `wall_s`."""
    wall_s: float
    starts: int
    steps: int
    """Last step reached."""
    lost_steps: int
    """Steps that were repeated, or never saved."""
    tokens: float | None
    """Tokens of the steps that count."""
    stretches: tuple[Stretch, ...]

    @property
    def goodput(self) -> float:
        """Productive share of the wall time; 0 for a run without any."""
        return self.seconds["productive"] / self.wall_s if self.wall_s > 0 else 0.0

    def over_time(self, points: int = 50) -> list[tuple[float, float]]:
        """Return (seconds of wall time since the beginning, goodput so far) at evenly spaced times, the end last."""
        if self.wall_s <= 0:
            return []
        curve, marks = [], [self.wall_s * (i + 1) / points for i in range(points)]
        elapsed_s = productive_s = 0.0
        pieces = iter(self.stretches)
        piece = next(pieces, None)
        for mark_s in marks:
            while piece is not None and elapsed_s + piece.duration_s <= mark_s + _TOLERANCE_S:
                elapsed_s += piece.duration_s
                productive_s += piece.duration_s if piece.category == "productive" else 0.0
                piece = next(pieces, None)
            part_s = max(0.0, mark_s - elapsed_s) if piece is not None and piece.category == "productive" else 0.0
            curve.append((mark_s, (productive_s + part_s) / mark_s))
        return curve


@dataclass(frozen=True)
class Waiting:
    """Time in a scheduler's queue before one start."""

    start_s: float
    """Wall clock: when the job was submitted, or when the previous start ended."""
    restart: int
    """Number of the start that followed."""
    granted_s: float | None = None
    """When the job script began: the time from then to the start is start-up (the preflight); None: not known, all of it is queue."""
    previous_end_s: float | None = None
    """When the previous start ended by the job script: later than its last event when it was killed."""


def queue_waits(run: RunDir, events: Sequence[Event]) -> list[Waiting]:
    """Return how long each start waited in Slurm's queue, from the recorded jobs and attempts; [] when none was submitted.

    A start that belongs to no submission did not wait. Raises UserError for a damaged record.
    """
    submitted = [(job.job, job.time_s) for job in run.jobs]
    starts: dict[int, float] = {}
    for event in events:
        if event.process == 0:
            starts[event.restart] = min(starts.get(event.restart, event.time_s), event.time_s)
    waits = []
    for restart, start_s in starts.items():
        # the job script records whole seconds
        during = next((a for a in run.attempts if a.begin - 1 <= start_s <= a.end + 1), None)
        ends_s = [a.end for a in run.attempts if a.end <= start_s and (during is None or a.job == during.job)]
        submits_s = [time_s for job, time_s in submitted if time_s <= start_s and (during is None or job == str(during.job))]
        since = [*ends_s[-1:], *submits_s[-1:]]
        if since:
            granted_s = None if during is None else max(during.begin, max(since))
            waits.append(Waiting(max(since), restart, granted_s, ends_s[-1] if ends_s else None))
    return waits


def run_ledger(events: Sequence[Event], waits: Iterable[Waiting] = ()) -> Ledger:
    """Account for the wall time of a run.

    Args:
      events: of all processes and starts (rundir.events.read_events); a killed start counts up to its last complete event.
      waits: times in the scheduler's queue (`queue_waits`).

    Raises:
      UserError: there are no events of process 0.
    """
    mine = [event for event in events if event.process == 0]
    if not mine:
        raise UserError("no events of process 0: the run never started, or events.jsonl is missing")
    found = phases(mine)
    line, lost_steps, _ = _timeline(mine, found, waits, EarlierStarts())
    return _ledger(line, mine, found, lost_steps, len({event.restart for event in mine}))


@dataclass(frozen=True)
class EarlierStarts:
    """The first starts of a run, as the ledger of the later ones needs them."""

    stretches: tuple[Stretch, ...] = ()
    saved: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Step -> restart -> when its save ended, wall clock."""
    all_saves: bool = True
    """Whether `saved` has all of them: without the save that a later start resumes from, its ledger is wrong."""


def add_starts(earlier: EarlierStarts, events: Sequence[Event], waits: Iterable[Waiting]) -> EarlierStarts:
    """Return the ledger of earlier starts and of later ones, of which `events` has all events of process 0."""
    mine = [event for event in events if event.process == 0]
    line, _, saved = _timeline(mine, phases(mine), waits, earlier)
    return EarlierStarts(tuple(line), saved, earlier.all_saves)


def shorten(earlier: EarlierStarts, saves: int) -> EarlierStarts:
    """Return earlier starts with only the newest saves, and few stretches: between two of these saves one of each category.

    A later start that resumes from one of these saves, or from nothing, gets the same seconds of each category.
    """
    found = sorted(((end_s, step, restart) for step, ends in earlier.saved.items() for restart, end_s in ends.items()), reverse=True)
    kept = found[:saves]
    marks_s = sorted(end_s for end_s, _, _ in kept)
    saved: dict[int, dict[int, float]] = defaultdict(dict)
    for end_s, step, restart in kept:
        saved[step][restart] = end_s
    stretches: list[Stretch] = []
    for _, of_start in groupby(earlier.stretches, key=lambda stretch: stretch.restart):
        *group, last = of_start  # the last one tells how the start ended
        parts: dict[tuple[int, str, bool], float] = defaultdict(float)
        first_s = group[0].start_s if group else last.start_s
        for stretch in group:
            between = slice(bisect_right(marks_s, stretch.start_s + _CLOCK_S), bisect_left(marks_s, stretch.end_s - _CLOCK_S))
            cuts = [stretch.start_s, *marks_s[between], stretch.end_s]
            for left_s, right_s in pairwise(cuts):
                parts[bisect_right(marks_s, (left_s + right_s) / 2), stretch.category, stretch.in_loop] += right_s - left_s
        for (_, category, in_loop), duration_s in sorted(parts.items()):
            stretches.append(Stretch(first_s, first_s + duration_s, category, last.restart, in_loop))
            first_s += duration_s
        stretches.append(last)
    return EarlierStarts(tuple(stretches), saved, earlier.all_saves and len(kept) == len(found))


def seconds_by_category(stretches: Iterable[Stretch]) -> dict[str, float]:
    """Return the seconds of every category."""
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for stretch in stretches:
        seconds[stretch.category] += stretch.duration_s
    return seconds


def _timeline(
    mine: Sequence[Event], found: Sequence[Phase], waits: Iterable[Waiting], earlier: EarlierStarts
) -> tuple[list[Stretch], int, dict[int, dict[int, float]]]:
    """Return the stretches of earlier and later starts, the lost steps of the later ones, and all saves."""
    waiting = {wait.restart: wait for wait in waits}
    line = list(earlier.stretches)
    for restart in sorted({event.restart for event in mine}):
        log = [event for event in mine if event.restart == restart]
        start = _start_line(log, [phase for phase in found if phase.restart == restart])
        start_s = start[0].start_s if start else log[0].time_s  # of one event there is no interval
        ended_s = line[-1].end_s if line else None
        wait = waiting.get(restart)
        if wait is not None:
            if ended_s is not None and wait.previous_end_s is not None and ended_s < wait.previous_end_s <= start_s:
                line.append(Stretch(ended_s, wait.previous_end_s, _after(line), line[-1].restart))
            begin_s = wait.start_s if ended_s is None else max(wait.start_s, ended_s)
            granted_s = _clip(start_s if wait.granted_s is None else wait.granted_s, begin_s, max(begin_s, start_s))
            if begin_s < granted_s:
                line.append(Stretch(begin_s, granted_s, "queue", restart))
            if granted_s < start_s:
                line.append(Stretch(granted_s, start_s, "startup", restart))
        line += start
    return _with_losses(line, mine, found, earlier.saved)


def _after(line: Sequence[Stretch]) -> str:
    """Return the category of the time from the last event of the newest start in `line` until the job script saw its end."""
    if line[-1].in_loop:
        return "lost"  # a killed start ran on
    closed = any(stretch.category == "teardown" for stretch in line if stretch.restart == line[-1].restart)
    return "teardown" if closed else "unexplained"


def _ledger(line: list[Stretch], mine: Sequence[Event], found: Sequence[Phase], lost_steps: int, starts: int) -> Ledger:
    seconds = seconds_by_category(line)
    wall_s = sum(stretch.duration_s for stretch in line)
    assert abs(sum(seconds.values()) - wall_s) <= _TOLERANCE_S * max(1.0, wall_s), "the parts must sum to the wall time"
    steps = [event for event in mine if event.kind == "step"]
    saves = [int(phase.fields["step"]) for phase in found if phase.name == "save" and _finite(phase.fields.get("step"))]
    reached = max([int(event.fields["step"]) for event in steps[-1:]] + saves[-1:], default=0)
    made = (e.fields for e in reversed(steps) if _finite(e.fields.get("tokens")) and e.fields["step"] > 0)
    per_step = next((float(fields["tokens"]) / fields["step"] for fields in made), None)
    return Ledger(
        seconds=seconds,
        wall_s=wall_s,
        starts=starts,
        steps=reached,
        lost_steps=lost_steps,
        tokens=None if per_step is None else per_step * reached,
        stretches=tuple(line),
    )


def _start_line(log: Sequence[Event], found: Sequence[Phase]) -> list[Stretch]:
    """Divide the time of one start into intervals, each of the innermost phase, then carve the totals out of them."""
    to_wall_s = log[0].time_s - log[0].mono_s  # one offset for the whole start: the wall clock may jump
    whole = [phase for phase in found if not phase.summed]
    sums = sorted((phase for phase in found if phase.summed), key=lambda phase: phase.written)
    begin_s = min([log[0].mono_s] + [phase.start_mono_s for phase in found if phase.parent is None])
    end_s = max(event.mono_s for event in log)
    cuts = sorted({begin_s, end_s, *(_clip(t, begin_s, end_s) for p in whole for t in (p.start_mono_s, p.start_mono_s + p.duration_s))})
    whole.sort(key=lambda p: p.start_mono_s)
    line, running, coming = [], list[Phase](), 0
    for left_s, right_s in pairwise(cuts):
        while coming < len(whole) and whole[coming].start_mono_s <= left_s:
            running.append(whole[coming])
            coming += 1
        running = [p for p in running if p.start_mono_s + p.duration_s >= right_s]
        inner = max(running, key=lambda p: (p.start_mono_s, -p.duration_s), default=None)
        category = "unexplained" if inner is None else OF_PHASE[inner.name]
        in_loop = any(p.name == "train" for p in running)
        line.append(Stretch(left_s, right_s, category, log[0].restart, in_loop))
    previous_s: dict[tuple[str, int], float] = {}
    for phase in sums:
        recorded_s = phase.start_mono_s + phase.duration_s
        outside = "unexplained" if phase.parent is None else OF_PHASE[phase.parent.name]
        key = (phase.name, id(phase.parent))
        _carve(line, previous_s.get(key, begin_s), recorded_s, phase.duration_s, outside, OF_PHASE[phase.name])
        previous_s[key] = recorded_s
    for event in log:
        if event.kind == "hang" and _finite(event.fields.get("silent_s")):
            _carve(line, begin_s, event.mono_s, float(event.fields["silent_s"]), None, "hang")
    return [replace(s, start_s=s.start_s + to_wall_s, end_s=s.end_s + to_wall_s) for s in line]


def _carve(line: list[Stretch], from_s: float, to_s: float, amount_s: float, out_of: str | None, category: str) -> None:
    """Change the last `amount_s` seconds of category `out_of` (None: of any) between two times to another category, in place."""
    first = max(0, bisect_right(line, from_s, key=lambda s: s.start_s) - 1)
    last = bisect_left(line, to_s, key=lambda s: s.start_s)
    result: list[Stretch] = []
    left_s = amount_s
    for stretch in reversed(line[first:last]):
        low_s, high_s = max(stretch.start_s, from_s), min(stretch.end_s, to_s)
        take_s = min(left_s, high_s - low_s) if out_of in (None, stretch.category) else 0.0
        if take_s <= 0:
            result.append(stretch)
            continue
        left_s -= take_s
        pieces = [
            replace(stretch, end_s=high_s - take_s),
            replace(stretch, start_s=high_s - take_s, end_s=high_s, category=category),
            replace(stretch, start_s=high_s),
        ]
        result += [piece for piece in reversed(pieces) if piece.duration_s > 0]
    line[first:last] = result[::-1]


def _with_losses(
    line: list[Stretch], mine: Sequence[Event], found: Sequence[Phase], earlier: Mapping[int, Mapping[int, float]]
) -> tuple[list[Stretch], int, dict[int, dict[int, float]]]:
    """Mark as lost the loop's time after the save that a later start resumed from. Return also the number of lost steps, and when each
    step was saved, by start: `earlier` (before these events) with what these events add."""
    resumed = {p.restart: int(p.fields["start_step"]) for p in found if p.name == "train" and _finite(p.fields.get("start_step"))}
    offsets = {e.restart: e.time_s - e.mono_s for e in reversed(mine)}
    saved = defaultdict(dict, {step: dict(ends) for step, ends in earlier.items()})
    for p in found:
        if p.name == "save" and _finite(p.fields.get("step")) and p.outcome == "ok":
            saved[int(p.fields["step"])][p.restart] = offsets[p.restart] + p.start_mono_s + p.duration_s
    reached: dict[int, int] = {}
    for e in mine:
        if e.kind == "step" or (e.kind == "phase_start" and e.fields["phase"] == "save" and _finite(e.fields.get("step"))):
            reached[e.restart] = max(reached.get(e.restart, 0), int(e.fields["step"]))
    lost_steps = 0
    previous = None
    for restart, step in sorted(resumed.items()):
        before = {r: end_s for r, end_s in saved.get(step, {}).items() if r < restart}
        kept_s = before[max(before)] if before else -float("inf")
        line = [piece for s in line for piece in (_lose(s, kept_s) if s.restart < restart and s.in_loop else [s])]
        if previous is not None:
            lost_steps += max(0, reached.get(previous, 0) - step)
        previous = restart
    return line, lost_steps, dict(saved)


def _lose(stretch: Stretch, kept_s: float) -> list[Stretch]:
    """Split an interval of the loop at the time of the save; the part after it is lost."""
    if stretch.category not in _REDONE or stretch.end_s <= kept_s:
        return [stretch]
    cut_s = _clip(kept_s, stretch.start_s, stretch.end_s)
    pieces = [replace(stretch, end_s=cut_s), replace(stretch, start_s=cut_s, category="lost")]
    return [piece for piece in pieces if piece.duration_s > 0]


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _finite(value: object) -> bool:
    """Whether a field is a finite number: others are damaged, and left out."""
    return isinstance(value, int | float) and math.isfinite(value)
