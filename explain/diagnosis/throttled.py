"""Throttled devices: which device runs below its normal speed by its own clock, power limit or CPU quota, by how much, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from ridgeline.explain.diagnosis.finding import THRESHOLDS
from ridgeline.explain.diagnosis.ranks import steady
from ridgeline.rundir.device_state import TROUBLE, DeviceState
from ridgeline.rundir.events import Event
from ridgeline.rundir.noise import percentile

Samples = Sequence[DeviceState]
ENOUGH = 4
"""Samples of a device from which on `three of four` means something."""


@dataclass(frozen=True)
class Throttled:
    """A device that runs below its normal speed, by its own report."""

    device: str
    share: float
    """Share of its normal speed that is missing."""
    reason: str
    """Clock, power limit or quota, with figures; one sentence."""


def device_samples(events: Iterable[Event]) -> dict[str, list[DeviceState]]:
    """Return the samples of every device of one start, in order of time. Labels are those of a step ledger: `host-p00001/gpu:0`.

    The start is the newest one with ENOUGH samples: another start may have run on other devices, whose clocks do not compare.
    """
    starts: dict[int, dict[str, list[DeviceState]]] = {}
    hosts: dict[int, str] = {}
    for event in events:
        if event.kind == "device_states":
            hosts[event.process] = str(event.fields.get("host", "?"))
        elif event.kind == "device_state":
            found = starts.setdefault(event.restart, {})
            rows = event.fields.get("devices")
            for state in filter(None, map(_state, rows if isinstance(rows, list) else ())):
                label = f"{hosts.get(event.process, '?')}-p{event.process:05d}/{state.device}"
                found.setdefault(label, []).append(state)
    longest = {start: max((len(rows) for rows in found.values()), default=0) for start, found in starts.items()}
    return starts[max(starts, key=lambda start: (min(longest[start], ENOUGH), start))] if starts else {}


_NUMBERS = tuple(field.name for field in fields(DeviceState) if field.name not in ("device", "reasons"))


def _state(row: object) -> DeviceState | None:
    """Return the state of a device of an event, without values that are damaged; None where the row is."""
    if not isinstance(row, dict) or not isinstance(row.get("device"), str):
        return None
    numbers = {name: float(x) for name in _NUMBERS if isinstance(x := row.get(name), int | float) and math.isfinite(x)}
    reasons = row.get("reasons", ())
    return DeviceState(row["device"], reasons=tuple(map(str, reasons)) if isinstance(reasons, list) else (), **numbers)


def most_throttled(devices: Mapping[str, Samples]) -> Throttled | None:
    """Return the device that is throttled the most; None when all run at their normal speed.

    A device is throttled when at least three of four samples show it: its control group used up its CPU time; a reason that no healthy
    device reports under load; a power limit below the factory limit that is reached; a clock below its base (CPUs) or below that of the
    other devices.
    """
    clocks = {name: percentile(sorted(known), 0.5) for name, rows in devices.items() if (known := _clocks(rows))}
    found = [state for name, rows in devices.items() for state in _each(name, rows, clocks)]
    return max(found, key=lambda state: state.share, default=None)


def _each(name: str, rows: Samples, clocks: Mapping[str, float]) -> Iterable[Throttled]:
    stopped = [row.stopped_share for row in rows if row.stopped_share is not None]
    if stopped and (share := steady(stopped)) > THRESHOLDS["stopped"][0]:
        yield Throttled(name, share, f"{name} was stopped {share:.0%} of the time by the CPU quota of its control group")
    if name not in clocks:
        return
    least = THRESHOLDS["throttled"][0]
    clock, rated = clocks[name], max((row.rated_mhz for row in rows if row.rated_mhz is not None), default=None)
    others = sorted(mhz for other, mhz in clocks.items() if other != name and _kind(other) == _kind(name))
    if others and (fraction := clock / percentile(others, 0.5)) < least:
        yield Throttled(name, 1 - fraction, f"{name} runs at {clock:.0f} MHz, {fraction:.0%} of the median other device{_why(rows)}")
    if rated is None or clock >= least * rated:
        return
    limit = _lowered_limit(rows)
    if _mostly(rows, TROUBLE.values()) or _kind(name) == "cpu" or (limit and _mostly(rows, ["power cap"])):
        what = "base" if _kind(name) == "cpu" else "highest"
        yield Throttled(name, 1 - clock / rated, f"{name} runs at {clock / rated:.0%} of its {what} clock{_why(rows)}{limit}")


def _lowered_limit(rows: Samples) -> str:
    """Describe a power limit that is clearly below the factory limit in all samples; empty without one."""
    for row in rows:
        limit_w, factory_w = row.power_limit_w, row.power_default_w
        if limit_w is None or factory_w is None or limit_w >= THRESHOLDS["throttled"][0] * factory_w:
            return ""
    return f"; its power limit is {rows[-1].power_limit_w:.0f} of {rows[-1].power_default_w:.0f} W"


def _kind(name: str) -> str:
    return name.split("/")[-1].split(":")[0]


def _clocks(rows: Samples) -> list[float]:
    return [row.clock_mhz for row in rows if row.clock_mhz is not None]


def _mostly(rows: Samples, reasons: Iterable[str]) -> bool:
    """Whether at least three of four samples have one of these reasons."""
    wanted = set(reasons)
    return steady([float(bool(wanted & set(row.reasons))) for row in rows]) > 0


def _why(rows: Samples) -> str:
    reasons = sorted({reason for row in rows for reason in row.reasons})
    return f" ({', '.join(reasons)})" if reasons else ""
