"""Facts about GPUs from NVML (`nvidia-ml-py`): memory errors, throttling, links, free memory.

Read without JAX and before it starts, so that the free memory is that before the job. Without a driver there are no facts, only the reason;
a value that a GPU does not support is None.
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
    """One GPU as NVML reports it. None: not supported by this GPU."""

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
    """A damaged memory row will be remapped at the next reset (Ampere and newer)."""
    remap_failed: bool | None
    """Remapping failed: the GPU must be replaced."""
    retired_pending: bool | None
    """A damaged page will be retired at the next reset (before Ampere)."""
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
    """The GPUs a process may use, or the reason of their absence."""

    gpus: tuple[GpuFacts, ...]
    missing: str | None = None
    """Why NVML was not read; None: it was."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def read_gpus(environment: Mapping[str, str]) -> GpuReport:
    """Read the GPUs that CUDA_VISIBLE_DEVICES lets this process use."""
    try:
        import pynvml
    except ImportError:
        if gpus_present() is None:
            return GpuReport((), "no NVIDIA GPU")
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
    def query(call: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return call(handle, *arguments)
        except pynvml.NVMLError:
            return None

    memory = query(pynvml.nvmlDeviceGetMemoryInfo)
    ecc = query(pynvml.nvmlDeviceGetCurrentEccMode)
    rows = query(pynvml.nvmlDeviceGetRemappedRows)
    pending = query(pynvml.nvmlDeviceGetRetiredPagesPendingStatus)
    power, default = query(pynvml.nvmlDeviceGetPowerManagementLimit), query(pynvml.nvmlDeviceGetPowerManagementDefaultLimit)
    links = [query(pynvml.nvmlDeviceGetNvLinkState, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    states = [bool(state) for state in links if state is not None]

    def errors(kind: int) -> int | None:
        return query(pynvml.nvmlDeviceGetTotalEccErrors, kind, pynvml.NVML_VOLATILE_ECC)

    return GpuFacts(
        index=index,
        uuid=query(pynvml.nvmlDeviceGetUUID) or f"index-{index}",
        name=query(pynvml.nvmlDeviceGetName) or "unknown",
        driver=driver,
        memory_total_bytes=memory and memory.total,
        memory_free_bytes=memory and memory.free,
        ecc_enabled=None if ecc is None else ecc == pynvml.NVML_FEATURE_ENABLED,
        ecc_uncorrected=errors(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ecc_corrected=errors(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        retired_pending=None if pending is None else bool(pending),
        throttle_bits=query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        temperature_c=query(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        power_limit_w=None if power is None else power / 1e3,
        power_default_w=None if default is None else default / 1e3,
        pcie_generation=query(pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        pcie_generation_max=query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
        pcie_width=query(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_width_max=query(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        nvlinks_active=sum(states) if states else None,
        nvlinks=len(states) or None,
    )


class LoadSampler:
    """Samples the GPUs under load, since an idle GPU does not throttle. Keeps all throttle bits and the highest temperature."""

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
        """Stop sampling; return the earlier facts merged with the samples under load."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        return list(self._seen.values())


def merge_load(before: GpuFacts, now: GpuFacts) -> GpuFacts:
    """Merge a sample under load: throttle bits and links accumulate, the highest temperature counts, free memory is the earlier one."""
    values = asdict(before)
    for name, join in (("throttle_bits", _either), ("temperature_c", max), ("pcie_generation", max), ("ecc_uncorrected", max)):
        old, new = values[name], getattr(now, name)
        values[name] = new if old is None else old if new is None else join(old, new)
    return GpuFacts(**values)


def _either(a: int, b: int) -> int:
    return a | b


def throttle_names(bits: int) -> list[str]:
    """Return the names of the throttle reasons that indicate a fault."""
    return [name for bit, name in THROTTLE_BITS.items() if bits & bit]


def power_capped(bits: int) -> bool:
    """Return whether the software power cap limited the clock."""
    return bool(bits & _POWER_CAP)
