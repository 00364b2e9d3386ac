"""Numbers as text: counts, plurals, sizes and times."""

from __future__ import annotations


def format_count(value: float) -> str:
    """Format a count in three figures: 950, 12.3k, 4.56M."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g}{suffix}" if abs(value) < 999.5 * scale else f"{value / scale:.0f}{suffix}"
    return f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """Return `1 device`, `8 devices`, `1,000 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(value: float) -> str:
    """Format a size in three figures, decimal units: 512 B, 12.3 kB, 64 MB, 1,430 GB."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g} {unit}" if abs(value) < 999.5 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value:.3g} B"


def format_seconds(value_s: float) -> str:
    """Format a short time: 850 us, 12.3 ms, 4.56 s."""
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} us"
    return f"{value_s * 1e3:.3g} ms" if value_s < 0.9995 else f"{value_s:.3g} s"


def format_duration(value_s: float) -> str:
    """Format a long time: 45s, 3m12s, 2h05m, 3d04h."""
    total = round(value_s)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"
