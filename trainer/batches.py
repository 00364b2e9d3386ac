"""Between the loader's host rows and the devices: which rows this process owns, and putting them without a host sync."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from ridgeline.sharding.partition import Partitioner


def local_rows(batch_size: int, partitioner: Partitioner) -> np.ndarray:
    """Return the global row indices (sorted, int64) that this process's devices own in a batch of `batch_size` rows."""
    sharding = partitioner.batch_sharding()
    index_map = sharding.addressable_devices_indices_map((batch_size, 1))
    rows = [np.arange(*index[0].indices(batch_size)) for index in index_map.values() if index is not None]
    return np.unique(np.concatenate(rows))


def to_global(batch: Mapping[str, np.ndarray], partitioner: Partitioner) -> dict[str, jax.Array]:
    """Put this process's rows [B_local, T] on its devices as part of the global [B, T] arrays (asynchronous)."""
    sharding = partitioner.batch_sharding()
    if jax.process_count() == 1:
        return {name: jax.device_put(x, sharding) for name, x in batch.items()}
    with jax.transfer_guard_host_to_device("allow"):  # this copy is meant; unlike device_put's it does not count as explicit
        return {name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()}
