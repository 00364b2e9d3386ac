"""Charts of a study document (explain/study/document.py): throughput, efficiency, time to solution with its fit, cost; log2 axis."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.explain.report.charts import SERIES_COLORS, short, ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 280, 64, 16, 40, 40
LAW_POINTS = 60


@dataclass(frozen=True)
class Curve:
    """A series over devices."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = True
    bars: Sequence[tuple[float, float, float]] = ()
    """(devices, low, high): the scatter of the repeats, or the interval of a forecast."""
    line: bool = True
    """Connect the points."""


def charts(study: Mapping[str, Any]) -> dict[str, str]:
    """Draw every chart that the figures allow; name -> SVG."""
    ran = [row for row in study["rows"] if row.get("failure") is None]
    if len(ran) < 2:
        return {}
    per = "per 1e9 tokens" if study["mode"] == "weak" else "of the run"
    time = "seconds per 1e6 tokens" if study["mode"] == "weak" else "seconds"
    made = {
        "throughput": chart("Throughput", "tokens/s", _throughput(study, ran), low=0.0),
        "efficiency": chart("Parallel efficiency", "share", _efficiency(study, ran), low=0.0),
        "time": chart("Time to solution", time, _time(study, ran), low=0.0),
        "cost": chart("Cost", f"{'USD' if _priced(ran) else 'device-hours'} {per}", _cost(study, ran), low=0.0),
    }
    return {name: picture for name, picture in made.items() if picture}


def _throughput(study: Mapping[str, Any], ran: Sequence[Mapping[str, Any]]) -> list[Curve]:
    first, last = ran[0], _last(study, ran)
    measured = Curve(
        "measured",
        [(r["devices"], r["tokens_per_s"]) for r in ran],
        bars=[(r["devices"], r["tokens_per_s"] * (1 - r["spread"]), r["tokens_per_s"] * (1 + r["spread"])) for r in ran if r["spread"]],
    )
    per_device = first["tokens_per_s_per_device"]
    curves = [measured, Curve("ideal", [(d, d * per_device) for d in _grid(first["devices"], last)], dashed=True, dots=False)]
    predicted = [(r["devices"], r["predicted_tokens_per_s"]) for r in ran if r.get("predicted_tokens_per_s")]
    curves += [Curve("planned", predicted, dashed=True)] if predicted else []
    ahead = study["next"]
    if ahead and "tokens_per_s" in ahead:
        interval = [(ahead["devices"], ahead["tokens_per_s_low"], ahead["tokens_per_s_high"])]
        curves.append(Curve("fit, next", [(ahead["devices"], ahead["tokens_per_s"])], bars=interval))
    return curves


def _efficiency(study: Mapping[str, Any], ran: Sequence[Mapping[str, Any]]) -> list[Curve]:
    curves = [Curve("measured", [(r["devices"], r["efficiency"]) for r in ran if r["efficiency"] is not None])]
    curves.append(Curve("ideal", [(d, 1.0) for d in _grid(ran[0]["devices"], _last(study, ran))], dashed=True, dots=False))
    ahead = study["next"]
    return curves + ([Curve("fit, next", [(ahead["devices"], ahead["efficiency"])])] if ahead and "efficiency" in ahead else [])


def _time(study: Mapping[str, Any], ran: Sequence[Mapping[str, Any]]) -> list[Curve]:
    weak = study["mode"] == "weak"

    def scaled(devices: float, time_s: float) -> float:
        """Per 1e6 tokens in weak scaling, where every scale does other work."""
        if not weak:
            return time_s
        return time_s / (ran[0]["tokens"] * devices / ran[0]["devices"]) * 1e6

    bars = [(r["devices"], *(scaled(r["devices"], r["time_s"] * f) for f in (1 - s, 1 + s))) for r in ran if (s := r["time_spread"])]
    curves = [Curve("measured", [(r["devices"], scaled(r["devices"], r["time_s"])) for r in ran], bars=bars)]
    law, ahead = study["law"], study["next"]
    if law is not None:
        grid = _grid(ran[0]["devices"], _last(study, ran))
        fitted = [(d, scaled(d, law["fixed_s"] + law["work_s"] / d + law["sync_s"] * math.log2(d))) for d in grid]
        curves.append(Curve("law", fitted, dashed=True, dots=False))
    if ahead is not None:
        at = ahead["devices"]
        interval = [(at, scaled(at, ahead["time_low_s"]), scaled(at, ahead["time_high_s"]))]
        curves.append(Curve("next doubling", [(at, scaled(at, ahead["time_s"]))], bars=interval))
    return curves


