"""Two figures of an analysis as PNG: the time of each device by kind of work, and the operations under the roofline.

Drawn with Pillow, a dependency of TensorBoard: a plotting library would be the heaviest import of the project.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ridgeline.explain.trace.components import peak_flops_of
from ridgeline.planner.hardware import hardware
from ridgeline.rundir.analysis import Analysis, Operation
from ridgeline.rundir.analysis_times import DeviceTotal

WIDTH = 1000
_INK, _FAINT, _PAPER = "#222222", "#bbbbbb", "#ffffff"
PARTS = {
    "compute": ("compute_s", "#2ca02c"),
    "exposed communication": ("exposed_communication_s", "#ff7f0e"),
    "exposed copies": ("exposed_copy_s", "#17becf"),
    "idle": ("idle_s", "#c7c7c7"),
}
PHASES = {"forward": "#1f77b4", "backward": "#d62728", "recompute": "#9467bd", "update": "#2ca02c", "unknown": "#888888"}


def breakdown(devices: Sequence[DeviceTotal], most: int = 32) -> bytes:
    """Draw one bar per device, divided into the parts of its steps; the first `most` devices. Returns a PNG."""
    shown = devices[:most]
    row, left, top = 24, 210, 40
    height = top + row * len(shown) + 16
    image, draw = _canvas(height)
    x = float(left)
    for name, (_, color) in PARTS.items():
        draw.rectangle((x, 12, x + 12, 24), fill=color)
        draw.text((x + 17, 10), name, fill=_INK, font=_font())
        x += 40 + 8 * len(name)
    longest = max(d.total_s for d in shown) or 1.0
    for index, device in enumerate(shown):
        y, x = top + row * index, float(left)
        draw.text((left - 8, y + 9), _ellipsis(device.device), fill=_INK, font=_font(), anchor="rm")
        for key, color in PARTS.values():
            part_s = float(getattr(device, key))
            width = part_s / longest * (WIDTH - left - 20)
            draw.rectangle((x, y, x + width, y + row - 6), fill=color)
            if width > 44:
                share = f"{part_s / device.total_s:.0%}"
                draw.text((x + width / 2, y + 9), share, fill="#ffffff", font=_font(), anchor="mm")
            x += width
    return _png(image)


def roofline(analysis: Analysis, most: int = 200) -> bytes | None:
    """Draw operations by arithmetic intensity and rate, both logarithmic, under the roof of the device.

    Returns a PNG; None without an operation that has FLOPs. A device without a datasheet has no roof.
    """
    points = [(o, o.flops / o.bytes, o.flops / o.time_s) for o in analysis.operations if o.flops and o.bytes and o.time_s][:most]
    if not points:
        return None
    device = None if analysis.hardware is None else hardware(analysis.hardware)
    peak = None if device is None else peak_flops_of(device, _dtype(analysis))
    bandwidth = None if device is None else device.memory_bandwidth_bytes_per_s
    xs = [x for _, x, _ in points] + ([peak / bandwidth] if peak and bandwidth else [])
    ys = [y for _, _, y in points] + ([peak] if peak else [])
    height, left, bottom, top = 620, 90, 60, 40
    image, draw = _canvas(height)
    x_of = _log_scale(min(xs), max(xs), left, WIDTH - 30)
    y_of = _log_scale(min(ys), max(ys), height - bottom, top)
    for exponent in range(math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs))) + 1):
        x = x_of(10.0**exponent)
        draw.line((x, top, x, height - bottom), fill=_FAINT)
        draw.text((x, height - bottom + 6), f"1e{exponent}", fill=_INK, font=_font(), anchor="mt")
    for exponent in range(math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys))) + 1):
        y = y_of(10.0**exponent)
        draw.line((left, y, WIDTH - 30, y), fill=_FAINT)
        draw.text((left - 8, y), f"1e{exponent}", fill=_INK, font=_font(), anchor="rm")
    draw.text((WIDTH / 2, height - 18), "FLOP per byte", fill=_INK, font=_font(), anchor="mm")
    draw.text((8, 12), "FLOP/s", fill=_INK, font=_font())
    if peak and bandwidth:
        edge = peak / bandwidth
        low, high = 10.0 ** math.floor(math.log10(min(xs))), 10.0 ** math.ceil(math.log10(max(xs)))
        draw.line((x_of(low), y_of(low * bandwidth), x_of(edge), y_of(peak), x_of(high), y_of(peak)), fill=_INK, width=2)
    for operation, intensity, rate in points:
        _dot(draw, x_of(intensity), y_of(rate), operation, points[0][0].time_s)
    x = left + 60.0
    for name, color in PHASES.items():
        draw.ellipse((x, 14, x + 10, 24), fill=color)
        draw.text((x + 15, 10), name, fill=_INK, font=_font())
        x += 110
    return _png(image)


def _dot(draw: ImageDraw.ImageDraw, x: float, y: float, operation: Operation, longest_s: float) -> None:
    """A dot whose area is the operation's time."""
    radius = 3 + 9 * math.sqrt(operation.time_s / longest_s)
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=PHASES.get(operation.phase, "#888888"), width=3)


def _dtype(analysis: Analysis) -> str:
    """Of the matmuls that take the most time."""
    return next((o.dtype for o in analysis.operations if o.flops and o.dtype), "")


def _log_scale(low: float, high: float, start: float, stop: float) -> Any:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    span = max(1, last - first)
    return lambda value: start + (math.log10(value) - first) / span * (stop - start)


def _canvas(height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (WIDTH, height), _PAPER)
    return image, ImageDraw.Draw(image)


def _font() -> Any:
    return ImageFont.load_default(14)


def _ellipsis(text: str, most: int = 26) -> str:
    return text if len(text) <= most else "…" + text[-most + 1 :]


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
