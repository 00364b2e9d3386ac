"""Parameters: how they are created (initialization, stacking over layers) and how they are read.

Every parameter is an `nnx.Param` whose metadata `axes` names the logical axis of each dim (sharding/rules.py).
The parameters of a block exist once, stacked over layers on a leading dim with the logical axis "layers".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.configs.tuning_schema import LoraConfig
from ridgeline.models.int8 import Int8, Int8Matrix, Matrix, quantized

if TYPE_CHECKING:
    from ridgeline.sharding.partition import Partitioner

Path = tuple[Any, ...]
"""Attributes and indices that lead to a parameter in a module."""
LAYERS = "layers"
"""Logical axis of the leading dim of stacked parameters."""


STACKS = ("blocks.", "dense_blocks.", "mtp.")
"""Beginnings of the paths of stacked parameters (models/decoder.py)."""


_DEFERRAL, _SLOT, _GATHERED = "deferral", "slot", "gathered"
"""Metadata keys of a parameter."""


class Deferral(NamedTuple):
    """How the gradient of a parameter may be reduced after its layer (models/deferred_gradients.py)."""

    axes: tuple[str, ...]
    """Logical axes of the dims of activations over which the gradient is a sum; their devices have a part each."""
    dtype: jnp.dtype
    """Of the unreduced gradient."""


class Amax(nnx.Variable):
    """Recent amax (largest absolute value) of the shared input of some matmuls, then of the gradient of each result; 0: unknown.

    float32 [1 + matmuls, row shards, row shards of the sequence]. Not a parameter: the backward pass returns in place of its gradient the
    amax of that pass, per row shard. The modules' attributes are named `*_recent`; these names are part of the checkpoint layout.
    """


@dataclass(frozen=True)
class ParamFactory:
    """Creates parameters in one dtype; with `layers` set, stacked on a leading "layers" dim.

    The values of layer l depend on the seed, on the parameter's order of creation and on l, not on the number of layers. Traceable: under
    `jax.jit` with `out_shardings` each device computes only its own shard.
    """

    rngs: nnx.Rngs
    dtype: jnp.dtype
    layers: int | None = None
    row_shards: tuple[int, int] | None = None
    """Shards of the batch and of the sequence, for delayed scaling of matmul operands; None: no delayed scaling."""
    lora: LoraConfig | None = None
    """The adapters of the layers' matrices; None: none."""
    adapter_dtype: jnp.dtype | None = None
    """Dtype of their parameters; None: as `dtype`."""
    kind: type[nnx.Param] = nnx.Param
    stream: str = "params"
    """Stream of random numbers in `rngs`."""

    def stacked(self, layers: int) -> ParamFactory:
        """Return a factory whose parameters have a leading dim of `layers`."""
        return replace(self, layers=layers)

    def normal(self, shape: tuple[int, ...], axes: tuple[str, ...], std: float) -> nnx.Param:
        """Create a parameter drawn from a normal distribution with mean 0 and standard deviation `std`."""
        return self._create(lambda key: std * jax.random.normal(key, shape, jnp.float32), axes)

    def matrix(self, shape: tuple[int, ...], axes: tuple[str, ...], std: float, inputs: tuple[int, ...] | None = None) -> Matrix:
        """Create a matrix of a layer as `normal`; in 8 bits where `lora` stores them so. inputs: its input dims, where not `input_dims`."""
        if self.lora is None or self.lora.base != "int8":
            return self.normal(shape, axes, std)
        dims = inputs or tuple(range(input_dims(axes)))

        def draw(key: jax.Array) -> Int8:
            return quantized(std * jax.random.normal(key, shape, jnp.float32), dims)

        key = getattr(self.rngs, self.stream)()
        if self.layers is None:
            return Int8Matrix(draw(key), axes)
        # One layer after the other: a stack in float32 has four times the bytes of the model.
        return Int8Matrix(jax.lax.map(draw, self._keys(key)), (LAYERS, *axes))

    def uniform(self, shape: tuple[int, ...], axes: tuple[str, ...], bound: float) -> nnx.Param:
        """Create a parameter drawn evenly between -`bound` and `bound`."""
        return self._create(lambda key: jax.random.uniform(key, shape, jnp.float32, -bound, bound), axes)

    def constant(self, shape: tuple[int, ...], axes: tuple[str, ...], value: float) -> nnx.Param:
        """Create a parameter filled with `value`."""
        return self._create(lambda key: jnp.full(shape, value, jnp.float32), axes)

    def amax(self, matmuls: int = 1) -> Amax | None:
        """Create the amax of matmuls that share one input; None without delayed scaling."""
        if self.row_shards is None:
            return None
        stack = () if self.layers is None else (self.layers,)
        return Amax(jnp.zeros((*stack, 1 + matmuls, *self.row_shards), jnp.float32))

    def _create(self, draw: Callable[[jax.Array], jax.Array], axes: tuple[str, ...]) -> nnx.Param:
        key = getattr(self.rngs, self.stream)()
        if self.layers is None:
            return self.kind(draw(key).astype(self.dtype), axes=axes)
        return self.kind(jax.vmap(draw)(self._keys(key)).astype(self.dtype), axes=(LAYERS, *axes))

    def _keys(self, key: jax.Array) -> jax.Array:
        return jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(self.layers))


def logical_axes(param: Matrix) -> tuple[str, ...]:
    """Return the logical axes of a parameter of one layer, without "layers"."""
    return tuple(axis for axis in param.axes if axis != LAYERS)


def may_defer(param: Matrix | None, *axes: str, dtype: jnp.dtype) -> None:
    """Declare that the gradient of a parameter is returned unreduced, in this dtype, where there is a slot for it.

    axes: as in `Deferral`.
    """
    if isinstance(param, nnx.Param):
        param.set_metadata(_DEFERRAL, Deferral(axes, dtype))


def deferral_of(param: Any) -> Deferral | None:
    """Return what `may_defer` declared; None: nothing."""
    found: Deferral | None = param.get_metadata().get(_DEFERRAL)
    return found


def set_slots(module: nnx.Module, slots: Mapping[Path, jax.Array]) -> None:
    """Attach slots [R, ...] to parameters of a block: zeros whose gradients are the unreduced gradients of R devices."""
    for path, slot in slots.items():
        param: Any = functools.reduce(getattr, path, module)
        param.set_metadata(_SLOT, slot)


def slot_of(param: Matrix) -> jax.Array | None:
    """Return the slot of a parameter; None: its gradient is reduced within its layer."""
    return param.get_metadata().get(_SLOT) if isinstance(param, nnx.Param) else None


def set_gathered(param: nnx.Param, gathered: jax.Array) -> None:
    """Attach what was gathered of a parameter over fsdp before it is used."""
    param.set_metadata(_GATHERED, gathered)


def gathered_of(param: Matrix) -> jax.Array | None:
    """Return that; None: it is gathered where it is used."""
    return param.get_metadata().get(_GATHERED) if isinstance(param, nnx.Param) else None


def input_dims(axes: tuple[str, ...]) -> int:
    """Return how many leading dims of a matrix are inputs: one where it reads the residual stream or a latent, else all but the last."""
    return 1 if axes[0] == "embed" else len(axes) - 1


def use_param(param: nnx.Param, partitioner: Partitioner, dtype: jnp.dtype) -> jax.Array:
    """Return a parameter cast to `dtype` and then all-gathered over fsdp, so that `dtype` is communicated and not the master dtype."""
    return partitioner.gather_param(param[...].astype(dtype), *logical_axes(param))
