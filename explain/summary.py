"""The summary printed at the end of a run: steps, tokens, speed, loss, and the time of process 0 by phase over all starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.configs.format import format_count, format_duration
from ridgeline.rundir.event_types import PHASES
from ridgeline.rundir.events import Event
from ridgeline.rundir.phases import Phase, phases
from ridgeline.rundir.speed import Speed, log_lines, run_speed, windows

OTHER = "other"
"""Time outside of all phases."""


@dataclass(frozen=True)
class Summary:
    """Steps, speed and time by phase of one process, summed over its starts."""

    wall_s: float
    """From the earliest recorded time (the process start, when `launch` is recorded) to the last event, summed over starts."""
    starts: int
    seconds: dict[str, float]
    """Phase name (or "other") -> seconds in it and in none of its children, in the order of PHASES. They sum to `wall_s` unless phases
    recorded as totals overlap."""
    counts: dict[str, int]
    """Phase name -> number of entries."""
    last_step: int
    tokens: float | None
    """Tokens of the whole run at its last logged step."""
    speed: Speed | None
    """None when no step was timed."""
    losses: tuple[float, float] | None
    """First and last logged training loss."""
    skipped_steps: int


def summarize(events: Sequence[Event], process: int = 0) -> Summary:
    """Summarize the events of one process of a run; there must be at least one event."""
    mine = [event for event in events if event.process == process]
    assert mine, f"no events of process {process}"
    found = phases(mine)
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for phase in found:
        seconds[phase.name] += phase.own_s
        counts[phase.name] += phase.count
    restarts = {event.restart for event in mine}
    wall_s = sum(_span_s(mine, found, restart) for restart in restarts)
    seconds[OTHER] = max(0.0, wall_s - sum(seconds.values()))
    steps = log_lines(mine, process)
    losses = [step["loss"] for step in steps if "loss" in step]
    return Summary(
        wall_s=wall_s,
        starts=len(restarts),
        seconds={name: seconds[name] for name in (*PHASES, OTHER) if seconds.get(name)},
        counts=dict(counts),
        last_step=int(steps[-1]["step"]) if steps else 0,
        tokens=steps[-1].get("tokens") if steps else None,
        speed=run_speed(windows(steps)),
        losses=(losses[0], losses[-1]) if losses else None,
        skipped_steps=sum(event.kind == "skipped_step" for event in mine),
    )


def _span_s(events: Sequence[Event], found: Sequence[Phase], restart: int) -> float:
    """Return the time of one start, from its earliest recorded time to its last event."""
    moments = [event.mono_s for event in events if event.restart == restart]
    return max(moments) - min(moments + [phase.start_mono_s for phase in found if phase.restart == restart])


def format_summary(summary: Summary) -> str:
    """Render the summary as a few lines of text."""
    starts = f" in {summary.starts} starts" if summary.starts > 1 else ""
    lines = [f"{format_duration(summary.wall_s)}{starts}, {summary.last_step} steps"]
    if summary.tokens is not None:
        lines[0] += f", {format_count(summary.tokens)} tokens"
    if summary.speed is not None:
        mfu = f"{summary.speed.mfu:.1%}" if summary.speed.mfu is not None else "n/a"
        lines.append(f"speed: {format_count(summary.speed.tokens_per_s)} tokens/s of step time, MFU {mfu}")
    if summary.losses is not None:
        lines.append(f"training loss: {summary.losses[0]:.4f} -> {summary.losses[1]:.4f}")
    if summary.skipped_steps:
        lines.append(f"skipped steps: {summary.skipped_steps}")
    lines.append("where the time went:")
    for name, time_s in sorted(summary.seconds.items(), key=lambda item: -item[1]):
        share = min(1.0, time_s / summary.wall_s) if summary.wall_s > 0 else 0.0
        if share >= 0.0005:
            lines.append(f"  {name:<11}{time_s:>10.1f} s {share:>6.1%}  {'#' * round(40 * share)}".rstrip())
    return "\n".join(lines)
