"""The part of the report about memory: programs over their schedule, allocators over time; folded, with the peak in the summary."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.configs.format import format_bytes, format_seconds
from ridgeline.explain.report.charts import SERIES_COLORS, Series, line_chart
from ridgeline.explain.report.html import folded, table
from ridgeline.rundir.analysis import Analysis
from ridgeline.rundir.analysis_memory import AllocatorMemory, LiveBuffer, ProgramMemory

MOST_PROGRAMS = 8


def memory_section(analysis: Analysis) -> list[str]:
    """Return the HTML; [] where the capture has no memory."""
    programs, allocators = analysis.memory[:MOST_PROGRAMS], analysis.allocators
    parts = _programs(programs) if programs else []
    parts += _allocators(allocators) if allocators else []
    return ["<h3>Memory</h3>", *parts] if parts else []


def _programs(programs: Sequence[ProgramMemory]) -> list[str]:
    first = programs[0]
    at = f" at {_place(first.peak_at)}" if first.timeline else ""
    summary = f"{first.module} has at most {format_bytes(first.peak_bytes)} in use per device{at}"
    fixed = first.peak_bytes - first.peak_at.bytes
    curve = Series("all", [(float(n), (fixed + live.bytes) / 1e9) for n, live in enumerate(first.timeline)])
    chart = line_chart(f"Memory of {first.module}", "position in its schedule", "GB", [curve], from_zero=True)
    rows = [
        [p.module, *(f"{value / 1e9:.4g}" for value in (p.arguments_bytes, p.outputs_bytes, p.temporaries_bytes, p.peak_bytes)), _at(p)]
        for p in programs
    ]
    buffers = [[_place(buffer), f"{buffer.bytes / 1e9:.4g}"] for buffer in first.largest]
    body = [chart, table(["program", "arguments GB", "outputs GB", "temporaries GB", "peak GB", "at"], rows)]
    return folded(summary, [*body, *([table(["largest temporaries at the peak", "GB"], buffers)] if buffers else [])])


def _allocators(allocators: Sequence[AllocatorMemory]) -> list[str]:
    first = max(allocators, key=lambda each: each.peak.in_use_bytes)
    capacity = f" of {format_bytes(first.capacity_bytes)}" if first.capacity_bytes else ""
    summary = f"allocator {first.allocator}: {format_bytes(first.peak.in_use_bytes)}{capacity} at {format_seconds(first.peak.time_s)}"
    shown = sorted(allocators, key=lambda each: -each.peak.in_use_bytes)[: len(SERIES_COLORS)]
    curves = [Series(each.allocator, [(at.time_s, at.in_use_bytes / 1e9) for at in each.timeline]) for each in shown]
    chart = line_chart("Memory in use", "seconds of the capture", "GB", curves, from_zero=True)
    rows = [
        [
            each.host,
            each.allocator,
            f"{each.peak.in_use_bytes / 1e9:.4g}",
            "n/a" if each.capacity_bytes is None else f"{each.capacity_bytes / 1e9:.4g}",
            "n/a" if each.peak.fragmentation is None else f"{each.peak.fragmentation:.1%}",
        ]
        for each in shown
    ]
    held = [[h.operation, f"{h.data_type}{h.shape}", str(h.count), f"{h.bytes / 1e9:.4g}"] for h in first.held]
    if first.early_bytes:
        held.append(["allocated before the capture", "", "", f"{first.early_bytes / 1e9:.4g}"])
    body = [chart, table(["host", "allocator", "peak GB", "of GB", "fragmentation"], rows)]
    return folded(summary, [*body, table(["in use at the peak", "shape", "times", "GB"], held)])


def _at(program: ProgramMemory) -> str:
    return _place(program.peak_at) if program.timeline else "n/a"


def _place(live: LiveBuffer) -> str:
    return f"{live.instruction} ({live.component} {live.phase})"
