"""The Partitioner: shardings of parameters, activations and optimizer state on a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ridgeline.configs.context import context_method
from ridgeline.configs.errors import UserError
from ridgeline.configs.pipeline import data_summed_once, stored_by_stage
from ridgeline.configs.schema import Config, MeshConfig
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.rules import PIPELINE_AXIS, Axes, LogicalAxes, Rules, matrix_sides

FSDP_AXIS = "fsdp"
DATA_AXIS = "data"
GATHERED_AXES = (FSDP_AXIS, "expert")
"""Mesh axes over which a parameter is gathered where it is used; the parameters of experts only over fsdp."""


def gathered_axes(axes: LogicalAxes) -> tuple[str, ...]:
    """Return the mesh axes over which a parameter with these logical axes is gathered."""
    return (FSDP_AXIS,) if "experts" in axes else GATHERED_AXES


@dataclass(frozen=True)
class Partitioner:
    """A mesh and the sharding rules: translates logical axes to shardings. Hashable, so that modules can have it as a static attribute.

    `mesh` may be an AbstractMesh: then specs and shapes work, but arrays cannot be placed.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules = field(default_factory=Rules)
    zigzag: bool = False
    """Of rows sharded over `context`, C devices, each holds chunks i and 2C - 1 - i of 2C (ring attention), not one contiguous piece."""
    zero_stage: int = 0
    """As mesh.zero_stage."""
    data_summed_once: bool = False
    """As in configs/pipeline.py."""

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, config: Config) -> Partitioner:
        """Return the partitioner of a config on a mesh. Raises UserError for sharding rules that are not valid."""
        rules = Rules.from_config(config.mesh, stored_by_stage=stored_by_stage(config, mesh.shape))
        zigzag = context_method(config, mesh.shape) == "ring"
        return cls(mesh, rules, zigzag, config.mesh.zero_stage, data_summed_once(config, mesh.shape))

    @classmethod
    def single(cls) -> Partitioner:
        """Return the partitioner of one device, the first local one: it constrains nothing."""
        return cls(build_mesh(MeshConfig(), jax.local_devices()[:1]))

    def spec(self, axes: LogicalAxes, shape: Sequence[int] | None = None, name: str = "array") -> PartitionSpec:
        """Return the spec of logical axes. With `shape`, raises UserError with name, dim, axis and sizes for dims that do not divide."""
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

    @property
    def current_mesh(self) -> Mesh | AbstractMesh:
        """Return the mesh of what is being traced: inside a `jax.shard_map` over some axes, the mesh on which these are manual."""
        context = jax.sharding.get_abstract_mesh()
        return context if context.manual_axes else self.mesh

    @property
    def of_state(self) -> Partitioner:
        """Return the partitioner of gradients and optimizer state: from ZeRO stage 2 on also sharded over `data`.

        The shard of a device is part of its shard of the parameter, so that only the updated parameters are communicated.
        """
        return self if self.zero_stage == 0 else replace(self, rules=replace(self.rules, embed=(*self.rules.embed, DATA_AXIS)))

    @property
    def stage_axes(self) -> Axes:
        """Return the mesh axes over which the program of a pipeline stage is manual (trainer/pipeline.py).

        `pipeline`, and `data` where gradients are summed over it once per step.
        """
        return (PIPELINE_AXIS, DATA_AXIS) if self.data_summed_once else (PIPELINE_AXIS,)

    @property
    def in_stage(self) -> Partitioner:
        """Return the partitioner of a pipeline stage: without the axes over which it is manual, and without sums over `data`."""
        zero_stage = self.zero_stage if self.mesh.shape[PIPELINE_AXIS] == 1 else 0
        return replace(self, rules=self.rules.excluding(self.stage_axes), zero_stage=zero_stage)

    def batch_sharding(self, name: str = "tokens") -> NamedSharding:
        """Return the sharding of an array [B, T, ...] of a batch."""
        return self.sharding(self.batch_axes(name))

    @staticmethod
    def batch_axes(name: str) -> tuple[str, str | None]:
        """Return the logical axes of an array of a batch, [B, T, ...] or (values of a row) [B, 1].

        Every device of `context` has the segment ids of the whole row, and the values of the row.
        """
        return "batch", None if name in ("segment_ids", "reference") else "seq"

    def row_order(self, length: int) -> np.ndarray | None:
        """Return the index in its row of each token, in the order in which rows are laid out over the mesh; None: in their own order."""
        pieces = self.axis_size("seq")
        if not self.zigzag or pieces == 1:
            return None
        chunks = np.arange(length).reshape(2 * pieces, -1)
        return np.concatenate([chunks[[i, 2 * pieces - 1 - i]].reshape(-1) for i in range(pieces)])

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain the sharding of an activation. Raises UserError for a dim that does not divide, which XLA would silently replicate."""
        spec = self.spec(axes, x.shape, "activation")
        return x if self.mesh.size == 1 else jax.lax.with_sharding_constraint(x, NamedSharding(self.current_mesh, spec))

    def constrain_gradient(self, dw: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain the gradient of a parameter where it is computed: as the parameter and, from ZeRO stage 2 on, over `data` too.

        In two steps, so that it is reduce-scattered over fsdp inside of nodes first. Layers in order would else wait for gradients that are
        summed over `data`, not scattered (models/backward_order.py).
        """
        return self.of_state.constrain(self.constrain(dw, *axes), *axes)

    def gather_param(self, w: jax.Array, *axes: str | None) -> jax.Array:
        """Return a parameter gathered over `fsdp` (ZeRO stage 3) and still sharded over `tensor`; its gradient is sharded over both."""
        sharded = self.spec(axes, w.shape, "parameter")
        if self.mesh.size == 1:
            return w
        mesh = self.current_mesh
        gathered = NamedSharding(mesh, self.rules.spec(axes, without=gathered_axes(axes)))
        return _gather(w, NamedSharding(mesh, sharded), gathered)

    def axis_size(self, logical: str | None) -> int:
        """Return the number of shards of a logical axis on this mesh."""
        return math.prod(self.mesh.shape[axis] for axis in self.rules.mesh_axes(logical))

    def _check_even(self, axes: LogicalAxes, spec: PartitionSpec, shape: Sequence[int], name: str) -> None:
        assert len(axes) == len(shape), f"{name}: {len(axes)} logical axes {tuple(axes)} for shape {tuple(shape)}"
        for dim, (logical, size) in enumerate(zip(axes, shape, strict=True)):
            used = (spec[dim],) if isinstance(spec[dim], str) else spec[dim] or ()
            pieces = math.prod(self.mesh.shape[axis] for axis in used)
            if size % pieces:
                over = " x ".join(f"{axis}={self.mesh.shape[axis]}" for axis in used)
                raise UserError(
                    f"{name} of shape {tuple(shape)}: dim {dim} ('{logical}', size {size}) does not divide over mesh {over} = {pieces}; "
                    f"change the size or the mesh, or set mesh.rules.{logical}=[] to replicate the dim"
                )


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(w: jax.Array, sharded: NamedSharding, gathered: NamedSharding) -> jax.Array:
    # Constrained on both sides: otherwise XLA may gather before the preceding cast, in the wider dtype.
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(w, sharded), gathered)


