"""The Partitioner: what models and trainer hold to place parameters and activations on the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from configs.errors import UserError
from configs.schema import MeshConfig
from sharding.mesh import build_mesh
from sharding.rules import LogicalAxes, Rules

FSDP_AXIS = "fsdp"


@dataclass(frozen=True)
class Partitioner:
    """A mesh and the rules: translates logical axes to shardings. Hashable, so a module may hold it as a static attribute.

    `mesh` may be an AbstractMesh for planning: specs and shapes work, placing arrays does not.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules = field(default_factory=Rules)

    @classmethod
    def single(cls) -> Partitioner:
        """Return the partitioner of one device (the first local one): nothing is constrained."""
        return cls(build_mesh(MeshConfig(), jax.local_devices()[:1]))

    def spec(self, axes: LogicalAxes, shape: Sequence[int] | None = None, name: str = "array") -> PartitionSpec:
        """Translate logical axes; with `shape`, refuse dims that do not divide evenly (UserError naming `name`, dim, axis and sizes)."""
        spec = self.rules.spec(axes)
        if shape is not None:
            self._check_even(axes, spec, shape, name)
        return spec

    def sharding(self, axes: LogicalAxes, shape: Sequence[int] | None = None, name: str = "array") -> NamedSharding:
        """Return `spec` on this mesh."""
        return NamedSharding(self.mesh, self.spec(axes, shape, name))

    def replicated(self) -> NamedSharding:
        """Return the sharding of a full copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch_sharding(self) -> NamedSharding:
        """Return the sharding of a [B, T] batch array."""
        return self.sharding(("batch", "seq"))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pin an activation to its logical axes. XLA would silently replicate an uneven dim, so that is refused here."""
        sharding = self.sharding(axes, x.shape, "activation")
        return x if self.mesh.size == 1 else jax.lax.with_sharding_constraint(x, sharding)

    def gather_param(self, w: jax.Array, *axes: str | None) -> jax.Array:
        """Gather a parameter over `fsdp` for use (ZeRO-3), keeping its `tensor` cut; its gradient goes back to the sharded layout."""
        sharded = self.sharding(axes, w.shape, "parameter")
        if self.mesh.size == 1:
            return w
        gathered = NamedSharding(self.mesh, self.rules.spec(axes, without=(FSDP_AXIS,)))
        return _gather(w, sharded, gathered)

    def axis_size(self, logical: str | None) -> int:
        """Return into how many pieces a logical axis is cut on this mesh."""
        return math.prod(self.mesh.shape[axis] for axis in self.rules.mesh_axes(logical))

    def _check_even(self, axes: LogicalAxes, spec: PartitionSpec, shape: Sequence[int], name: str) -> None:
        assert len(axes) == len(shape), f"{name}: {len(axes)} logical axes {tuple(axes)} for shape {tuple(shape)}"
        for dim, (logical, size) in enumerate(zip(axes, shape, strict=True)):
            pieces = self.axis_size(logical)
            if size % pieces:
                over = " x ".join(f"{axis}={self.mesh.shape[axis]}" for axis in self.rules.mesh_axes(logical))
                raise UserError(
                    f"{name} of shape {tuple(shape)}: dim {dim} ('{logical}', size {size}) does not divide over mesh {over} = {pieces}; "
                    f"change the size or the mesh, or replicate the dim with mesh.rules.{logical}=[]"
                )


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(w: jax.Array, sharded: NamedSharding, gathered: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(w, gathered)


def _gather_forward(w: jax.Array, sharded: NamedSharding, gathered: NamedSharding) -> tuple[jax.Array, None]:
    return jax.lax.with_sharding_constraint(w, gathered), None


def _gather_backward(sharded: NamedSharding, gathered: NamedSharding, residuals: None, grad: jax.Array) -> tuple[jax.Array]:
    # Constraining the cotangent, not the sum of microbatches, lets XLA reduce-scatter each layer's gradient where it is made.
    return (jax.lax.with_sharding_constraint(grad, sharded),)


_gather.defvjp(_gather_forward, _gather_backward)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _path_name(path: Sequence[Any]) -> str:
    """Join a jax key path to `layers.attention.query`."""
    parts = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path]
    return ".".join(str(part) for part in parts if part not in ("value", "raw_value"))


def param_axes(abstract_state: Any) -> dict[str, tuple[str | None, ...]]:
    """Return path -> logical axes for every nnx Variable of the state; `axes` missing on an array of rank > 0 is a bug of the model."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_state, is_leaf=_is_variable)
    found = {}
    for path, leaf in leaves:
        shape = jnp.shape(leaf.get_raw_value() if _is_variable(leaf) else leaf)
        axes = leaf.get_metadata().get("axes", None) if _is_variable(leaf) else None
        assert axes is not None or not shape, f"{_path_name(path)} of shape {shape} carries no `axes` metadata"
        found[_path_name(path)] = tuple(axes or ())
    return found


def state_shardings(partitioner: Partitioner, abstract_state: Any) -> Any:
    """Return the state's tree with a NamedSharding for each array, from the `axes` metadata of its nnx Variables.

    Uneven dims raise a UserError naming the parameter.
    """

    def one(path: Sequence[Any], leaf: Any) -> Any:
        if not _is_variable(leaf):
            assert not jnp.shape(leaf), f"{_path_name(path)} is not an nnx Variable"
            return partitioner.replicated()
        axes = leaf.get_metadata().get("axes", None) or ()
        return leaf.replace(partitioner.sharding(axes, leaf.get_raw_value().shape, _path_name(path)))

    return jax.tree_util.tree_map_with_path(one, abstract_state, is_leaf=_is_variable)
