"""What devices say of their own speed: which of them is held down, by how much, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.explain.diagnosis.finding import THRESHOLDS
from ridgeline.explain.diagnosis.ranks import steady
from ridgeline.rundir.device_state import TROUBLE
from ridgeline.rundir.events import Event
from ridgeline.rundir.noise import percentile

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class HeldDown:
    """A device that runs below what it should, by its own word."""

    device: str
    share: float
    """Of its speed that is missing."""
    seen: str
    """Clock, power limit or quota, with figures."""


def device_rows(events: Iterable[Event]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the samples of every device, labelled as in a step ledger (`host-p00001/gpu:0`), in the order they were taken."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    hosts: dict[int, str] = {}
    for event in events:
        if event.kind == "device_states":
            hosts[event.process] = str(event.fields.get("host", "?"))
        elif event.kind == "device_state":
            for row in event.fields.get("devices", ()):
                label = f"{hosts.get(event.process, '?')}-p{event.process:05d}/{row['device']}"
                found.setdefault(label, []).append(row)
    return found


def held_down(devices: Mapping[str, Rows]) -> HeldDown | None:
    """Return the device that loses most, None when all run as they should.

    A device is held down when three of four samples say so at least: its control group used up its CPU time; a reason that no healthy
    device has under load; a power limit below the one it came with that binds; a clock below its base (CPUs) or below that of the others.
    """
    clocks = {name: percentile(sorted(known), 0.5) for name, rows in devices.items() if (known := _values(rows, "clock_mhz"))}
    found = [state for name, rows in devices.items() for state in _each(name, rows, clocks)]
    return max(found, key=lambda state: state.share, default=None)


def _each(name: str, rows: Rows, clocks: Mapping[str, float]) -> Iterable[HeldDown]:
    stopped = _values(rows, "stopped_share")
    if stopped and (share := steady(stopped)) > THRESHOLDS["stopped"][0]:
        yield HeldDown(name, share, f"{name} was stopped {share:.0%} of the time by the CPU quota of its control group")
    if name not in clocks:
        return
    least = THRESHOLDS["throttled"][0]
    clock, rated = clocks[name], max(_values(rows, "rated_mhz"), default=None)
    others = sorted(mhz for other, mhz in clocks.items() if other != name and _kind(other) == _kind(name))
    if others and (fraction := clock / percentile(others, 0.5)) < least:
        yield HeldDown(name, 1 - fraction, f"{name} runs at {clock:.0f} MHz, {fraction:.0%} of the others{_why(rows)}")
    if rated is None or clock >= least * rated:
        return
    lowered = all(row.get("power_limit_w", 1) < least * row.get("power_default_w", 0) for row in rows)
    if _mostly(rows, TROUBLE.values()) or _kind(name) == "cpu" or (lowered and _mostly(rows, ["power cap"])):
        limit = f"; its power limit is {rows[-1]['power_limit_w']:.0f} of {rows[-1]['power_default_w']:.0f} W" if lowered else ""
        what = "base" if _kind(name) == "cpu" else "highest"
        yield HeldDown(name, 1 - clock / rated, f"{name} runs at {clock / rated:.0%} of its {what} clock{_why(rows)}{limit}")


def _kind(name: str) -> str:
    return name.split("/")[-1].split(":")[0]


def _values(rows: Rows, key: str) -> list[float]:
    return [float(row[key]) for row in rows if key in row]


def _mostly(rows: Rows, reasons: Iterable[str]) -> bool:
    """Whether three of four samples give one of these reasons."""
    wanted = set(reasons)
    return steady([float(bool(wanted & set(row.get("reasons", ())))) for row in rows]) > 0


def _why(rows: Rows) -> str:
    reasons = sorted({reason for row in rows for reason in row.get("reasons", ())})
    return f" ({', '.join(reasons)})" if reasons else ""