def _gather_forward(w: jax.Array, sharded: NamedSharding, gathered: NamedSharding) -> tuple[jax.Array, None]:
    return _gather(w, sharded, gathered), None


def _gather_backward(sharded: NamedSharding, gathered: NamedSharding, residuals: None, grad: jax.Array) -> tuple[jax.Array]:
    # Constraining the cotangent, not the sum of microbatches, lets XLA reduce-scatter each layer's gradient where it is computed.
    return (jax.lax.with_sharding_constraint(grad, sharded),)


_gather.defvjp(_gather_forward, _gather_backward)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def path_name(path: Sequence[Any]) -> str:
    """Return a JAX key path as text, e.g. `layers.attention.query` (without the `.value` attribute of an nnx Variable)."""
    keys = [key for key in path if not (isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value")]
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys)


def param_axes(abstract_state: Any) -> dict[str, LogicalAxes]:
    """Return path -> logical axes for every nnx Variable of the state. Each must have `axes` metadata."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_state, is_leaf=_is_variable)
    return {path_name(path): _variable_axes(path, leaf) for path, leaf in leaves}


def state_shardings(partitioner: Partitioner, abstract_state: Any) -> Any:
    """Return the state's tree with a NamedSharding for each array, from the `axes` metadata of its nnx Variables.

    Raises UserError, with the parameter's name, for dims that do not divide.
    """

    def one(path: Sequence[Any], leaf: Any) -> Any:
        axes = _variable_axes(path, leaf)
        return leaf.replace(partitioner.sharding(axes, leaf.get_raw_value().shape, path_name(path)))

    return jax.tree_util.tree_map_with_path(one, abstract_state, is_leaf=_is_variable)


def _variable_axes(path: Sequence[Any], leaf: Any) -> LogicalAxes:
    assert _is_variable(leaf), f"{path_name(path)} is not an nnx Variable"
    axes = leaf.get_metadata().get("axes", None)
    assert axes is not None, f"{path_name(path)} carries no `axes` metadata"
    return tuple(axes)


def param_shardings(partitioner: Partitioner, abstract_params: Any, axes: Any) -> Any:
    """Return the NamedSharding of every array of a parameter tree; `axes` is the same tree with a tuple of logical axes per array.

    Raises UserError, with the parameter's name, for dims that do not divide.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, axes: partitioner.sharding(axes, leaf.shape, path_name(path)), abstract_params, axes
    )


