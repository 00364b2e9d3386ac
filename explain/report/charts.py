"""Small charts as SVG text: curves and stacked bars, readable in light, dark and print, with no script and nothing loaded."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 260, 64, 12, 28, 36
SERIES_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf")
MORE_COLORS = ("#8c564b", "#bcbd22", "#e377c2", "#7f7f7f", "#aec7e8", "#ffbb78", "#98df8a", "#c5b0d5")
CATEGORY_COLORS = {
    "queue": "#c7c7c7",
    "startup": "#8c8c8c",
    "restore": "#17becf",
    "compile": "#e377c2",
    "productive": "#2ca02c",
    "data_wait": "#d62728",
    "evaluation": "#1f77b4",
    "checkpoint": "#ff7f0e",
    "check": "#bcbd22",
    "profile": "#7f4f24",
    "lost": "#8b0000",
    "hang": "#000000",
    "teardown": "#5f6b7a",
    "unexplained": "#e0d7a8",
    "compute": "#2ca02c",
    "communication": "#ff7f0e",
    "copies": "#17becf",
    "idle": "#c7c7c7",
}


@dataclass(frozen=True)
class Series:
    """A curve."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series], *, from_zero: bool = False) -> str:
    """Draw curves over one x axis; points that are not finite are left out. Returns an empty string without any point.

    from_zero: the y axis begins at 0.
    """
    finite = [Series(s.name, [(x, y) for x, y in s.points if math.isfinite(x) and math.isfinite(y)], s.dashed) for s in series]
    finite = [s for s in finite if s.points]
    if not finite:
        return ""
    xs = [x for s in finite for x, _ in s.points]
    ys = [y for s in finite for _, y in s.points]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(0.0, *ys) if from_zero else min(ys), max(ys))
    x_low, x_high = min(*xs, x_ticks[0]), max(*xs, x_ticks[-1])
    y_low, y_high = min(*ys, y_ticks[0]), max(*ys, y_ticks[-1])

    def x_px(x: float) -> float:
        return LEFT + (x - x_low) / ((x_high - x_low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y_px(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / ((y_high - y_low) or 1.0) * (HEIGHT - TOP - BOTTOM)

    parts = [_open(title, WIDTH, HEIGHT)]
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_px(tick):.1f}" y2="{y_px(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_px(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{x_px(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{html.escape(x_label)}</text>')
    parts.append(f'<text x="4" y="{TOP - 12}"><tspan font-weight="600">{html.escape(title)}</tspan>, {html.escape(y_label)}</text>')
    legend_px = float(WIDTH - RIGHT)
    for index, s in enumerate(finite):
        color = SERIES_COLORS[index % len(SERIES_COLORS)]
        path = " ".join(f"{x_px(x):.1f},{y_px(y):.1f}" for x, y in thinned(s.points))
        dash = ' stroke-dasharray="5 4"' if s.dashed else ""
        if len(s.points) == 1:
            x, y = s.points[0]
            parts.append(f'<circle cx="{x_px(x):.1f}" cy="{y_px(y):.1f}" r="3" fill="{color}"/>')
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>')
        parts.append(f'<text x="{legend_px:.0f}" y="{TOP - 12}" text-anchor="end" style="fill:{color}">{html.escape(s.name)}</text>')
        legend_px -= 16 + 6.5 * len(s.name)
    return "\n".join([*parts, "</svg>"])


def stacked_bars(title: str, rows: Mapping[str, Mapping[str, float]], unit: str = "s") -> str:
    """Draw one horizontal bar per row, divided into named parts in proportion; parts of nothing are left out.

    unit: of the values, `s` or `bytes`, for what is shown on hover.
    """
    names = list(dict.fromkeys(name for parts in rows.values() for name, value in parts.items() if value > 0))
    colors = distinct_colors(names)
    label_px = min(200, 20 + 7 * max(len(name) for name in rows))
    width, bar_px = 900, 26
    places, lines = _legend(names, label_px, width)
    height = TOP + len(rows) * (bar_px + 10) + 22 * lines
    parts = [_open(title, width, height)]
    y = float(TOP)
    for row, values in rows.items():
        total = math.fsum(values.values())
        parts.append(f'<text x="{label_px - 8}" y="{y + 17:.0f}" text-anchor="end">{html.escape(row)}</text>')
        x = float(label_px)
        for name in names:
            value = values.get(name, 0.0)
            if value <= 0 or total <= 0:
                continue
            part = value / total * (width - label_px - RIGHT)
            shown = f"{value:,.4g} s" if unit == "s" else f"{value / 1e6:,.1f} MB"
            tip = html.escape(f"{name}: {shown}, {value / total:.1%}")
            box = f'<rect x="{x:.2f}" y="{y:.0f}" width="{part:.2f}" height="{bar_px}" fill="{colors[name]}"/>'
            label = (
                f'<text x="{x + 5:.1f}" y="{y + 17:.0f}" style="fill:{_ink_on(colors[name])}">{value / total:.0%}</text>'
                if part > 40
                else ""
            )
            parts.append(f"<g><title>{tip}</title>{box}{label}</g>")
            x += part
        y += bar_px + 10
    for name, (x, row_of_legend) in places.items():
        line = y + 8 + 20 * row_of_legend
        parts.append(f'<rect x="{x:.0f}" y="{line - 9:.0f}" width="11" height="11" fill="{colors[name]}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{line + 1:.0f}">{html.escape(name.replace("_", " "))}</text>')
    return "\n".join([*parts, "</svg>"])


def distinct_colors(names: Sequence[str]) -> dict[str, str]:
    """Return a color for each name: that of its category, else the next one that no other has."""
    free = [color for color in (*SERIES_COLORS, *MORE_COLORS) if color not in {CATEGORY_COLORS.get(name) for name in names}]
    unknown = [name for name in names if name not in CATEGORY_COLORS]
    return {name: CATEGORY_COLORS.get(name) or free[unknown.index(name) % len(free)] for name in names}


def _legend(names: Sequence[str], start_px: float, width_px: float) -> tuple[dict[str, tuple[float, int]], int]:
    """Place the entries of a legend in lines; return name -> (x, line) and how many lines there are."""
    places: dict[str, tuple[float, int]] = {}
    x, line = start_px, 0
    for name in names:
        needed = 34 + 6.8 * len(name)
        if x + needed > width_px and x > start_px:
            x, line = start_px, line + 1
        places[name] = (x, line)
        x += needed
    return places, line + 1


def _ink_on(color: str) -> str:
    """Black or white, whichever can be read on a color."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#111" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "#fff"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round values that span low..high, about `wanted` of them."""
    span = high - low
    if span <= 0:
        span = abs(high) or 1.0
        low, high = low - span / 2, high + span / 2
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [step * i for i in range(first, last + 1)] or [low, high]


def thinned(points: Sequence[tuple[float, float]], limit: int = 600) -> Sequence[tuple[float, float]]:
    """Keep at most about `limit` points: of each bucket the lowest and the highest, so that spikes stay."""
    if len(points) <= limit:
        return points
    size = math.ceil(2 * len(points) / limit)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return kept


def short(value: float) -> str:
    """Format a tick: 1200000 is 1.2M, 0.00025 is 2.5e-4."""
    if value == 0:
        return "0"
    for scale, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{suffix}"
    return f"{value:g}" if abs(value) >= 1e-3 else f"{value:.0e}"


def _open(title: str, width: int, height: int) -> str:
    view = f'viewBox="0 0 {width} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {view} width="{width}" height="{height}" role="img"><title>{html.escape(title)}</title>'
    )
