"""Samples the states of the local devices at every log line, in a thread of its own: NVML takes milliseconds that no step shall wait for.

A sample becomes an event (`device_state`, one row per device, in the log of its process), and metrics of process 0 at the log line after.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ridgeline.observe.clocks import Source, find_source
from ridgeline.rundir.device_state import DeviceState
from ridgeline.rundir.events import EventLog

END_S = 5.0
"""Longest wait for the thread at the end of a run."""


class ClockWatch:
    """Keeps the newest states of the devices of this process.

    Args:
      source: knows them; None: nothing is recorded.
      told: where they come from, or why there is no source; said once in the event log.
      events: of this process.
    """

    def __init__(self, source: Source | None, told: str, events: EventLog) -> None:
        self._source, self._events = source, events
        self._asked, self._closed = threading.Condition(), False
        self._due: int | None = None
        self._newest: list[DeviceState] = []
        events.emit(
            "device_states",
            host=socket.gethostname(),
            source=told if source is not None else None,
            missing=None if source is not None else told,
        )
        self._thread = threading.Thread(target=self._watch, name="clocks", daemon=True)
        if source is not None:
            self._thread.start()

    def tick(self, step: int) -> dict[str, float]:
        """Ask for a sample at this step; return the metrics of the one before. Costs microseconds."""
        with self._asked:
            self._due = step
            self._asked.notify()
            return device_metrics(self._newest)

    def close(self) -> None:
        """Take what is due and end the thread."""
        with self._asked:
            self._closed = True
            self._asked.notify()
        if self._thread.is_alive():
            self._thread.join(END_S)

    def _watch(self) -> None:
        assert self._source is not None
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._due is not None or self._closed)
                step, self._due = self._due, None
            if step is None:
                return
            states = self._source.sample()
            self._events.emit("device_state", step=step, devices=[_known(asdict(state)) for state in states])
            with self._asked:
                self._newest = states


def _known(row: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in row.items() if value is not None and value != ()}


def device_metrics(states: Sequence[DeviceState]) -> dict[str, float]:
    """Return the metrics of some devices: the lowest clock, the power of all, the highest temperature, the worst stop."""
    found: dict[str, float | None] = {
        "clock_mhz": _worst(min, (state.clock_mhz for state in states)),
        "power_w": _worst(sum, (state.power_w for state in states)),
        "temperature_c": _worst(max, (state.temperature_c for state in states)),
        "stopped_share": _worst(max, (state.stopped_share for state in states)),
    }
    return {f"train_device/{name}": float(value) for name, value in found.items() if value is not None}


def _worst(choose: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def watch_clocks(devices: Sequence[Any], events: EventLog) -> ClockWatch:
    """Begin to record what the local devices (of JAX) of this process say of their clocks."""
    ids = [index if device.local_hardware_id is None else device.local_hardware_id for index, device in enumerate(devices)]
    return ClockWatch(*find_source(devices[0].platform, devices[0].device_kind, ids, os.environ), events)
