"""Parameters on their way to pipeline stages, and gradients on their way back: collectives over `pipeline`, once per step.

Where the layers divide evenly, each stage stores its own, and only the parameters outside of the layers move: they are sharded over
`pipeline` as over fsdp, gathered for the step, and their gradients reduce-scattered. Otherwise (several chunks per stage, or layers that do
not divide) all parameters are sharded like that, and an all-to-all gives each stage its layers, with empty ones where they do not suffice.
Parameters of zeros make a layer that adds 0 to the residual stream.

Legend: L layers, S stages, v chunks per stage, C layers of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ridgeline.sharding.manual import on_shards
from ridgeline.sharding.partition import Partitioner
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
        """Return the sum of the gradients [S, ...] of such a parameter, one per stage, sharded over `pipeline` as the parameter."""
        spec = tuple(self.partitioner.of_state.in_stage.spec(axes))
        dim = self._split_dim(axes)

        def local(grad: jax.Array) -> jax.Array:
            if dim is None:
                return jax.lax.psum(grad[0], PIPELINE_AXIS)
            return jax.lax.psum_scatter(grad[0], PIPELINE_AXIS, scatter_dimension=dim, tiled=True)

        out = _with_pipeline(spec, dim)
        total: jax.Array = on_shards(self.partitioner, local, PartitionSpec(PIPELINE_AXIS, *spec), out)(grads)
        return total

    def given_out(self, x: jax.Array, axes: LogicalAxes) -> jax.Array:
        """Return stacked parameters [L, ...] in the order of the stages, [S*v*C, ...] with the first dim sharded over `pipeline`."""
        if self.stored:
            return x
        dim, spec = self._split_dim(axes), tuple(self.partitioner.in_stage.spec(axes))
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

    def taken_back(self, x: jax.Array, axes: LogicalAxes, *, gradient: bool = False) -> jax.Array:
        """Undo `given_out`; `gradient`: with mesh.zero_stage=2 sharded as the optimizer state."""
        if self.stored:
            return x
        partitioner = self.partitioner.of_state if gradient else self.partitioner
        dim, spec = self._split_dim(axes), tuple(partitioner.in_stage.spec(axes))

        def local(x: jax.Array) -> jax.Array:
            if dim is None:
                x = jax.lax.all_gather(x, PIPELINE_AXIS, axis=0)
            else:
                x = jax.lax.all_to_all(x[None], PIPELINE_AXIS, split_axis=dim + 1, concat_axis=0, tiled=True)
            rest = x.shape[2:]
            x = x.reshape(self.count, self.chunks, self.chunk_layers, *rest).swapaxes(0, 1)
            return x.reshape(-1, *rest)[: self.layers]

        moved: jax.Array = on_shards(self.partitioner, local, PartitionSpec(PIPELINE_AXIS, *spec[1:]), _with_pipeline(spec, dim))(x)
        return moved

    def _split_dim(self, axes: LogicalAxes) -> int | None:
        """Return the dim that is sharded over `pipeline` where a parameter is stored; None: it is replicated over it."""
        for dim, entry in enumerate(self.partitioner.spec(axes)):
            if PIPELINE_AXIS in ((entry,) if isinstance(entry, str) else entry or ()):
                return dim
        return None


def _with_pipeline(spec: Sequence[str | tuple[str, ...] | None], dim: int | None) -> PartitionSpec:
    """Return a spec with one dim sharded over `pipeline` too, which varies fastest."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    if dim is not None:
        entries[dim] += (PIPELINE_AXIS,)
    return PartitionSpec(*(entry or None for entry in entries))
