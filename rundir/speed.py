"""The speed of a run: one definition for the summary at its end, the report, comparisons, studies, and the tables of runs.

It is the tokens of the logged steps over their step time, in tokens/s. Step time excludes evaluations, saves and the start and end of
captures. The first log window of each start is warm-up and does not count, unless there are no others. The rate of one log window,
`train_speed/tokens_per_s`, scatters around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.rundir.events import Event

Line = Mapping[str, float]
"""A log line: `restart`, the number of its start; `step`; and the metrics of rundir.metrics without their groups."""
_SPECIAL = ("NaN", "Infinity", "-Infinity")


def log_lines(events: Iterable[Event], process: int = 0) -> list[Line]:
    """Return the log lines of one process. Values that are not numbers (a damaged log) are left out."""
    return [
        {name: float(value) for name, value in event.fields.items() if _is_number(value)} | {"restart": float(event.restart)}
        for event in events
        if event.kind == "step" and event.process == process
    ]


def _is_number(value: object) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or value in _SPECIAL


@dataclass(frozen=True)
class Window:
    """The steps between two log lines of one start."""

    steps: int
    mean_s: float
    median_s: float
    tokens_per_s: float
    mfu: float | None
    """None on a device without a datasheet peak."""

    @property
    def time_s(self) -> float:
        """Step time of all its steps."""
        return self.steps * self.mean_s


def windows(lines: Iterable[Line], warmup_steps: int | None = None, *, only_warmup: bool = True) -> list[Window]:
    """Return the timed log windows that count.

    Args:
      lines: of `log_lines`.
      warmup_steps: windows that begin before this step are warm-up; None: the first window of each start.
      only_warmup: return the warm-up of a run that has no other windows.
    """
    found: list[Window] = []
    excluded: list[Window] = []
    before: dict[float, int] = {}
    for line in lines:
        start, step = line["restart"], int(line["step"])
        begin = before.get(start, max(before.values(), default=0))
        warm = start not in before if warmup_steps is None else begin < warmup_steps
        before[start] = step
        if (window := _window(line, step - begin)) is not None:
            (excluded if warm else found).append(window)
    return found or (excluded if only_warmup else [])


def _window(line: Line, steps: int) -> Window | None:
    median_s, tokens_per_s = line.get("step_time_p50_s", 0.0), line.get("tokens_per_s", 0.0)
    mean_s = line.get("step_time_mean_s", median_s)
    if steps < 1 or not (0 < mean_s < math.inf and 0 < tokens_per_s < math.inf):
        return None
    return Window(steps, mean_s, median_s or mean_s, tokens_per_s, line.get("mfu"))


@dataclass(frozen=True)
class Speed:
    """The speed of a run."""

    tokens_per_s: float
    """Over all devices."""
    step_s: float
    """Mean step time."""
    mfu: float | None
    steps: int
    """Steps that count."""


def run_speed(counted: Sequence[Window]) -> Speed | None:
    """Return the speed over the windows of `windows`; None without any."""
    total_s, steps = math.fsum(window.time_s for window in counted), sum(window.steps for window in counted)
    if not counted:
        return None
    rates = [window.mfu * window.time_s for window in counted if window.mfu is not None]
    return Speed(
        tokens_per_s=math.fsum(window.tokens_per_s * window.time_s for window in counted) / total_s,
        step_s=total_s / steps,
        mfu=math.fsum(rates) / total_s if len(rates) == len(counted) else None,
        steps=steps,
    )
