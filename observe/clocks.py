"""Clock, power and temperature of the devices, and why a clock is reduced: sampled at every log line.

Sources: NVML for NVIDIA GPUs (`nvidia-ml-py`), sysfs for AMD GPUs, cpufreq and the CPU bandwidth controller of the control group for CPUs.
A machine without a source records no states; a value that a device does not report is None.

NVML takes milliseconds, so a thread takes the samples. A sample becomes an event (`device_state`, one row per device, in the log of its
process), and metrics of process 0 at the next log line.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ridgeline.configs.environment import is_number
from ridgeline.rundir.device_state import POWER_CAP, QUOTA, TROUBLE, DeviceState
from ridgeline.rundir.events import EventLog

T = TypeVar("T")
ROOT = Path("/")
END_S = 5.0
"""Longest wait for the thread at the end of a run."""


class Source(Protocol):
    """A source of device states."""

    def sample(self) -> list[DeviceState]:
        """Return the states now. May take milliseconds; never raises."""
        ...


class ClockWatch:
    """Samples the states of the devices of this process in a thread, and records them.

    Args:
      source: of the states; None: nothing is recorded.
      description: of the source, or why there is none; recorded once in the event log.
      events: of this process.
    """

    def __init__(self, source: Source | None, description: str, events: EventLog) -> None:
        self._source, self._events = source, events
        self._changed, self._closed = threading.Condition(), False
        self._due: int | None = None
        self._newest: list[DeviceState] = []
        events.emit(
            "device_states",
            host=socket.gethostname(),
            source=description if source is not None else None,
            missing=None if source is not None else description,
        )
        self._thread = threading.Thread(target=self._watch, name="clocks", daemon=True)
        if source is not None:
            self._thread.start()

    def tick(self, step: int) -> dict[str, float]:
        """Request a sample at this step; return the metrics of the previous one. Takes microseconds."""
        with self._changed:
            self._due = step
            self._changed.notify()
            return device_metrics(self._newest)

    @property
    def newest(self) -> list[DeviceState]:
        """The states at the newest sample, by local device; of CPUs one for all."""
        with self._changed:
            return list(self._newest)

    def close(self) -> None:
        """Take the requested sample and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(END_S)

    def _watch(self) -> None:
        assert self._source is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due is not None or self._closed)
                step, self._due = self._due, None
            if step is None:
                return
            states = self._source.sample()
            self._events.emit("device_state", step=step, devices=[_known(asdict(state)) for state in states])
            with self._changed:
                self._newest = states


def _known(row: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in row.items() if value is not None and value != ()}


def device_metrics(states: Sequence[DeviceState]) -> dict[str, float]:
    """Return the metrics of devices: lowest clock, total power, highest temperature, largest throttled share."""
    found: dict[str, float | None] = {
        "clock_mhz": _reduce(min, (state.clock_mhz for state in states)),
        "power_w": _reduce(sum, (state.power_w for state in states)),
        "temperature_c": _reduce(max, (state.temperature_c for state in states)),
        "stopped_share": _reduce(max, (state.stopped_share for state in states)),
    }
    return {f"train_device/{name}": float(value) for name, value in found.items() if value is not None}


