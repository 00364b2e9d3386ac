"""Host memory for offloaded activations and optimizer state: of a process, of a node, and its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.planner.activations import offloaded_bytes
from ridgeline.planner.local import LocalSizes
from ridgeline.planner.optimizer_state import offloaded_state_bytes

NODE_SHARE = 0.5
"""Fraction of a node's memory that offloaded arrays may use; loaders, caches and pending checkpoint writes need the rest."""
STATE_COPIES = 2
"""The offloaded optimizer state and the copy of it that an asynchronous save writes."""
POOL_DEFAULT_BYTES = 64 * 2**30
"""Limit of XLA's pool of pinned memory in each process, unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is set (jaxlib 0.10.2)."""
POOL_MARGIN = 1.25
"""Size of the pool over the activations in it: it grows by whole regions, and is also used for batches and metrics."""
GIB = 2**30


def offloaded_per_device(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the bytes that one GPU keeps in host memory: activations (compute.remat.policy=offload), and optimizer state.

    The state counts twice: a save writes from a copy, because the next step overwrites the state.
    """
    local = LocalSizes.of(config, sizes)
    return offloaded_bytes(local) + STATE_COPIES * offloaded_state_bytes(local)


def offloads(config: Config) -> bool:
    """Return whether a GPU keeps anything in host memory."""
    return config.compute.remat.offloads or config.optimizer.offload


def settings_text(config: Config) -> str:
    """Return the settings that offload, as text."""
    uses = {"compute.remat.policy=offload": config.compute.remat.offloads, "optimizer.offload=true": config.optimizer.offload}
    return " and ".join(text for text, used in uses.items() if used)


def _kept_text(config: Config) -> str:
    kept = {"activations": config.compute.remat.offloads, "optimizer state": config.optimizer.offload}
    return " and ".join(text for text, applies in kept.items() if applies)


def advice_text(config: Config) -> str:
    """Return what reduces the offloaded bytes, as text."""
    if config.optimizer.offload:
        remat = " or another compute.remat.policy" if config.compute.remat.offloads else ""
        return f"use more devices, or optimizer.offload=false{remat}"
    return "use more microbatches (trainer.accumulation) or another compute.remat.policy"


def refusal(config: Config, sizes: Mapping[str, int], devices_on_node: int, node_bytes: float) -> str:
    """Return by how much offloaded arrays exceed a node's memory, as text; empty when they do not."""
    needed, allowed = offloaded_per_device(config, sizes) * devices_on_node, NODE_SHARE * node_bytes
    return f"offloads {needed / 1e9:.0f} GB per node, more than the {allowed / 1e9:.0f} GB it may use" if needed > allowed else ""


def pool_limit_gib(config: Config, sizes: Mapping[str, int], *, local_devices: int, local_processes: int, node_bytes: int) -> int | None:
    """Return the limit to set for a process's pool of pinned memory, in GiB as XLA reads it; None: the default is enough.

    Args:
      sizes: mesh axis -> devices, all axes.
      local_devices: of this process.
      local_processes: of the run on this node.
      node_bytes: memory of the node, or of this job's share of it.

    Raises UserError when what all processes keep there exceeds the memory of the node.
    """
    needed = offloaded_per_device(config, sizes) * local_devices
    on_node = needed * local_processes
    if on_node > node_bytes:
        raise UserError(
            f"{settings_text(config)} keeps {on_node / 1e9:.0f} GB of {_kept_text(config)} in the memory of this node, which has "
            f"{node_bytes / 1e9:.0f} GB; {advice_text(config)}"
        )
    if needed * POOL_MARGIN <= POOL_DEFAULT_BYTES:
        return None
    return min(math.ceil(needed * POOL_MARGIN / GIB), math.ceil(node_bytes / local_processes / GIB))
