"""Parameters: how they are created (initialisation, stacking over layers) and how they are read for use.

Every parameter is an `nnx.Param` whose metadata `axes` names the logical axis of each dim (see sharding/rules.py).
The parameters of a block exist once, stacked over layers on a leading dim named "layers".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

if TYPE_CHECKING:
    from ridgeline.sharding.partition import Partitioner


class Recent(nnx.Variable):
    """Largest magnitudes lately of the input of products that share it and of the gradient of each; 0: not known.

    float32 [1 + products, row shards, row shards of the sequence]. No parameter: what a backward pass gives back in the place of its
    gradient are the largest magnitudes of that pass, of every row shard its own.
    """


LAYERS = "layers"
"""Logical axis of the leading dim of stacked parameters."""


@dataclass(frozen=True)
class ParamFactory:
    """Creates parameters in one dtype; with `layers` set, stacked on a leading "layers" dim.

    Layer l's values depend on the seed, the parameter's order of creation and l, not on the number of layers. Traceable: under
    `jax.jit` with `out_shardings` each device computes its own shard only.
    """

    rngs: nnx.Rngs
    dtype: jnp.dtype
    layers: int | None = None
    row_shards: tuple[int, int] | None = None
    """Of rows and of the sequence, where products scale their operands by earlier steps."""

    def stacked(self, layers: int) -> ParamFactory:
        """Return a factory whose parameters carry a leading dim of `layers`."""
        return replace(self, layers=layers)

    def normal(self, shape: tuple[int, ...], axes: tuple[str, ...], std: float) -> nnx.Param:
        """Create a parameter drawn from a normal distribution with mean 0 and standard deviation `std`."""
        return self._create(lambda key: std * jax.random.normal(key, shape, jnp.float32), axes)

    def constant(self, shape: tuple[int, ...], axes: tuple[str, ...], value: float) -> nnx.Param:
        """Create a parameter filled with `value`."""
        return self._create(lambda key: jnp.full(shape, value, jnp.float32), axes)

    def recent(self, products: int = 1) -> Recent | None:
        """Create what products with one input remember of their operands; None where they remember nothing."""
        if self.row_shards is None:
            return None
        stack = () if self.layers is None else (self.layers,)
        return Recent(jnp.zeros((*stack, 1 + products, *self.row_shards), jnp.float32))

    def _create(self, draw: Callable[[jax.Array], jax.Array], axes: tuple[str, ...]) -> nnx.Param:
        key = self.rngs.params()
        if self.layers is None:
            return nnx.Param(draw(key).astype(self.dtype), axes=axes)
        keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(self.layers))
        return nnx.Param(jax.vmap(draw)(keys).astype(self.dtype), axes=(LAYERS, *axes))


def use_param(param: nnx.Param, partitioner: Partitioner, dtype: jnp.dtype) -> jax.Array:
    """Return a parameter ready for use: cast to `dtype`, then gathered over fsdp (so the gather moves `dtype`, not the master dtype)."""
    axes = tuple(axis for axis in param.axes if axis != LAYERS)
    return partitioner.gather_param(param[...].astype(dtype), *axes)
