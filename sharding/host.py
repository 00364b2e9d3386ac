"""Shardings of arrays in the pinned memory of the host."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

HOST = "pinned_host"
"""JAX's name of the kind of memory."""


class _OfTopology(NamedSharding):
    """A sharding in host memory over devices that are only compiled for.

    They have no memories, so JAX (0.10 to 0.12) drops the memory kind of their shardings without an error.
    """

    @property
    def memory_kind(self) -> str:
        """The kind that was dropped."""
        return HOST

    def __hash__(self) -> int:
        return hash((self.mesh, self.spec, HOST))

    def __eq__(self, other: object) -> bool:
        return type(other) is _OfTopology and (self.mesh, self.spec) == (other.mesh, other.spec)


def host_sharding(sharding: NamedSharding) -> NamedSharding:
    """Return the same sharding in host memory."""
    found: NamedSharding = sharding.with_memory_kind(HOST)
    return found if found.memory_kind == HOST else _OfTopology(sharding.mesh, sharding.spec)


def shard_sharding(sharding: jax.sharding.Sharding, device: jax.Device) -> SingleDeviceSharding:
    """Return the sharding of the shard of one device of an array: in the memory of the device, or in that of its host."""
    return SingleDeviceSharding(device, memory_kind=HOST if sharding.memory_kind == HOST else None)
