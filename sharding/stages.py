"""Parameters on their way to pipeline stages, and gradients on their way back: collectives over `pipeline`, once per step.

Where the layers divide evenly, each stage stores its own, and only the parameters outside of the layers move: they are sharded over
`pipeline` as over fsdp, gathered for the step, and their gradients reduce-scattered. Otherwise (several chunks per stage, or layers that do
not divide) all parameters are sharded like that, and an all-to-all gives each stage its layers, with empty ones where they do not suffice.
Parameters of zeros make a layer that adds 0 to the residual stream.

Gradients are summed over `data` here too, where the stages do not do it (Partitioner.stage_axes); with mesh.zero_stage=2 each device of
`data` gets its part of the sum.

Legend: L layers, S stages, v chunks per stage, C layers of a chunk, R copies over `data` (1 where the stages sum over it).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ridgeline.sharding.manual import on_shards
from ridgeline.sharding.partition import DATA_AXIS, Partitioner
from ridgeline.sharding.rules import PIPELINE_AXIS, LogicalAxes


@dataclass(frozen=True)
class Stages:
    """The layers of the stages of a mesh."""

    partitioner: Partitioner
    layers: int
    chunks: int
    chunk_layers: int

    @property
    def count(self) -> int:
        """Number of stages."""
        return int(self.partitioner.mesh.shape[PIPELINE_AXIS])

    @property
    def stored(self) -> bool:
        """Whether each stage stores its own layers."""
        return PIPELINE_AXIS in self.partitioner.rules.layers

    def gathered(self, x: jax.Array, axes: LogicalAxes) -> jax.Array:
        """Return a parameter outside of the layers, all-gathered over `pipeline`."""
        return self.partitioner.in_stage.constrain(self.partitioner.constrain(x, *axes), *axes)

    def summed(self, grads: jax.Array, axes: LogicalAxes) -> jax.Array:
        """Return the sum of the gradients [S*R, ...] of such a parameter, one per stage and copy, sharded as the optimizer state."""
        dim = self._split_dim(axes)

        def local(grad: jax.Array) -> jax.Array:
            if dim is None:
                return jax.lax.psum(grad[0], self.partitioner.stage_axes)
            return self._over_data(jax.lax.psum_scatter(grad[0], PIPELINE_AXIS, scatter_dimension=dim, tiled=True), axes)

        spec = PartitionSpec(self.partitioner.stage_axes, *self.partitioner.in_stage.spec(axes))
        total: jax.Array = on_shards(self.partitioner, local, spec, self._summed_spec(axes))(grads)
        return total

    def summed_layers(self, grads: jax.Array, axes: LogicalAxes) -> jax.Array:
        """Return the sum of the gradients [R, ...] of stacked parameters, which `given_out` ordered, sharded as the optimizer state."""
        copies = self.partitioner.stage_axes[1:]
        if self.stored and not copies:
            return grads[0]
        dim = self._split_dim(axes)

        def local(grad: jax.Array) -> jax.Array:
            if dim is None:  # vectors: all-gathered over `pipeline`
                return self._moved_back(self._over_data(grad[0], axes), dim)
            return self._over_data(self._moved_back(grad[0], dim), axes)

        spec = PartitionSpec(copies or None, PIPELINE_AXIS, *self.partitioner.in_stage.spec(axes)[1:])
        total: jax.Array = on_shards(self.partitioner, local, spec, self._summed_spec(axes))(grads)
        return total

    def given_out(self, x: jax.Array, axes: LogicalAxes) -> jax.Array:
        """Return stacked parameters [L, ...] in the order of the stages, [S*v*C, ...] with the first dim sharded over `pipeline`."""
        if self.stored:
            return x
        dim, spec = self._split_dim(axes), self.partitioner.rules.excluding((PIPELINE_AXIS,)).spec(axes)
        order = (self.chunks, self.count, self.chunk_layers)

        def local(x: jax.Array) -> jax.Array:
            rest = x.shape[1:]
            x = jnp.pad(x, [(0, self.chunks * self.count * self.chunk_layers - self.layers)] + [(0, 0)] * len(rest))
            x = x.reshape(*order, *rest).swapaxes(0, 1).reshape(self.count, -1, *rest)
            if dim is None:
                return jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(PIPELINE_AXIS), 0, keepdims=False)
            return jax.lax.all_to_all(x, PIPELINE_AXIS, split_axis=0, concat_axis=dim + 1, tiled=True)[0]

        out = PartitionSpec(PIPELINE_AXIS, *spec[1:])
        moved: jax.Array = on_shards(self.partitioner, local, self.partitioner.spec(axes), out)(x)
        return moved

    def taken_back(self, x: jax.Array, axes: LogicalAxes) -> jax.Array:
        """Undo `given_out`."""
        if self.stored:
            return x
        dim, spec = self._split_dim(axes), self.partitioner.spec(axes)
        given = PartitionSpec(PIPELINE_AXIS, *self.partitioner.rules.excluding((PIPELINE_AXIS,)).spec(axes)[1:])
        moved: jax.Array = on_shards(self.partitioner, lambda x: self._moved_back(x, dim), given, spec)(x)
        return moved

    def _moved_back(self, x: jax.Array, dim: int | None) -> jax.Array:
        """Undo `given_out` (inside `on_shards`)."""
        if self.stored:
            return x
        if dim is None:
            x = jax.lax.all_gather(x, PIPELINE_AXIS, axis=0)
        else:
            x = jax.lax.all_to_all(x[None], PIPELINE_AXIS, split_axis=dim + 1, concat_axis=0, tiled=True)
        rest = x.shape[2:]
        x = x.reshape(self.count, self.chunks, self.chunk_layers, *rest).swapaxes(0, 1)
        return x.reshape(-1, *rest)[: self.layers]

    def _summed_spec(self, axes: LogicalAxes) -> PartitionSpec:
        return (self.partitioner.of_state if DATA_AXIS in self.partitioner.stage_axes else self.partitioner).spec(axes)

    def _over_data(self, grad: jax.Array, axes: LogicalAxes) -> jax.Array:
        """Sum the copies of a gradient over `data`, to the part of a device where the optimizer state is sharded (inside `on_shards`)."""
        if DATA_AXIS not in self.partitioner.stage_axes:
            return grad
        dim = _dim_over(DATA_AXIS, self._summed_spec(axes))
        if dim is None:
            return jax.lax.psum(grad, DATA_AXIS)
        return jax.lax.psum_scatter(grad, DATA_AXIS, scatter_dimension=dim, tiled=True)

    def _split_dim(self, axes: LogicalAxes) -> int | None:
        """Return the dim that is sharded over `pipeline` where a parameter is stored; None: it is replicated over it."""
        return _dim_over(PIPELINE_AXIS, self.partitioner.spec(axes))


def _dim_over(axis: str, spec: PartitionSpec) -> int | None:
    """Return the dim that a spec shards over a mesh axis; None: no dim."""
    return next((dim for dim, entry in enumerate(spec) if axis in ((entry,) if isinstance(entry, str) else entry or ())), None)
