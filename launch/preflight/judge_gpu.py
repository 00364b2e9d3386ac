"""Judge the NVML facts of a node's GPUs. Pure functions.

Without NVML each check is `not applicable`, with the reason, and never counted as passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.launch.preflight.checks import Check, Verdict
from ridgeline.launch.preflight.nvml import GpuFacts, GpuReport, power_capped, throttle_names

GB = 1e9
FREE_WARN, FREE_FAIL = 0.97, 0.9
"""Shares of the device memory that must be free before the job: the driver uses some hundred MB, another process more."""
POWER_WARN = 0.95
"""Share of the default power limit."""
CHECKS = ("device memory", "ecc", "throttle", "gpu links")

Judgment = tuple[Verdict, str, str]
"""Verdict, reason, fix."""
GOOD: Judgment = (Verdict.OK, "", "")


def judge_gpus(node: str, report: GpuReport) -> list[Check]:
    """Judge the GPUs of one node (`report`: those of all its processes)."""
    if report.missing is not None or not report.gpus:
        why = report.missing or "NVML shows no GPU to this job"
        return [Check(node, name, Verdict.NOT_APPLICABLE, "", "", why) for name in CHECKS]
    gpus = report.gpus
    return [
        _worst(node, "device memory", gpus, judge_free, "free", lambda gpu: _gb(gpu.memory_free_bytes)),
        _worst(node, "ecc", gpus, judge_ecc, "no uncorrected errors", _ecc_text),
        _worst(node, "throttle", gpus, judge_throttle, "none under load", _throttle_text),
        _worst(node, "gpu links", gpus, judge_links, "all up, at full width", _link_text),
    ]


def _worst(
    node: str, name: str, gpus: Sequence[GpuFacts], judge: Callable[[GpuFacts], Judgment], expected: str, text: Callable[[GpuFacts], str]
) -> Check:
    """Judge every GPU; return a check with the worst verdict and the GPUs that have it."""
    order = (Verdict.FAIL, Verdict.WARN, Verdict.NOT_APPLICABLE, Verdict.OK)
    judged = [(gpu, *judge(gpu)) for gpu in gpus]
    worst = min((verdict for _, verdict, _, _ in judged), key=order.index)
    named = [(gpu, reason, fix) for gpu, verdict, reason, fix in judged if verdict == worst]
    gpu, reason, fix = named[0]
    if worst == Verdict.OK:
        return Check(node, name, worst, text(gpu), expected)
    which = ", ".join(str(gpu.index) for gpu, _, _ in named)
    return Check(node, name, worst, text(gpu), expected, f"GPU {which}: {reason}", fix)


def judge_free(gpu: GpuFacts) -> Judgment:
    """Judge the free memory before the job starts."""
    if gpu.memory_free_bytes is None or not gpu.memory_total_bytes:
        return Verdict.NOT_APPLICABLE, "not reported", ""
    share = gpu.memory_free_bytes / gpu.memory_total_bytes
    fix = "end the process that uses it (nvidia-smi), or exclude the node"
    if share >= FREE_WARN:
        return GOOD
    return Verdict.FAIL if share < FREE_FAIL else Verdict.WARN, f"{1 - share:.0%} of the memory is already in use", fix


def judge_ecc(gpu: GpuFacts) -> Judgment:
    """Judge memory errors."""
    replace = "exclude the node and report it: the GPU needs a reset or a replacement"
    if gpu.remap_failed:
        return Verdict.FAIL, "remapping of a damaged memory row failed", replace
    if gpu.remap_pending or gpu.retired_pending:
        return Verdict.FAIL, "remapping of damaged memory needs a reset of the GPU", replace
    if gpu.ecc_uncorrected:
        return Verdict.FAIL, f"{gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded", replace
    if gpu.ecc_enabled is None:
        return Verdict.NOT_APPLICABLE, "this GPU has no ECC", ""
    if not gpu.ecc_enabled:
        return Verdict.WARN, "ECC is off: bit flips are not detected", "ask the site for nvidia-smi -e 1 and a reset"
    return GOOD


def judge_throttle(gpu: GpuFacts) -> Judgment:
    """Judge throttling while the GPU was measured."""
    if gpu.throttle_bits is None:
        return Verdict.NOT_APPLICABLE, "not reported", ""
    if names := throttle_names(gpu.throttle_bits):
        return Verdict.FAIL, f"{', '.join(names)} under load", "exclude the node and report it: cooling or power"
    limit, default = gpu.power_limit_w, gpu.power_default_w
    if limit is not None and default and limit < POWER_WARN * default:
        return (
            Verdict.WARN,
            f"power limit {limit:.0f} W of {default:.0f} W",
            "ask the site to raise it (nvidia-smi -pl)",
        )
    return GOOD


def judge_links(gpu: GpuFacts) -> Judgment:
    """Judge NVLink and PCIe."""
    report = "exclude the node and report it"
    if gpu.nvlinks and not gpu.nvlinks_active:
        return Verdict.WARN, "no NVLink is up", "expected for cards without bridges; else ask the site to start the fabric manager"
    if gpu.nvlinks and (gpu.nvlinks_active or 0) < gpu.nvlinks:
        return Verdict.FAIL, f"{gpu.nvlinks_active} of {gpu.nvlinks} NVLinks are up", f"{report} (nvidia-smi nvlink -s)"
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        return Verdict.FAIL, f"PCIe runs {gpu.pcie_width} of {gpu.pcie_width_max} lanes", f"{report} (nvidia-smi -q -d PCIE)"
    if gpu.pcie_generation and gpu.pcie_generation_max and gpu.pcie_generation < gpu.pcie_generation_max:
        return Verdict.WARN, f"PCIe generation {gpu.pcie_generation} of {gpu.pcie_generation_max} under load", f"{report} if it persists"
    return GOOD


def _gb(size: int | None) -> str:
    return "n/a" if size is None else f"{size / GB:.1f} GB free"


def _ecc_text(gpu: GpuFacts) -> str:
    state = "no ECC" if gpu.ecc_enabled is None else "on" if gpu.ecc_enabled else "off"
    return f"{state}, {gpu.ecc_uncorrected or 0} uncorrected, {gpu.ecc_corrected or 0} corrected"


def _throttle_text(gpu: GpuFacts) -> str:
    names = throttle_names(gpu.throttle_bits or 0) + (["power cap"] if power_capped(gpu.throttle_bits or 0) else [])
    heat = "" if gpu.temperature_c is None else f", {gpu.temperature_c} C"
    return (", ".join(names) or "none") + heat


def _link_text(gpu: GpuFacts) -> str:
    nvlink = f"NVLink {gpu.nvlinks_active} of {gpu.nvlinks}" if gpu.nvlinks else "no NVLink"
    return f"{nvlink}, PCIe {gpu.pcie_generation or '?'} x{gpu.pcie_width or '?'}"