def optimizer_state_shardings(partitioner: Partitioner, abstract_opt_state: Any, abstract_params: Any, axes: Any) -> Any:
    """Return the optimizer state's tree with a NamedSharding for each array.

    A moment is sharded as its parameter, and so are the scales of an 8-bit moment where no block is split; Adafactor's row and column
    statistics are sharded as the parameter without the dim they sum over; counters and placeholders are replicated. A state array
    belongs to the parameter whose path is the end of its own path.
    """
    owners: dict[tuple[Any, ...], tuple[Sequence[int], LogicalAxes]] = {}
    jax.tree_util.tree_map_with_path(lambda path, leaf, of: owners.update({tuple(path): (leaf.shape, of)}), abstract_params, axes)

    def one(path: Sequence[Any], leaf: Any) -> NamedSharding:
        found = next(((path[:i], owners[tuple(path[i:])]) for i in range(len(path)) if tuple(path[i:]) in owners), None)
        if found is None:
            assert len(leaf.shape) <= 1, f"optimizer state {path_name(path)} of shape {leaf.shape} belongs to no parameter"
            return partitioner.replicated()
        prefix, (shape, of) = found
        if path_name(prefix).endswith(".scale"):
            # of blocks along one dim (trainer/low_precision.py): sharded as that dim where no block is split
            even = [size % partitioner.axis_size(axis) == 0 for size, axis in zip(leaf.shape, of, strict=True)]
            return partitioner.sharding([axis if e else None for axis, e in zip(of, even, strict=True)], leaf.shape, path_name(path))
        return partitioner.sharding(statistic_axes(path_name(prefix), leaf.shape, shape, of), leaf.shape, path_name(path))

    return jax.tree_util.tree_map_with_path(one, abstract_opt_state)


def statistic_axes(name: str, shape: Sequence[int], param_shape: Sequence[int], axes: LogicalAxes) -> LogicalAxes:
    """Return the logical axes of an optimizer statistic of `shape` that belongs to a parameter.

    Adafactor uses the matrix view of one layer (`matrix_sides`), sums over its larger side for `v_row` and over the other for `v_col`
    (arXiv 1804.04235, section 3; optax resolves ties by position), and has one element per layer for an unused statistic.
    """
    if tuple(shape) == tuple(param_shape):
        return axes
    stacked = tuple(axes[:1]) if axes and axes[0] == "layers" else ()
    if math.prod(shape[len(stacked) :]) == 1:
        return (None,) * len(shape)
    sides = {axes[side[0]]: math.prod(param_shape[dim] for dim in side) for side in matrix_sides(axes)}
    if len(shape) == len(stacked) + len(sides):
        return (*stacked, *sides)
    by_size = sorted(sides, key=lambda axis: sides[axis])
    removed = by_size[-1] if name.endswith("v_row") else by_size[-2]
    kept = [axis for axis in sides if axis != removed]
    assert [sides[axis] for axis in kept] == list(shape[len(stacked) :]), f"{name} of shape {shape} for a parameter of shape {param_shape}"
    return (*stacked, *kept)
