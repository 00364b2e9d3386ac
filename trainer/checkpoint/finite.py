"""Whether a state may be saved: every floating-point number in it is finite. One reduction on the devices; nothing is gathered."""

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


class NumericalFailure(Exception):
    """The run cannot go on: too many non-finite steps in a row, or a state that is not finite where a save is due. Neither is saved."""

    steps: Sequence[int] = ()
    """Complete checkpoints in ascending order; a restart takes the last."""


def all_finite(leaves: list[jax.Array]) -> jax.Array:
    """Return bool [leaves]: whether all elements of each are finite (jittable)."""
    # float8 has no is_finite on every backend; wider types than float32 must not be narrowed
    wide = [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in leaves]
    return jnp.stack([jnp.isfinite(x).all() for x in wide])


def nonfinite_leaves(state: Any, agreement: Agreement, check: Check) -> list[str]:
    """Return the names of the leaves with a NaN or an infinity, in the order of the state; the same in every process.

    Integers and PRNG keys are finite. Every device's own verdict counts: copies of a replicated array may differ after a fault.
    `check`: `all_finite`, jitted.
    """
    leaves = {name: leaf for name, leaf in named_leaves(state).items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    if not leaves:
        return []
    verdict = check(list(leaves.values()))
    finite = np.ones(len(leaves), bool)
    for shard in verdict.addressable_shards:
        finite[shard.index] &= jax.device_get(shard.data)
    mine = [name for name, good in zip(leaves, finite, strict=True) if not good]
    found = agreement.each(lambda: mine)  # of all processes in process 0, empty in the others
    return agreement.first(lambda: [name for name in leaves if any(name in part for part in found)])


def listed(names: Sequence[str]) -> str:
    """Name the first leaves, and count the others."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
