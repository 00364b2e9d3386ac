"""The state of a device as recorded at each log line: clock, power, temperature, and why the clock is reduced."""

from __future__ import annotations

from dataclasses import dataclass

TROUBLE = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""nvmlClocksEventReason* bits that a healthy GPU never reports under load."""


POWER_CAP = 0x04
"""The software power cap: normal at full load, unless the limit was lowered."""


QUOTA = "CPU quota of the control group"


@dataclass(frozen=True)
class DeviceState:
    """One device at one time. None: not reported by the device."""

    device: str
    """`gpu:<index of the local device>` or `cpu`."""
    clock_mhz: float | None = None
    """Of a GPU's compute units; of a CPU the mean over the cores this process may use."""
    rated_mhz: float | None = None
    """Highest clock of a GPU; base clock of a CPU."""
    power_w: float | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    """Factory default of the limit."""
    temperature_c: float | None = None
    reasons: tuple[str, ...] = ()
    """Why the clock is reduced, or the process was throttled."""
    stopped_share: float | None = None
    """Share of the time since the previous sample in which the control group was throttled (CPU quota used up), mean over the cores."""