def _priced(ran: Sequence[Mapping[str, Any]]) -> bool:
    return all(row.get("usd") for row in ran)


def _cost(study: Mapping[str, Any], ran: Sequence[Mapping[str, Any]]) -> list[Curve]:
    key = "usd" if _priced(ran) else "device_hours"
    unit = (lambda row: row["tokens"] / 1e9) if study["mode"] == "weak" else (lambda row: 1.0)
    return [Curve("measured", [(row["devices"], row[key] / unit(row)) for row in ran])]


def _last(study: Mapping[str, Any], ran: Sequence[Mapping[str, Any]]) -> int:
    return int(study["next"]["devices"] if study["next"] else ran[-1]["devices"])


def _grid(first: float, last: float) -> list[float]:
    """Return scales from first to last, evenly spaced on a logarithmic axis."""
    return [first * (last / first) ** (i / LAW_POINTS) for i in range(LAW_POINTS + 1)]


def chart(
    title: str, y_label: str, curves: Sequence[Curve], *, low: float | None = None, x_label: str = "devices", x_format: str = "{:g}"
) -> str:
    """Draw curves over devices, or another quantity, on a logarithmic axis; returns an empty string without any point."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    xs = sorted({x for curve in curves for x, _ in curve.points})
    ys = [y for curve in curves for _, y in curve.points] + [y for curve in curves for bar in curve.bars for y in bar[1:]]
    y_low, y_high = (min(ys) if low is None else low), max(ys)
    y_ticks = [tick for tick in ticks(min(y_low, min(ys)), y_high) if tick >= y_low]
    y_high = max(y_high, y_ticks[-1]) or 1.0
    span_x, span_y = math.log2(xs[-1] / xs[0]) or 1.0, (y_high - y_low) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        x_px = LEFT + math.log2(x / xs[0]) / span_x * (WIDTH - LEFT - RIGHT)
        return x_px, HEIGHT - BOTTOM - (y - y_low) / span_y * (HEIGHT - TOP - BOTTOM)

    view = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img"><title>{html.escape(title)}</title>']
    parts.append(f'<text x="4" y="14" style="font-weight:600">{html.escape(title)}</text>')
    parts.append(f'<text x="4" y="30">{html.escape(y_label)}</text>')
    for tick in y_ticks:
        _, y = at(xs[0], tick)
        parts.append(f'<line class="grid" stroke="#ccc" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for devices in sorted({x for curve in curves if curve.dots for x, _ in curve.points}):
        x, _ = at(devices, y_low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x_format.format(devices)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>')
    legend_px = float(WIDTH - RIGHT)
    for index, curve in enumerate(curves):
        color = SERIES_COLORS[index % len(SERIES_COLORS)]
        parts += _drawn(curve, color, at)
        parts.append(f'<text x="{legend_px:.0f}" y="14" text-anchor="end" style="fill:{color}">{html.escape(curve.name)}</text>')
        legend_px -= 16 + 6.5 * len(curve.name)
    return "\n".join([*parts, "</svg>"])


def _drawn(curve: Curve, color: str, at: Any) -> list[str]:
    """Draw one curve: its line, its dots, its bars."""
    points = [at(x, y) for x, y in curve.points]
    dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>'] if len(points) > 1 and curve.line else []
    if curve.dots:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{color}"/>' for x, y in points]
    for devices, low, high in curve.bars:
        (x, top), (_, bottom) = at(devices, high), at(devices, low)
        parts.append(f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}M{x - 4:.1f} {top:.1f}h8M{x - 4:.1f} {bottom:.1f}h8" stroke="{color}"/>')
    return parts
