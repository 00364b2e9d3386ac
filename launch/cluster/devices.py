"""The GPUs of a process, chosen among those of its node before JAX is loaded.

Slurm either binds GPUs to tasks (`--gpus-per-task`: every task sees its own in CUDA_VISIBLE_DEVICES) or shows all GPUs of the node to all
its tasks (`--gres=gpu:4`). JAX's local device ids index the visible GPUs, whatever the numbers in CUDA_VISIBLE_DEVICES are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.configs.format import plural
from ridgeline.configs.schema import RuntimeConfig
from ridgeline.launch import exit_codes

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class LocalDevices:
    """The GPUs of one process."""

    ids: tuple[int, ...] | None
    """Indices among the visible GPUs; None: all devices that JAX finds."""
    how: str
    """Source of `ids`, for messages."""
    error: tuple[int, str] | None = None
    """Error that excludes this process from the run: exit code and message. The rendezvous sends it to all."""


def gpus_present(proc: Path = Path("/proc/driver/nvidia/gpus"), dev: Path = Path("/dev")) -> int | None:
    """Return the number of NVIDIA GPUs visible on this machine (or container); None without a driver."""
    try:
        return len(os.listdir(proc))
    except OSError:
        # a container may hide /proc/driver but has the device files it was given
        nodes = [path for path in dev.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
        return len(nodes) or None


def choose(
    env: Mapping[str, str], *, present: int | None, on_node: int | None, local_processes: int | None, local_process: int | None
) -> LocalDevices:
    """Return the GPUs of this process.

    Args:
      env: environment variables.
      present: GPUs the driver shows; None without a driver.
      on_node: GPUs allocated on this node; None: unknown.
      local_processes, local_process: number of the run's processes on this node, and the index of this one; None: unknown.

    Returns:
      `error` is set if the node has fewer GPUs than allocated, or if the tasks leave GPUs unused or cannot share them evenly.
    """
    shown = env.get(VISIBLE)
    if present is None:
        if on_node:
            message = (
                f"the allocation has {_gpus(on_node)} on this node, but no NVIDIA driver is visible (to use CPUs: runtime.platform=cpu)"
            )
            return _trouble(exit_codes.BAD_NODE, message)
        return LocalDevices(None, "no NVIDIA driver; JAX chooses the devices")
    tasks = local_processes or 1
    if on_node is not None and present < on_node and not (shown is not None and len(_entries(shown)) * tasks == on_node):
        return _trouble(exit_codes.BAD_NODE, f"this node shows {_gpus(present)}, the allocation has {on_node}: GPUs are missing")
    if shown is None:
        if on_node is not None and present > on_node:
            return _trouble(
                exit_codes.USAGE,
                f"{VISIBLE} is unset, so it is unknown which {on_node} of this node's {present} GPUs belong to this job: "
                "remove --gpu-bind=none or request whole nodes",
            )
        visible, shared, how = present, True, f"all {_gpus(present)} of the node"
    else:
        visible = len(_entries(shown))
        shared = visible == on_node if on_node is not None else visible == present and visible > 1
        how = f"{VISIBLE} shows {visible}"
    if not visible:
        return LocalDevices(None, f"{VISIBLE} is empty; JAX chooses the devices")
    if not shared or tasks == 1 or local_process is None:
        used = visible * tasks
        if on_node is not None and used < on_node:
            return _trouble(
                exit_codes.USAGE,
                f"the {plural(tasks, 'task')} on this node would use {used} of its {on_node} allocated GPUs: "
                f"unset {VISIBLE}, or start one task per GPU (srun --ntasks-per-node={on_node})",
            )
        return LocalDevices(tuple(range(visible)), how)
    if visible % tasks:
        return _trouble(
            exit_codes.USAGE,
            f"{tasks} tasks on this node cannot share {_gpus(visible)} evenly: start {visible} tasks per node (one per GPU) "
            "or one task per node",
        )
    each = visible // tasks
    first = local_process * each
    return LocalDevices(tuple(range(first, first + each)), f"{how}, shared by {tasks} tasks of the node")


def expected_devices(local: LocalDevices, runtime: RuntimeConfig, env: Mapping[str, str]) -> int | None:
    """Return the number of devices of this process; None if only JAX can determine it."""
    platform = _platform(runtime, env)
    if local.ids is not None and platform in ("auto", "cuda"):
        return len(local.ids)
    if platform == "cpu" or (platform == "auto" and not _accelerators(env)):
        forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", env.get("XLA_FLAGS", ""))
        return runtime.cpu_devices if runtime.cpu_devices > 1 or forced is None else int(forced.group(1))
    return None


def device_text(local: LocalDevices, runtime: RuntimeConfig, env: Mapping[str, str]) -> str:
    """Return the devices of this process for people, such as `8 CPU devices`."""
    count = expected_devices(local, runtime, env)
    if count is None:
        return "all devices that JAX finds"
    if local.ids is not None and _platform(runtime, env) in ("auto", "cuda"):
        return _gpus(count)
    return f"{count} CPU device{'s' * (count != 1)}"


def _platform(runtime: RuntimeConfig, env: Mapping[str, str]) -> str:
    return runtime.platform if runtime.platform != "auto" else (env.get("JAX_PLATFORMS", "").split(",")[0] or "auto")


def _accelerators(env: Mapping[str, str]) -> bool:
    return env.get(VISIBLE) != "" and (gpus_present() is not None or any(Path("/dev").glob("accel*")) or Path("/dev/kfd").exists())


def _trouble(exit_code: int, message: str) -> LocalDevices:
    return LocalDevices(None, message, (exit_code, message))


def _entries(shown: str) -> list[str]:
    return [entry for entry in shown.split(",") if entry.strip() and entry.strip() not in ("-1", "NoDevFiles")]


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