def _reduce(choose: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def watch_clocks(devices: Sequence[Any], events: EventLog) -> ClockWatch:
    """Begin to record the states of the local JAX devices of this process."""
    ids = [index if device.local_hardware_id is None else device.local_hardware_id for index, device in enumerate(devices)]
    return ClockWatch(*find_source(devices[0].platform, devices[0].device_kind, ids, os.environ), events)


def find_source(
    platform: str, device_kind: str, local_ids: Sequence[int], environment: Mapping[str, str], root: Path = ROOT
) -> tuple[Source | None, str]:
    """Return the source of the states of this process's devices and its description; or None and the reason.

    Args:
      platform: of the devices, cpu or gpu.
      device_kind: as JAX names it.
      local_ids: `local_hardware_id` of the devices of this process.
      environment: with CUDA_VISIBLE_DEVICES.
      root: of the file system; for tests.
    """
    if platform == "cpu":
        cpu = Cpu(root)
        return (cpu, cpu.description) if cpu.available else (None, "this machine reports neither clocks nor a CPU quota")
    if "nvidia" in device_kind.lower() or (root / "proc/driver/nvidia").exists():
        return _nvml(local_ids, environment)
    cards = amd_cards(root)
    chosen = [cards[i] for i in local_ids if i < len(cards)]
    return (AmdGpus(chosen), "sysfs of amdgpu") if chosen else (None, f"no source of clocks for {device_kind}")


class Cpu:
    """The cores this process may use, and its control groups (version 1 or 2, whichever is mounted)."""

    def __init__(self, root: Path = ROOT, cores: Sequence[int] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._cores = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
        self._freq = [path for core in self._cores if (path := root / f"sys/devices/system/cpu/cpu{core}/cpufreq").is_dir()]
        self._before = self._stopped_s()

    @property
    def available(self) -> bool:
        """Whether there is anything to sample."""
        return bool(self._freq or self._before[1])

    @property
    def description(self) -> str:
        """The source of the values."""
        return " and ".join(["cpufreq"] * bool(self._freq) + ["cpu.stat of the control group"] * bool(self._before[1]))

    def sample(self) -> list[DeviceState]:
        """Return one state for all cores."""
        (before_s, before), (at_s, stopped) = self._before, (last := self._stopped_s())
        self._before = last
        share = None
        if stopped and at_s > before_s:
            worst_s = max(seconds - before.get(file, seconds) for file, seconds in stopped.items())
            share = min(1.0, worst_s / (at_s - before_s) / max(1, len(self._cores)))
        clock, rated = (_mean_mhz([_number(core / name) for core in self._freq]) for name in ("scaling_cur_freq", "base_frequency"))
        return [DeviceState("cpu", clock, rated, reasons=(QUOTA,) if share else (), stopped_share=share)]

    def _stopped_s(self) -> tuple[float, dict[Path, float]]:
        """Return the time, and per control group the seconds its cores were throttled so far. A process may move between groups."""
        files = [group / "cpu.stat" for group in _groups(self._root)]
        return self._clock(), {file: seconds for file in files if (seconds := _stopped(file)) is not None}


def _groups(root: Path) -> list[Path]:
    """Return the control groups of this process that limit CPU time, from its own to the visible root."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, place = line.split(":", 2)
        if number == "0" and not controllers:
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            tops = [root / "sys/fs/cgroup" / name for name in (controllers, "cpu", "cpu,cpuacct")]
        else:
            continue
        for top in dict.fromkeys(tops):
            group = top / place.strip("/")
            while group.is_dir() and group.is_relative_to(top):
                found.append(group)
                if group == top:
                    break
                group = group.parent
    return list(dict.fromkeys(found))


def _stopped(file: Path) -> float | None:
    """Return the throttled seconds in a cpu.stat; None for a group without bandwidth control."""
    values = dict(line.split(maxsplit=1) for line in _text(file).splitlines() if " " in line)
    if "throttled_usec" in values:
        return int(values["throttled_usec"]) / 1e6
    return int(values["throttled_time"]) / 1e9 if "throttled_time" in values else None


def amd_cards(root: Path = ROOT) -> list[Path]:
    """Return the sysfs directories of AMD GPUs in the order of their PCI addresses, as in the runtime."""
    cards = [path.parent for path in (root / "sys/class/drm").glob("card*/device/pp_dpm_sclk")]
    return sorted(cards, key=lambda path: path.resolve().name)


class AmdGpus:
    """AMD GPUs, from the amdgpu driver (kernel documentation, gpu/amdgpu/thermal)."""

    def __init__(self, cards: Sequence[Path]) -> None:
        self._cards = list(cards)

    def sample(self) -> list[DeviceState]:
        """Return one state for each GPU."""
        return [self._one(index, card) for index, card in enumerate(self._cards)]

    def _one(self, index: int, card: Path) -> DeviceState:
        levels = _text(card / "pp_dpm_sclk").splitlines()
        now = next((level for level in levels if level.rstrip().endswith("*")), None)
        sensors = next(iter(sorted(card.glob("hwmon/hwmon*"))), card)
        watts = [_scaled(sensors / name, 1e6) for name in ("power1_average", "power1_cap", "power1_cap_default")]
        return DeviceState(
            f"gpu:{index}",
            None if now is None else _mhz(now),
            max((mhz for level in levels if (mhz := _mhz(level)) is not None), default=None),
            power_w=watts[0] if watts[0] is not None else _scaled(sensors / "power1_input", 1e6),
            power_limit_w=watts[1],
            power_default_w=watts[2],
            temperature_c=_scaled(sensors / "temp1_input", 1e3),
        )


def _nvml(local_ids: Sequence[int], environment: Mapping[str, str]) -> tuple[Source | None, str]:
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed (extras cuda12, cuda13)"
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = {index: str(pynvml.nvmlDeviceGetUUID(handle)) for index, handle in enumerate(handles)}
    except pynvml.NVMLError as error:
        return None, f"no NVIDIA driver: {error}"
    shown = visible(uuids, environment.get("CUDA_VISIBLE_DEVICES"))
    chosen = [handles[shown[i]] for i in local_ids if i < len(shown)]
    return (NvidiaGpus(pynvml, chosen), "NVML") if chosen else (None, "NVML lists none of this process's GPUs")


def visible(uuids: Mapping[int, str], setting: str | None) -> list[int]:
    """Return the indices (of index -> uuid) in a value of CUDA_VISIBLE_DEVICES, given by index or uuid prefix; None: all."""
    if setting is None:
        return list(uuids)
    kept: list[int] = []
    for word in (word.strip() for word in setting.split(",")):
        index = (word.lstrip("0") or "0") if is_number(word) else None
        match = [i for i, uuid in uuids.items() if (index == str(i) if index else bool(word) and uuid.startswith(word))]
        if not match:
            break  # as in CUDA: an unknown entry ends the list
        kept += match[:1]
    return kept


class NvidiaGpus:
    """NVIDIA GPUs through an initialized NVML."""

    def __init__(self, pynvml: Any, handles: Sequence[Any]) -> None:
        self._pynvml, self._handles = pynvml, list(handles)

    def sample(self) -> list[DeviceState]:
        """Return one state for each GPU."""
        return [self._one(index, handle) for index, handle in enumerate(self._handles)]

    def _one(self, index: int, handle: Any) -> DeviceState:
        nvml = self._pynvml

        def query(call: Callable[..., T], *arguments: Any) -> T | None:
            try:
                return call(handle, *arguments)
            except nvml.NVMLError:
                return None

        watts = [query(f) for f in (nvml.nvmlDeviceGetPowerUsage, nvml.nvmlDeviceGetPowerManagementLimit)]
        watts.append(query(nvml.nvmlDeviceGetPowerManagementDefaultLimit))
        power_w, limit_w, default_w = (None if value is None else value / 1e3 for value in watts)
        bits = query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        return DeviceState(
            f"gpu:{index}",
            query(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            query(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            power_w=power_w,
            power_limit_w=limit_w,
            power_default_w=default_w,
            temperature_c=query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            reasons=tuple([name for bit, name in TROUBLE.items() if bits & bit] + ["power cap"] * bool(bits & POWER_CAP)),
        )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    text = _text(path).strip()
    return float(text) if text.isdigit() else None


def _scaled(path: Path, by: float) -> float | None:
    value = _number(path)
    return None if value is None else value / by


def _mean_mhz(khz: Sequence[float | None]) -> float | None:
    known = [value for value in khz if value is not None]
    return sum(known) / len(known) / 1e3 if known else None


def _mhz(level: str) -> float | None:
    """Parse a line of pp_dpm_sclk: `1: 2100Mhz *`."""
    word = next((word for word in level.split() if word.lower().endswith("mhz")), "")
    return float(word[:-3]) if word[:-3].isdigit() else None
