"""Sharding of a model's state on a mesh, by parameter, in bytes per device. The devices of the mesh need not be present."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ridgeline.sharding.partition import Partitioner, optimizer_state_shardings, path_name
from ridgeline.sharding.rules import LogicalAxes


@dataclass(frozen=True)
class ParameterRow:
    """One parameter (stacked over layers where the model scans)."""

    path: str
    """Dotted name, e.g. `layers.attention.query`."""
    axes: LogicalAxes
    """Logical axis of each dim."""
    spec: tuple[str | tuple[str, ...] | None, ...]
    """Mesh axes of each dim."""
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    bytes: int
    bytes_per_device: int


@dataclass(frozen=True)
class ShardingReport:
    """Rows of all parameters, and bytes per device of each kind of state (gradients: accumulated ones within a step)."""

    rows: tuple[ParameterRow, ...]
    parameters: int
    """Number of parameters."""
    parameter_bytes: int
    """Bytes of the whole model."""
    parameter_bytes_per_device: int
    gradient_bytes_per_device: int
    optimizer_bytes_per_device: int

    @property
    def total_bytes_per_device(self) -> int:
        """Bytes per device of parameters, gradients and optimizer state together."""
        return self.parameter_bytes_per_device + self.gradient_bytes_per_device + self.optimizer_bytes_per_device


def sharding_report(
    partitioner: Partitioner, params: Any, axes: Any, trained: tuple[Any, Any], opt_state: Any, gradient_dtype: str
) -> ShardingReport:
    """Report on abstract trees: parameters, their logical axes (same structure), both of the trained parameters, and the optimizer state.

    Raises UserError, with the parameter's name, for a dim that does not divide.
    """
    rows: list[ParameterRow] = []
    jax.tree_util.tree_map_with_path(lambda path, leaf, of: rows.append(_row(partitioner, path_name(path), leaf, of)), params, axes)
    of_state = partitioner.of_state
    gradients = jax.tree.map(
        lambda leaf, of: _bytes(_local_shape(partitioner, leaf.shape, of_state.spec(of, leaf.shape, "gradient")), gradient_dtype),
        *trained,
    )
    shardings = optimizer_state_shardings(of_state, opt_state, *trained)
    moments = sum(
        _bytes(_local_shape(partitioner, leaf.shape, sharding.spec), leaf.dtype)
        for leaf, sharding in zip(jax.tree.leaves(opt_state), jax.tree.leaves(shardings), strict=True)
    )
    return ShardingReport(
        rows=tuple(rows),
        parameters=sum(math.prod(row.shape) for row in rows),
        parameter_bytes=sum(row.bytes for row in rows),
        parameter_bytes_per_device=sum(row.bytes_per_device for row in rows),
        gradient_bytes_per_device=sum(jax.tree.leaves(gradients)),
        optimizer_bytes_per_device=moments,
    )


def _row(partitioner: Partitioner, path: str, leaf: Any, axes: LogicalAxes) -> ParameterRow:
    spec = partitioner.spec(axes, leaf.shape, path)
    local = _local_shape(partitioner, leaf.shape, spec)
    return ParameterRow(
        path=path,
        axes=tuple(axes),
        spec=tuple(spec),
        shape=tuple(leaf.shape),
        local_shape=local,
        dtype=str(jnp.dtype(leaf.dtype)),
        bytes=_bytes(leaf.shape, leaf.dtype),
        bytes_per_device=_bytes(local, leaf.dtype),
    )


def _local_shape(partitioner: Partitioner, shape: Sequence[int], spec: PartitionSpec) -> tuple[int, ...]:
    pieces = [math.prod(partitioner.mesh.shape[axis] for axis in ((entry,) if isinstance(entry, str) else entry or ())) for entry in spec]
    pieces += [1] * (len(shape) - len(pieces))
    return tuple(size // parts for size, parts in zip(shape, pieces, strict=True))


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize
