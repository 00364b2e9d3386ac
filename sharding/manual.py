"""Collectives written with `jax.shard_map`, in two cases where XLA's partitioner inserts more communication than necessary.

These are the lookup in a table whose rows are sharded (the partitioner gathers the table), and a gradient that is one partial sum per shard
of tokens (the partitioner reduces the full array over all shards before it slices it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from ridgeline.sharding.partition import Partitioner, gathered_axes
from ridgeline.sharding.rules import TOKENS, Axes, LogicalAxes


def on_shards(partitioner: Partitioner, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return a function that runs `fn` on the local shards of each device (all mesh axes manual)."""
    mesh = partitioner.current_mesh  # inside a pipeline stage the axis `pipeline` is manual already
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def row_major(x: jax.Array) -> jax.Array:
    """Return an array of one device, in memory in the order of its dims (inside `on_shards`; outside, XLA would gather its shards)."""
    found: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return found


def active(partitioner: Partitioner, axes: Axes) -> Axes:
    """Return the axes with more than one device: XLA's CPU backend does not remove collectives over one device."""
    return tuple(axis for axis in axes if partitioner.mesh.shape[axis] > 1)


def gather_fsdp(partitioner: Partitioner, w: jax.Array, axes: LogicalAxes) -> jax.Array:
    """All-gather a local parameter shard over fsdp (inside `on_shards`)."""
    dim, over = _gathered_dim(partitioner, axes)
    return w if dim is None else jax.lax.all_gather(w, over, axis=dim, tiled=True)


def reduce_gradient(partitioner: Partitioner, grad: jax.Array, axes: LogicalAxes, partial_over: Axes) -> jax.Array:
    """Sum a partial gradient over mesh axes, sharded as its parameter (inside `on_shards`).

    `grad` has the shape that `gather_fsdp` returns. It is reduce-scattered over fsdp first, so that the other axes reduce only the shard.
    """
    dim, over = _gathered_dim(partitioner, axes)
    if dim is not None:
        if set(over) <= set(partial_over):
            grad = jax.lax.psum_scatter(grad, over, scatter_dimension=dim, tiled=True)
        else:
            assert not set(over) & set(partial_over), (over, partial_over)
            size = grad.shape[dim] // jax.lax.axis_size(over)
            grad = jax.lax.dynamic_slice_in_dim(grad, jax.lax.axis_index(over) * size, size, dim)
    rest = active(partitioner, tuple(axis for axis in partial_over if axis not in over))
    return jax.lax.psum(grad, rest) if rest else grad


def sum_token_shards(partitioner: Partitioner, grad: jax.Array, *axes: str | None) -> jax.Array:
    """Sum partial gradients [R, ...] (one per shard of tokens) to the gradient of a parameter with these logical axes."""
    if partitioner.mesh.size == 1:
        return jnp.sum(grad, axis=0)
    assert grad.shape[0] == partitioner.axis_size(TOKENS), grad.shape
    return sum_shards(partitioner, grad, axes, partitioner.rules.token_axes)


def summed_over(partitioner: Partitioner, axes: LogicalAxes, inputs: LogicalAxes) -> Axes:
    """Return the mesh axes over which the gradient of a parameter with the logical axes `axes` is a partial sum.

    inputs: logical axes of the dims of activations that it is summed over. Shards of a parameter saw what all devices of their axes have.
    """
    own = {axis for logical in axes for axis in partitioner.rules.mesh_axes(logical)} - set(gathered_axes(axes))
    return tuple(axis for logical in inputs for axis in partitioner.rules.mesh_axes(logical) if axis not in own)


def unreduced_spec(partitioner: Partitioner, axes: LogicalAxes, over: Axes) -> PartitionSpec:
    """Return the sharding of partial gradients [R, ...] of a parameter with these logical axes, one per device of `over`."""
    return PartitionSpec(over, *partitioner.rules.spec(axes, without=gathered_axes(axes)))


def sum_shards(partitioner: Partitioner, grad: jax.Array, axes: LogicalAxes, over: Axes) -> jax.Array:
    """Sum partial gradients with the sharding of `unreduced_spec` to a gradient that is sharded as its parameter."""
    run = on_shards(
        partitioner,
        lambda g: reduce_gradient(partitioner, g[0], axes, over),
        in_specs=unreduced_spec(partitioner, axes, over),
        out_specs=partitioner.spec(axes, grad.shape[1:], "gradient"),
    )
    total: jax.Array = run(grad)
    return total


