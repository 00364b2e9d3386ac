"""Host memory that offloaded activations take: of a process, of a node, and what a node may give."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import Config
from ridgeline.planner.activations import offloaded_bytes
from ridgeline.planner.local import LocalSizes

NODE_SHARE = 0.5
"""Share of a node's memory that activations may take; loaders, caches and checkpoints on their way need the rest."""
POOL_DEFAULT_BYTES = 64 * 2**30
"""XLA's pool of pinned memory in each process, unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise (jaxlib 0.10.2)."""
POOL_MARGIN = 1.25
"""The pool over what is kept in it: it grows by whole regions, and batches and metrics pass through it too."""
GIB = 2**30


def offloaded_per_device(config: Config, sizes: Mapping[str, int]) -> int:
    """Return the bytes that one device of this mesh keeps in host memory; 0 where compute.remat does not offload."""
    return offloaded_bytes(LocalSizes.of(config, sizes))


def refusal(config: Config, sizes: Mapping[str, int], devices_on_node: int, node_bytes: float) -> str:
    """Say by how much offloaded activations are too large for a node's memory; empty: they are not."""
    needed, allowed = offloaded_per_device(config, sizes) * devices_on_node, NODE_SHARE * node_bytes
    return f"offloads {needed / 1e9:.0f} GB per node, more than the {allowed / 1e9:.0f} GB it may" if needed > allowed else ""


def pool_limit_gib(config: Config, sizes: Mapping[str, int], *, local_devices: int, local_processes: int, node_bytes: int) -> int | None:
    """Return the limit that a process's pool of pinned memory needs, in GiB as XLA reads it; None: its default is enough.

    Args:
      sizes: mesh axis -> devices, all axes.
      local_devices: of this process.
      local_processes: of the run on this node.
      node_bytes: memory of the node, or of this job's share of it.

    Raises UserError where the node has less than its processes would keep there.
    """
    needed = offloaded_per_device(config, sizes) * local_devices
    on_node = needed * local_processes
    if on_node > node_bytes:
        raise UserError(
            f"compute.remat.policy=offload keeps {on_node / 1e9:.0f} GB of activations in the memory of this node, which has "
            f"{node_bytes / 1e9:.0f} GB: use more microbatches (trainer.accumulation) or another compute.remat.policy"
        )
    if needed * POOL_MARGIN <= POOL_DEFAULT_BYTES:
        return None
    return min(math.ceil(needed * POOL_MARGIN / GIB), math.ceil(node_bytes / local_processes / GIB))
