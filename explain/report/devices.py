"""The part of the report about what devices said of themselves: clock, power, temperature, and what held them down."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.explain.diagnosis.held_down import held_down
from ridgeline.explain.report.html import table, text

COLUMNS = (
    ("clock_mhz", "clock MHz", "{:.0f}"),
    ("rated_mhz", "highest or base MHz", "{:.0f}"),
    ("power_w", "power W", "{:.0f}"),
    ("power_limit_w", "limit W", "{:.0f}"),
    ("temperature_c", "temperature C", "{:.0f}"),
    ("stopped_share", "stopped by quota", "{:.0%}"),
)


def devices_section(devices: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the HTML: medians over the log lines, reasons that were ever given, the verdict; [] where no device said anything."""
    if not devices:
        return []
    rows = []
    for name, samples in devices.items():
        known = [[float(sample[key]) for sample in samples if key in sample] for key, _, _ in COLUMNS]
        reasons = sorted({reason for sample in samples for reason in sample.get("reasons", ())})
        figures = [
            write.format(statistics.median(values)) if values else "n/a" for values, (_, _, write) in zip(known, COLUMNS, strict=True)
        ]
        rows.append([name, *figures, ", ".join(reasons)])
    held = held_down(devices)
    verdict = "None is held down." if held is None else f"{held.seen}."
    head = ["device", *(heading for _, heading, _ in COLUMNS), "reasons given"]
    return ["<h3>What the devices say</h3>", f'<p class="soft">Medians over the log lines. {text(verdict)}</p>', table(head, rows)]
