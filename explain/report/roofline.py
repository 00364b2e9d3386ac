"""The roofline of a profiled step as SVG: operations by arithmetic intensity and rate; the area of a dot is its time."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from ridgeline.explain.report.charts import SERIES_COLORS, short
from ridgeline.explain.trace.components import peak_flops_of
from ridgeline.planner.hardware import hardware
from ridgeline.rundir.analysis import Analysis, Operation

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 420, 70, 16, 44, 44
PASSES = dict(zip(("forward", "backward", "recompute", "update"), SERIES_COLORS, strict=False))
_SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def roofline_svg(analysis: Analysis) -> str:
    """Draw the operations; empty without one that has FLOPs and bytes. A device that is not in the catalog has no roof."""
    points = [(o, o.flops / o.bytes, o.flops / o.time_s) for o in analysis.operations if o.flops and o.bytes and o.time_s]
    if not points:
        return ""
    peak, bandwidth = _roof(analysis.hardware, [o for o, _, _ in points])
    xs = [intensity for _, intensity, _ in points] + ([peak / bandwidth] if peak and bandwidth else [])
    ys = [rate for _, _, rate in points] + ([peak] if peak else [])
    x_px, x_ticks = _scale(xs, LEFT, WIDTH - RIGHT)
    y_px, y_ticks = _scale(ys, HEIGHT - BOTTOM, TOP)
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img"><title>Roofline</title>']
    for value in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_px(value):.1f}" y2="{y_px(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_px(value) + 4:.1f}" text-anchor="end">{_unit(value)}</text>')
    for value in x_ticks:
        parts.append(f'<line class="grid" x1="{x_px(value):.1f}" x2="{x_px(value):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x_px(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(value)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">FLOP per byte</text>')
    parts.append(f'<text x="4" y="{TOP - 12}">FLOP/s</text>')
    if peak and bandwidth:
        low, high, edge = x_ticks[0], x_ticks[-1], peak / bandwidth
        start = max(low, y_ticks[0] / bandwidth)
        corners = [(start, start * bandwidth), (edge, peak), (high, peak)]
        path = " ".join(f"{x_px(x):.1f},{y_px(y):.1f}" for x, y in corners)
        parts.append(f'<polyline class="roof" points="{path}" fill="none"/>')
    longest_s = max(o.time_s for o, _, _ in points)
    for o, intensity, rate in sorted(points, key=lambda point: -point[0].time_s):
        radius = 3 + 11 * math.sqrt(o.time_s / longest_s)
        tip = f"{o.op or o.kernel_name} ({o.component}, {o.phase}): {o.time_s * 1e3:.3g} ms"
        where = f'cx="{x_px(intensity):.1f}" cy="{y_px(rate):.1f}" r="{radius:.1f}"'
        color = PASSES.get(o.phase, "#888")
        circle = f'<circle {where} fill="{color}" fill-opacity="0.25" stroke="{color}" stroke-width="1.5"/>'
        parts.append(f"<g><title>{html.escape(tip)}</title>{circle}</g>")
    x = float(LEFT + 90)
    for name, color in PASSES.items():
        if any(o.phase == name for o, _, _ in points):
            parts.append(f'<circle cx="{x:.0f}" cy="{TOP - 16}" r="5" fill="{color}"/><text x="{x + 10:.0f}" y="{TOP - 12}">{name}</text>')
            x += 34 + 7 * len(name)
    return "\n".join([*parts, "</svg>"])


def _roof(name: str | None, operations: Sequence[Operation]) -> tuple[float | None, float | None]:
    """Return the peak in FLOP/s for the dtype of the largest operation, and the memory bandwidth in bytes/s; None for an unknown device."""
    if name is None:
        return None, None
    device = hardware(name)
    dtype = max(operations, key=lambda o: o.flops or 0.0).dtype
    return peak_flops_of(device, dtype), device.memory_bandwidth_bytes_per_s


def _scale(values: Sequence[float], start: float, stop: float) -> tuple[Callable[[float], float], list[float]]:
    """A logarithmic scale over whole decades; return it and its ticks."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(last, first + 1)
    every = max(1, (last - first) // 8)
    return (
        lambda value: start + (math.log10(value) - first) / (last - first) * (stop - start),
        [10.0**exponent for exponent in range(first, last + 1, every)],
    )


def _unit(value: float) -> str:
    scale, suffix = next(((scale, suffix) for scale, suffix in _SUFFIXES if value >= scale), (1.0, ""))
    return f"{value / scale:g}{suffix}"
