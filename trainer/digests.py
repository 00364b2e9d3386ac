"""Digests of arrays, computed by each device of its own shards: no collective mixes them, so that a difference names a device.

The digest of a shard is the sum of its elements' bit patterns, each times an odd number that depends on its position, modulo 2^32. A change
of one element always changes it: an odd factor is invertible modulo 2^32. Two or more changed elements cancel with probability 2^-32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ridgeline.trainer.checkpoint.payload import named_leaves

DIGESTS = "digests"
"""Key of the digests among the metrics of a step."""
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09)
"""Odd 32-bit numbers, one per dim."""


def digest(x: jax.Array) -> jax.Array:
    """Return the digest of an array of at most 8 dims and of any dtype with whole bytes per element, as uint32 []."""
    if x.dtype.itemsize > 4:
        x = jax.lax.bitcast_convert_type(x, jnp.uint32)  # adds a dim of 2
    if x.dtype == jnp.bool_:
        bits = x.astype(jnp.uint32)
    else:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    assert x.ndim <= len(_FACTORS)
    places = [jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(_FACTORS[dim]) for dim in range(x.ndim)]
    weights = sum(places, jnp.zeros(x.shape, jnp.uint32)) | jnp.uint32(1)
    return jnp.sum(bits * weights, dtype=jnp.uint32)


def device_digests(mesh: Mesh, leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]) -> jax.Array:
    """Return the digests of arrays as uint32 [devices, arrays], row i on device i of `mesh.devices.flat` (jittable)."""

    def of_shards(*shards: jax.Array) -> jax.Array:
        return jnp.stack([digest(shard) for shard in shards])[None]

    run = jax.shard_map(of_shards, mesh=mesh, in_specs=tuple(specs), out_specs=PartitionSpec(mesh.axis_names), check_vma=False)
    found: jax.Array = run(*leaves)
    return found


@dataclass(frozen=True)
class StepDigests:
    """Digests of a train step: of the state before the update, of the gradient before clipping, and of the new state, in this order."""

    mesh: Mesh
    state: dict[str, Any]
    """Name -> ShapeDtypeStruct, with sharding, of the arrays of the state."""
    gradient: dict[str, Any]
    """The same of the gradient."""

    @classmethod
    def of(cls, mesh: Mesh, state: Any, gradient: Any) -> StepDigests:
        """Describe the digests of an abstract state and an abstract gradient."""
        return cls(mesh, named_leaves(state), {f"gradient.{name}": leaf for name, leaf in named_leaves(gradient).items()})

    @property
    def arrays(self) -> dict[str, Any]:
        """Name -> ShapeDtypeStruct of the columns: state before, gradient, state after."""
        return {**{f"before.{name}": leaf for name, leaf in self.state.items()}, **self.gradient, **self.state}

    @property
    def columns(self) -> tuple[slice, slice, slice]:
        """Columns of the state before, of the gradient, and of the state after."""
        n, g = len(self.state), len(self.gradient)
        return slice(0, n), slice(n, n + g), slice(n + g, 2 * n + g)

    def before_update(self, state: Any, gradient: Any, after: jax.Array) -> tuple[Any, jax.Array]:
        """Return the state and the digests of it and of the gradient, [devices, arrays].

        The state is read when `after` is known, which is at the end of the backward pass, and before the update overwrites it: the update
        must use the returned state.
        """
        state, after = jax.lax.optimization_barrier((state, after))
        found = self._digests((*named_leaves(state).values(), *named_leaves(gradient).values()), {**self.state, **self.gradient})
        read: tuple[Any, jax.Array] = jax.lax.optimization_barrier((state, found))
        return read

    def after_update(self, found: jax.Array, state: Any) -> jax.Array:
        """Return `found` of `before_update` with the digests of the new state, uint32 [devices, arrays]."""
        return jnp.concatenate([found, self._digests(tuple(named_leaves(state).values()), self.state)], 1)

    def groups(self) -> dict[str, np.ndarray]:
        """Return, of each column, int [devices]: devices with the same number have a copy of the same shard."""
        found = {}
        for name, leaf in self.arrays.items():
            places = leaf.sharding.devices_indices_map(leaf.shape)
            numbers: dict[str, int] = {}
            found[name] = np.array([numbers.setdefault(str(places[device]), len(numbers)) for device in self.mesh.devices.flat])
        return found

    def _digests(self, leaves: Sequence[jax.Array], described: dict[str, Any]) -> jax.Array:
        return device_digests(self.mesh, leaves, [leaf.sharding.spec for leaf in described.values()])
