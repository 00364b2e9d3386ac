"""The finite check before a save: one reduction per array on the devices; no array is gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ridgeline.trainer.agreement import Agreement
from ridgeline.trainer.checkpoint.payload import named_leaves

_MAX_NAMED = 3

Check = Callable[[list[jax.Array]], jax.Array]


def all_finite(leaves: list[jax.Array]) -> jax.Array:
    """Return bool [leaves]: whether all elements of each leaf are finite (jittable)."""
    # is_finite of float8 is missing on some backends; types wider than float32 must not be narrowed
    wide = [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in leaves]
    return jnp.stack([jnp.isfinite(x).all() for x in wide])


def nonfinite_leaves(state: Any, agreement: Agreement, check: Check) -> list[str]:
    """Return the names of the leaves with a NaN or an infinity, in the order of the state; the same list in every process.

    Integers and PRNG keys count as finite. The result of every device is used: the copies of a replicated array may differ after a
    hardware fault. `check`: `all_finite`, jitted.
    """
    leaves = {name: leaf for name, leaf in named_leaves(state).items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    if not leaves:
        return []
    results = check(list(leaves.values()))
    finite = np.ones(len(leaves), bool)
    for shard in results.addressable_shards:
        finite[shard.index] &= jax.device_get(shard.data)
    mine = [name for name, ok in zip(leaves, finite, strict=True) if not ok]
    per_process = agreement.each(lambda: mine)  # in process 0; empty in the others
    return agreement.first(lambda: [name for name in leaves if any(name in part for part in per_process)])


def short_list(names: Sequence[str]) -> str:
    """Return the first names and the number of the others."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
