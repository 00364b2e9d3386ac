"""Matrices stored in 8 bits with one scale per output channel: matrix = stored * scale (`lora.base: int8`).

Symmetric, the rounding of `ridge convert to-hf --quantize` (models/huggingface/compressed.py). A scale has the dims of its matrix, the
inputs of size 1, so that any matrix is dequantized by one product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

LIMIT = 127.0
"""Largest stored value."""
INT8, SCALE = "int8", "scale"
"""Names of the two parameters of a matrix in its module, and so in a checkpoint."""
_REPLICATED = {"embed": "norm", "expert_embed": "norm"}
"""Logical axes of a matrix for which its scale has another one: fsdp does not shard scales, which are small and used in every layer."""
Index = tuple[slice, ...]


class Int8(NamedTuple):
    """The values of a matrix and its scale, float32."""

    stored: jax.Array
    scale: jax.Array

    def dequantized(self, dtype: jnp.dtype) -> jax.Array:
        """Return the matrix: the product in float32, rounded to `dtype`."""
        return (self.stored.astype(jnp.float32) * self.scale).astype(dtype)


def scale_axes(values: Int8, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the logical axes of the scale of a matrix with these axes."""
    dims = zip(axes, values.scale.shape, values.stored.shape, strict=True)
    return tuple("norm" if n != whole else _REPLICATED.get(axis, axis) for axis, n, whole in dims)


class Int8Matrix(nnx.Module):
    """A matrix of one layer, or of a stack of layers."""

    def __init__(self, values: Int8, axes: tuple[str, ...]) -> None:
        self.int8 = nnx.Param(values.stored, axes=axes)
        self.scale = nnx.Param(values.scale, axes=scale_axes(values, axes))

    @property
    def axes(self) -> tuple[str, ...]:
        """The logical axes of the matrix."""
        axes: tuple[str, ...] = self.int8.axes
        return axes

    @property
    def values(self) -> Int8:
        """The two arrays."""
        return Int8(self.int8[...], self.scale[...])


Matrix = nnx.Param | Int8Matrix
"""A matrix of a layer."""


def values_of(matrix: Matrix) -> jax.Array | Int8:
    """Return the arrays of a matrix as they are stored."""
    return matrix.values if isinstance(matrix, Int8Matrix) else matrix[...]


def whole_values(matrix: Matrix) -> jax.Array:
    """Return the values of a matrix, dequantized to float32 where it is stored in 8 bits."""
    values = values_of(matrix)
    return values.dequantized(jnp.dtype(jnp.float32)) if isinstance(values, Int8) else values


def scaled(w: Any, inputs: tuple[int, ...], limit: Any, dtype: Any = np.float32) -> tuple[Any, Any]:
    """Return w / scale, float32 and at most `limit`, and the scale of each output channel in `dtype`, to which it is rounded before.

    w: finite float32 array of NumPy or JAX. inputs: its dims over which a scale is taken; the scale has size 1 there. XLA multiplies by
    the inverse of a constant limit, which may change the last bit of a scale.
    """
    xp: Any = jnp if isinstance(w, jax.Array) else np
    largest = xp.abs(w).max(axis=inputs, keepdims=True)
    scale = xp.maximum((largest / limit).astype(dtype), ml_dtypes.finfo(dtype).smallest_normal)
    return xp.clip(w / scale.astype(np.float32), -limit, limit), scale


def quantized(w: jax.Array, inputs: tuple[int, ...], limit: Any = LIMIT) -> Int8:
    """Return a float32 matrix in 8 bits, rounded to the nearest. Arguments as of `scaled`."""
    stored, scale = scaled(w, inputs, limit)
    return Int8(jnp.rint(stored).astype(jnp.int8), scale)


def is_matrix(tree: Any) -> bool:
    """Return whether a node of a nested dict of parameters is the two of a matrix."""
    return isinstance(tree, Mapping) and tree.keys() == {INT8, SCALE}


def quantized_on_load(abstract: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[Index], np.ndarray]) -> dict[str, jax.Array]:
    """Return the two parameters of a stack of matrices, in the shapes and shardings of `abstract`, from what `read` returns.

    read: index, one slice per dim -> that block of the matrices, float32, of one layer. One layer at a time is on the devices in float32,
    and each process reads the blocks of its devices.
    """
    wanted = Int8(abstract[INT8], abstract[SCALE])  # type: ignore[arg-type]
    shape, shardings = wanted.stored.shape, Int8(*(leaf.sharding for leaf in wanted))  # type: ignore[arg-type]
    inputs = tuple(dim for dim in range(1, len(shape)) if shape[dim] != wanted.scale.shape[dim])
    of_layer = NamedSharding(shardings.stored.mesh, PartitionSpec(*shardings.stored.spec[1:]))  # type: ignore[attr-defined]
    with jax.transfer_guard("allow"):
        stack = jax.jit(lambda: Int8(*(jnp.zeros(leaf.shape, leaf.dtype) for leaf in wanted)), out_shardings=shardings)()
        for layer in range(shape[0]):
            blocks: dict[str, np.ndarray] = {}  # replicas share a block

            def block(index: Index | None, layer: int = layer, blocks: dict[str, np.ndarray] = blocks) -> np.ndarray:
                assert index is not None
                key = str(index)
                if key not in blocks:
                    blocks[key] = read((slice(layer, layer + 1), *index))[0]
                return blocks[key]

            w = jax.make_array_from_callback(shape[1:], of_layer, block)
            stack = _with_layer(stack, w, np.int32(layer), np.float32(LIMIT), tuple(dim - 1 for dim in inputs), shardings)
    return {INT8: stack.stored, SCALE: stack.scale}


@partial(jax.jit, static_argnums=(4, 5), donate_argnums=0)
def _with_layer(stack: Int8, w: jax.Array, layer: jax.Array, limit: jax.Array, inputs: tuple[int, ...], shardings: Int8) -> Int8:
    def put(stack: jax.Array, one: jax.Array, sharding: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(jax.lax.dynamic_update_index_in_dim(stack, one, layer, 0), sharding)

    return Int8(*map(put, stack, quantized(w, inputs, limit), shardings))


def dequantizing(read: Callable[[str, int | None], np.ndarray], paths: Mapping[str, Any]) -> Callable[[str, int | None], np.ndarray]:
    """Return a reader of parameters by path and layer in which the matrices in 8 bits are float32. paths: of all parameters of `read`."""

    def read_whole(path: str, layer: int | None) -> np.ndarray:
        if f"{path}.{INT8}" not in paths:
            return read(path, layer)
        stored, scale = (np.asarray(read(f"{path}.{part}", layer)) for part in (INT8, SCALE))
        return stored.astype(np.float32) * scale

    return read_whole
