"""The timeline of a run as a picture: one row of bars per process, nested phases below their parents, starts side by side.

`gantt_svg` draws an SVG, `gantt_html` wraps it in a page, and `perfetto_trace` returns the JSON for ui.perfetto.dev and chrome://tracing.
The time between two starts is left out and marked with its length.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.configs.format import format_duration, format_seconds
from ridgeline.rundir.events import PHASES, Event
from ridgeline.rundir.phases import Phase, phases

COLORS = {
    "launch": "#8c8c8c",
    "import": "#c49c94",
    "rendezvous": "#b8860b",
    "init": "#9467bd",
    "restore": "#17becf",
    "compile": "#e377c2",
    "setup": "#c5b0d5",
    "first_step": "#bcbd22",
    "train": "#2ca02c",
    "data_wait": "#d62728",
    "evaluation": "#1f77b4",
    "save": "#ff7f0e",
    "check": "#bcbd22",
    "profile": "#7f4f24",
    "teardown": "#5f6b7a",
}
assert set(COLORS) == set(PHASES)

LABEL_PX, CHART_PX, GAP_PX, LANE_PX, ROW_GAP_PX, TOP_PX = 110, 1000, 14, 20, 12, 46
STYLE = """
.gantt { font: 12px system-ui, sans-serif; background: #fff; }
.gantt text { fill: #222; } .gantt .axis, .gantt .gap { stroke: #999; } .gantt .gap { stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) { .gantt { background: #16191d; } .gantt text { fill: #ddd; } }
"""


@dataclass(frozen=True)
class _Span:
    """One start on the time axis."""

    restart: int
    start_s: float
    end_s: float
    x_px: float
    px_per_s: float

    def x(self, time_s: float) -> float:
        """Return the horizontal position of a time of this start, px."""
        return self.x_px + (min(max(time_s, self.start_s), self.end_s) - self.start_s) * self.px_per_s


def gantt_svg(events: Sequence[Event], title: str = "") -> str:
    """Draw the phases of all processes and starts as an SVG picture; the tooltip of a bar has its phase, duration and outcome."""
    found = phases(events)
    spans = _spans(found, events)
    by_restart = {span.restart: span for span in spans}
    parts, top = [], TOP_PX
    for process in sorted({phase.process for phase in found}):
        mine = [phase for phase in found if phase.process == process]
        lanes = 1 + max(_depth(phase) for phase in mine)
        parts.append(f'<text x="4" y="{top + 14}">process {process}</text>')
        for phase in sorted(mine, key=lambda p: (_depth(p), p.start_s)):
            parts.append(_bar(phase, by_restart[phase.restart], top + _depth(phase) * LANE_PX))
        top += lanes * LANE_PX + ROW_GAP_PX
    for left, right in itertools.pairwise(spans):
        x = (left.x(left.end_s) + right.x_px) / 2
        away_s = max(0.0, right.start_s - left.end_s)
        parts.append(f'<line class="gap" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP_PX - 8}" y2="{top}"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + 34}" text-anchor="middle">+{format_duration(away_s)}</text>')
    parts += _axis(spans, top)
    width, height = LABEL_PX + CHART_PX + 20, top + 44
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg class="gantt" xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    caption = f'<text x="4" y="16" font-weight="bold">{html.escape(title)}</text>'
    return "\n".join([head, f"<style>{STYLE}</style>", caption, *_legend(found), *parts, "</svg>"]) + "\n"


def gantt_html(events: Sequence[Event], title: str = "") -> str:
    """Return a self-contained page with the picture."""
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
    style = "<style>body{margin:1rem;overflow-x:auto;color-scheme:light dark}</style></head><body>"
    return f"{head}{style}\n{gantt_svg(events, title)}</body></html>\n"


def perfetto_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Return the phases as complete events and the logged speed and loss as counters, in Chrome's trace event format (microseconds)."""
    if not events:
        return {"traceEvents": []}
    found = phases(events)
    origin_s = min([event.time_s for event in events] + [phase.start_s for phase in found])
    trace: list[dict[str, Any]] = []
    for process in sorted({event.process for event in events}):
        trace.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": f"process {process}"}})
        for thread, name in enumerate(("phases", "sums of short stretches")):
            trace.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}})
    for phase in found:
        args = {"outcome": phase.outcome, "restart": phase.restart, "count": phase.count, **phase.fields}
        common = {"name": phase.name, "cat": "phase", "pid": phase.process, "tid": int(phase.summed), "args": args}
        trace.append({"ph": "X", "ts": (phase.start_s - origin_s) * 1e6, "dur": phase.duration_s * 1e6, **common})
    for event in events:
        if event.kind == "step":
            for key in ("tokens_per_s", "loss"):
                if isinstance(event.fields.get(key), int | float):
                    ts = (event.time_s - origin_s) * 1e6
                    trace.append({"ph": "C", "name": key, "pid": event.process, "ts": ts, "args": {key: event.fields[key]}})
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": {"origin_s": origin_s}}