def look_up(partitioner: Partitioner, table_VD: jax.Array, tokens_BT: jax.Array, rows_axis: str = "vocab") -> jax.Array:
    """Return the rows of a sharded table [V, D] (logical axes `rows_axis`, embed) for int32 ids [B, T]: [B, T, D], the residual stream.

    Each device gathers its rows over fsdp and looks up the tokens whose rows it has; the partial results are reduce-scattered over the
    sequence. It has no gradient: see `look_up_gradient`.
    """
    vocab, cut, scattered = _layout(partitioner, rows_axis)
    tokens_spec = PartitionSpec(partitioner.rules.mesh_axes("batch"), cut)

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        table = gather_fsdp(partitioner, table, (rows_axis, "embed"))
        row, mine = _local_rows(vocab, table.shape[0], tokens)
        x = jnp.where(mine[..., None], jnp.take(table, row, axis=0, mode="clip"), 0)
        whole = tuple(axis for axis in vocab if axis not in scattered)
        x = jax.lax.psum(x, whole) if whole else x
        return jax.lax.psum_scatter(x, scattered, scatter_dimension=1, tiled=True) if scattered else x

    table_spec = partitioner.spec((rows_axis, "embed"), table_VD.shape, "embedding")
    out = partitioner.spec(("batch", "residual_seq", "act_embed"), (*tokens_BT.shape, table_VD.shape[1]), "activation")
    x_BTD: jax.Array = on_shards(partitioner, local, (table_spec, tokens_spec), out)(table_VD, tokens_BT)
    return x_BTD


def look_up_gradient(
    partitioner: Partitioner,
    rows: int,
    tokens_BT: jax.Array,
    dx_BTD: jax.Array,
    dtype: jnp.dtype,
    rows_axis: str = "vocab",
    *,
    early: bool = False,
) -> jax.Array:
    """Return the gradient of a table of `rows` rows, summed in `dtype` and sharded as the table.

    It begins when dx is there; `early`: XLA may write the table's zeros, which need nothing, before the layers, and keep them.
    """
    vocab, cut, scattered = _layout(partitioner, rows_axis)
    tokens_spec = PartitionSpec(partitioner.rules.mesh_axes("batch"), cut)
    table_axes = (rows_axis, "embed")
    summed = (*partitioner.rules.mesh_axes("batch"), *cut)

    def local(tokens: jax.Array, dx: jax.Array) -> jax.Array:
        dx = jax.lax.all_gather(dx, scattered, axis=1, tiled=True) if scattered else dx
        pieces = partitioner.axis_size(rows_axis)
        row, mine = _local_rows(vocab, rows // pieces, tokens)
        row = jnp.where(mine, row, rows // pieces)  # one past the end, so that it is dropped
        zero = jnp.zeros((), dtype)
        if not early:
            dx, zero = jax.lax.optimization_barrier((dx, zero))
        grad = jnp.full((rows // pieces, dx.shape[-1]), zero).at[row].add(dx.astype(dtype), mode="drop")
        return reduce_gradient(partitioner, grad, table_axes, summed)

    dx_spec = partitioner.spec(("batch", "residual_seq", "act_embed"))
    out = partitioner.spec(table_axes, (rows, dx_BTD.shape[-1]), "embedding")
    grad_VD: jax.Array = on_shards(partitioner, local, (tokens_spec, dx_spec), out)(tokens_BT, dx_BTD)
    return grad_VD


def _layout(partitioner: Partitioner, rows_axis: str) -> tuple[Axes, Axes, Axes]:
    """Return the mesh axes that shard the rows, the sequence of the tokens before the lookup, and the sequence of the result.

    Axes that shard the residual sequence but not the rows shard the tokens before the lookup.
    """
    rules = partitioner.rules
    vocab, seq, residual = (rules.mesh_axes(logical) for logical in (rows_axis, "seq", "residual_seq"))
    scattered = tuple(axis for axis in residual if axis in vocab)
    cut = tuple(axis for axis in residual if axis not in vocab)
    assert residual == (*cut, *scattered) and set(active(partitioner, seq)) <= set(cut), (seq, residual, vocab)
    return active(partitioner, vocab), cut, active(partitioner, scattered)


def _local_rows(vocab: Axes, rows: int, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the row indices of the tokens in this device's shard, and whether they are in it; ids outside the table are clipped."""
    pieces = jax.lax.axis_size(vocab) if vocab else 1
    tokens = jnp.clip(tokens, 0, rows * pieces - 1)
    row = tokens - (jax.lax.axis_index(vocab) * rows if vocab else 0)
    return row, (row >= 0) & (row < rows)


def _gathered_dim(partitioner: Partitioner, axes: LogicalAxes) -> tuple[int | None, Axes]:
    """Return the dim of a parameter that is gathered where it is used, and its mesh axes; None and none where these have one device."""
    for dim, logical in enumerate(axes):
        over = active(partitioner, tuple(axis for axis in partitioner.rules.mesh_axes(logical) if axis in gathered_axes(axes)))
        if over:
            return dim, over
    return None, ()
