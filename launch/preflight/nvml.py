"""What the NVIDIA driver knows of its GPUs: errors of the memory, throttling, links, free memory (through NVML, `nvidia-ml-py`).

Read without JAX and before it starts, so that free memory is what the job finds. A machine without the driver has no facts at all, with
the reason; a figure that a GPU does not offer (`Not Supported`) is None.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ridgeline.launch.cluster.devices import gpus_present
from ridgeline.observe import clocks

T = TypeVar("T")

THROTTLE_BITS, _POWER_CAP = clocks.TROUBLE, clocks.POWER_CAP
_SAMPLE_S = 0.2


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as NVML reports it. None: not offered by this GPU."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    ecc_enabled: bool | None
    ecc_uncorrected: int | None
    """Uncorrected memory errors since the driver was loaded."""
    ecc_corrected: int | None
    remap_pending: bool | None
    """A damaged row of the memory waits for a reset of the GPU (Ampere and newer)."""
    remap_failed: bool | None
    """Rows could not be replaced: the GPU is to be exchanged."""
    retired_pending: bool | None
    """A damaged page waits for a reset (before Ampere)."""
    throttle_bits: int | None
    temperature_c: int | None
    power_limit_w: float | None
    power_default_w: float | None
    pcie_generation: int | None
    pcie_generation_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    nvlinks_active: int | None
    nvlinks: int | None
    """None: the GPU has no NVLink."""


@dataclass(frozen=True)
class GpuReport:
    """The GPUs a process may use, or why nothing is known."""

    gpus: tuple[GpuFacts, ...]
    missing: str | None = None
    """Why there is no NVML, in words; None: it was read."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GpuReport:
        """Rebuild what `as_dict` gave."""
        return cls(tuple(GpuFacts(**gpu) for gpu in values["gpus"]), values["missing"])


def read_gpus(environment: Mapping[str, str]) -> GpuReport:
    """Read the GPUs that CUDA_VISIBLE_DEVICES lets this process use."""
    try:
        import pynvml
    except ImportError:
        if gpus_present() is None:
            return GpuReport((), "no NVIDIA GPU here")
        return GpuReport((), "nvidia-ml-py is not installed (extras cuda12, cuda13)")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuReport((), f"no NVIDIA driver: {error}")
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [(index, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
        found = [_read(pynvml, index, handle, driver) for index, handle in handles]
    except pynvml.NVMLError as error:
        return GpuReport((), f"NVML: {error}")
    finally:
        pynvml.nvmlShutdown()
    return GpuReport(tuple(visible(found, environment.get("CUDA_VISIBLE_DEVICES"))))


def visible(gpus: list[GpuFacts], setting: str | None) -> list[GpuFacts]:
    """Keep the GPUs that a value of CUDA_VISIBLE_DEVICES names (see observe.clocks.visible); None: all."""
    by_index = {gpu.index: gpu for gpu in gpus}
    return [by_index[index] for index in clocks.visible({gpu.index: gpu.uuid for gpu in gpus}, setting)]


def _read(pynvml: Any, index: int, handle: Any, driver: str) -> GpuFacts:
    def ask(call: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return call(handle, *arguments)
        except pynvml.NVMLError:
            return None

    memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
    ecc = ask(pynvml.nvmlDeviceGetCurrentEccMode)
    rows = ask(pynvml.nvmlDeviceGetRemappedRows)
    pending = ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus)
    power, default = ask(pynvml.nvmlDeviceGetPowerManagementLimit), ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit)
    links = [ask(pynvml.nvmlDeviceGetNvLinkState, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    states = [bool(state) for state in links if state is not None]

    def errors(kind: int) -> int | None:
        return ask(pynvml.nvmlDeviceGetTotalEccErrors, kind, pynvml.NVML_VOLATILE_ECC)

    return GpuFacts(
        index=index,
        uuid=ask(pynvml.nvmlDeviceGetUUID) or f"index-{index}",
        name=ask(pynvml.nvmlDeviceGetName) or "unknown",
        driver=driver,
        memory_total_bytes=memory and memory.total,
        memory_free_bytes=memory and memory.free,
        ecc_enabled=None if ecc is None else ecc == pynvml.NVML_FEATURE_ENABLED,
        ecc_uncorrected=errors(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ecc_corrected=errors(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        retired_pending=None if pending is None else bool(pending),
        throttle_bits=ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        temperature_c=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        power_limit_w=None if power is None else power / 1e3,
        power_default_w=None if default is None else default / 1e3,
        pcie_generation=ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        pcie_generation_max=ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
        pcie_width=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_width_max=ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        nvlinks_active=sum(states) if states else None,
        nvlinks=len(states) or None,
    )


class LoadSampler:
    """Watches the GPUs while they are measured: an idle GPU never throttles. Keeps every throttle bit seen and the highest temperature."""

    def __init__(self, report: GpuReport, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._seen = {gpu.uuid: gpu for gpu in report.gpus}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="doctor-nvml", daemon=True)
        if report.gpus:
            self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            for gpu in read_gpus(self._environment).gpus:
                if gpu.uuid in self._seen:
                    self._seen[gpu.uuid] = merge_load(self._seen[gpu.uuid], gpu)

    def stop(self) -> list[GpuFacts]:
        """End watching; return the facts from before with what was seen under load."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        return list(self._seen.values())


def merge_load(before: GpuFacts, now: GpuFacts) -> GpuFacts:
    """Add a sample under load: throttle bits and links accumulate, temperature is the highest, free memory stays that from before."""
    values = asdict(before)
    for name, join in (("throttle_bits", _either), ("temperature_c", max), ("pcie_generation", max), ("ecc_uncorrected", max)):
        old, new = values[name], getattr(now, name)
        values[name] = new if old is None else old if new is None else join(old, new)
    return GpuFacts(**values)


def _either(a: int, b: int) -> int:
    return a | b


def throttle_names(bits: int) -> list[str]:
    """Name the reasons that mean trouble."""
    return [name for bit, name in THROTTLE_BITS.items() if bits & bit]


def power_capped(bits: int) -> bool:
    """Say whether the software power cap held the clock down."""
    return bool(bits & _POWER_CAP)