def _spans(found: Iterable[Phase], events: Sequence[Event]) -> list[_Span]:
    """Place the starts side by side, each as wide as its share of the time."""
    bounds: dict[int, tuple[float, float]] = {}
    moments = [(e.restart, e.time_s, e.time_s) for e in events] + [(p.restart, p.start_s, p.start_s + p.duration_s) for p in found]
    for restart, start_s, end_s in moments:
        low, high = bounds.get(restart, (math.inf, -math.inf))
        bounds[restart] = min(low, start_s), max(high, end_s)
    total_s = sum(high - low for low, high in bounds.values()) or 1.0
    px_per_s = (CHART_PX - GAP_PX * (len(bounds) - 1)) / total_s
    spans, x = [], float(LABEL_PX)
    for restart, (low, high) in sorted(bounds.items()):
        spans.append(_Span(restart, low, high, x, px_per_s))
        x += (high - low) * px_per_s + GAP_PX
    return spans


def _depth(phase: Phase) -> int:
    return 0 if phase.parent is None else 1 + _depth(phase.parent)


def _bar(phase: Phase, span: _Span, y_px: float) -> str:
    left, right = span.x(phase.start_s), span.x(phase.start_s + phase.duration_s)
    width = max(0.6, right - left)
    times = f", {phase.count} times, summed" if phase.summed and phase.count > 1 else ""
    step = f", step {phase.fields['step']}" if "step" in phase.fields else ""
    tip = html.escape(f"{phase.name}: {format_seconds(phase.duration_s)}{times}{step} ({phase.outcome})")
    label = ""
    if width > 7 * len(phase.name) + 6:
        label = f'<text x="{left + 4:.1f}" y="{y_px + 14:.1f}" style="fill:#fff">{phase.name}</text>'
    height = LANE_PX - 2
    opacity = ' fill-opacity="0.6"' if phase.outcome != "ok" else ""
    box = f'<rect x="{left:.2f}" y="{y_px:.1f}" width="{width:.2f}" height="{height}" fill="{COLORS[phase.name]}"{opacity}/>'
    return f"<g><title>{tip}</title>{box}{label}</g>"


def _legend(found: Iterable[Phase]) -> list[str]:
    parts, x = [], float(LABEL_PX)
    present = {phase.name for phase in found}
    for name in PHASES:
        if name in present:
            parts.append(f'<rect x="{x:.0f}" y="23" width="10" height="10" fill="{COLORS[name]}"/>')
            parts.append(f'<text x="{x + 14:.0f}" y="32">{name}</text>')
            x += 26 + 7 * len(name)
    return parts


def _axis(spans: Sequence[_Span], y_px: float) -> list[str]:
    """Draw ticks at round times since the begin of each start."""
    parts = []
    for span in spans:
        length_s = span.end_s - span.start_s
        end_px = span.x(span.end_s)
        parts.append(f'<line class="axis" x1="{span.x_px:.1f}" x2="{end_px:.1f}" y1="{y_px}" y2="{y_px}"/>')
        tick_s = _round_tick(90 / span.px_per_s)
        for index in range(int(length_s / tick_s) + 1):
            x = span.x(span.start_s + index * tick_s)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y_px}" y2="{y_px + 4}"/>')
            text = format_duration(index * tick_s) if tick_s >= 1 else format_seconds(index * tick_s)
            parts.append(f'<text x="{x:.1f}" y="{y_px + 18}" text-anchor="middle">{text}</text>')
    return parts


def _round_tick(at_least_s: float) -> float:
    """Return the next of 1, 2, 5, 10, ... seconds, or of round minutes and hours."""
    for tick in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400):
        if tick >= at_least_s > 0.5:
            return float(tick)
    if at_least_s > 86400:
        return 86400.0 * math.ceil(at_least_s / 86400)
    power: float = 10.0 ** math.floor(math.log10(at_least_s))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= at_least_s)
