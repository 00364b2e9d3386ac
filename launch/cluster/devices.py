"""Which GPUs of its node a process uses: decided before JAX is loaded, from what the launcher shows.

Slurm either binds GPUs to tasks (`--gpus-per-task`: every task sees its own in CUDA_VISIBLE_DEVICES) or shows all of the node's to all of
its tasks (`--gres=gpu:4`). The ids that JAX takes count within what is visible, whatever the numbers in CUDA_VISIBLE_DEVICES are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.launch import exit_codes

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class LocalDevices:
    """The GPUs of one process."""

    ids: tuple[int, ...] | None
    """Among the visible ones; None: all that JAX finds."""
    how: str
    trouble: tuple[int, str] | None = None
    """Why this process cannot take part: exit code and words. Told to all processes in the roll call, so that none waits for this one."""


def gpus_present(proc: Path = Path("/proc/driver/nvidia/gpus"), dev: Path = Path("/dev")) -> int | None:
    """Return the number of NVIDIA GPUs this machine (or container) shows, None without a driver."""
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

    present: GPUs the driver shows, None without one. on_node: GPUs the allocation has on this node, None where nobody says.
    local_processes, local_process: processes of the run on this node, and this one's place among them; None where nobody says.
    The answer has `trouble` when the node shows fewer GPUs than allocated, the tasks leave some unused, or cannot share them evenly.
    """
    shown = env.get(VISIBLE)
    if present is None:
        if on_node:
            words = (
                f"the allocation has {_gpus(on_node)} on this node, but no NVIDIA driver is visible (runtime.platform=cpu trains without)"
            )
            return _trouble(exit_codes.BAD_NODE, words)
        return LocalDevices(None, "no NVIDIA driver here: what JAX finds")
    tasks = local_processes or 1
    if on_node is not None and present < on_node and not (shown is not None and len(_entries(shown)) * tasks == on_node):
        return _trouble(exit_codes.BAD_NODE, f"this node shows {_gpus(present)}, the allocation has {on_node}: the node is short of GPUs")
    if shown is None:
        if on_node is not None and present > on_node:
            return _trouble(
                exit_codes.USAGE,
                f"which {on_node} of this node's {present} GPUs belong to this job is not told ({VISIBLE} is unset): "
                "drop --gpu-bind=none or ask for whole nodes",
            )
        visible, shared, how = present, True, f"all {_gpus(present)} of the node"
    else:
        visible = len(_entries(shown))
        shared = visible == on_node if on_node is not None else visible == present and visible > 1
        how = f"{VISIBLE} shows {visible}"
    if not visible:
        return LocalDevices(None, f"{VISIBLE} is empty: what JAX finds")
    if not shared or tasks == 1 or local_process is None:
        used = visible * tasks
        if on_node is not None and used < on_node:
            return _trouble(
                exit_codes.USAGE,
                f"the {tasks} task(s) of this node would use {used} of its {on_node} allocated GPUs: "
                f"unset {VISIBLE}, or start one task per GPU (srun --ntasks-per-node={on_node})",
            )
        return LocalDevices(tuple(range(visible)), how)
    if visible % tasks:
        return _trouble(
            exit_codes.USAGE,
            f"{tasks} tasks of this node cannot share {_gpus(visible)} evenly: start {visible} tasks per node (one per GPU), "
            "or one task per node that uses all",
        )
    each = visible // tasks
    first = local_process * each
    return LocalDevices(tuple(range(first, first + each)), f"{how}, shared by {tasks} tasks of the node")


def _trouble(exit_code: int, words: str) -> LocalDevices:
    return LocalDevices(None, words, (exit_code, words))


def _entries(shown: str) -> list[str]:
    return [entry for entry in shown.split(",") if entry.strip() and entry.strip() not in ("-1", "NoDevFiles")]


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
