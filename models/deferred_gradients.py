"""Gradients of a layer that are summed over the devices when the backward pass of the next layer runs.

Each device computes a part of a gradient, the sum over its own tokens: an unreduced gradient. XLA can begin its reduction in the next turn
of the loop over layers (pass collective-pipeliner-forward), but takes two or three layers out of the loop for it, and keeps the unreduced
gradients of all of these. For layers with experts the program does it itself, and launch/environment.py disables the pass:

* Matrices of experts: the loop carries slots, zeros whose gradients are the unreduced gradients of a layer. The layer before it, which
  comes next in the backward pass, reduces them while it runs the backward pass of its own MLP; that of its attention waits for the sums
  (or while attention runs: models/beside_attention.py). So
  the unreduced gradients of two layers at most are there, and layers follow each other, also those of several kinds that take turns in
  the loop. Where layers without experts come between, the first of these reduces them. The first layer of the backward pass may reduce
  zeros.
* Vectors (scales of norms): the unreduced gradients of all layers are kept, and summed when the loop is over. Their reductions are small,
  but each would wait behind the large ones in its layer.

Legend: L layers, R devices that share a sum, B batch, T sequence, D embed width.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.models.params import LAYERS, Path, deferral_of, set_slots
from ridgeline.sharding.manual import sum_shards, summed_over
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import Axes, LogicalAxes

Arrays = dict[Path, jax.Array]
Heads = tuple[jax.Array, ...]
"""Queries, keys and values of attention."""
Stream = TypeVar("Stream", jax.Array, None)
"""The residual stream; None: there is none to wait."""


class Handed(NamedTuple):
    """What a layer gets from the layer before it; in the backward pass it gives it the gradients."""

    stacks: Arrays
    """The matrices of all layers; their gradients are written into one stack, layer by layer."""
    slots: Arrays
    """Zeros [R, ...], whose gradients are the unreduced gradients of this layer's matrices; none where the next layer has no experts."""


class Sum(NamedTuple):
    """How the unreduced gradients of a parameter are summed."""

    axes: LogicalAxes
    """Of the parameter of one layer."""
    over: Axes
    """Mesh axes over which they are partial sums."""
    dtype: jnp.dtype

    @classmethod
    def of(cls, partitioner: Partitioner, param: Any) -> Sum | None:
        """Return that of a stacked parameter; None: it is reduced within its layer, or there is nothing to sum."""
        deferral = deferral_of(param)
        if deferral is None:
            return None
        axes = tuple(axis for axis in param.get_metadata()["axes"] if axis != LAYERS)
        found = cls(axes, summed_over(partitioner, axes, deferral.axes), deferral.dtype)
        return found if found.devices(partitioner) > 1 else None

    def devices(self, partitioner: Partitioner) -> int:
        """Return how many devices share a sum."""
        return math.prod(partitioner.mesh.shape[axis] for axis in self.over)

    def slot(self, partitioner: Partitioner, shape: tuple[int, ...]) -> jax.Array:
        """Return zeros [R, ...] for a parameter of this shape."""
        return jnp.zeros((self.devices(partitioner), *shape), self.dtype)


Sums = tuple[tuple[Path, Sum], ...]


class Deferred(NamedTuple):
    """The parameters of the layers with experts of a run of layers, divided."""

    partitioner: Partitioner
    dense_between: bool
    """Layers without experts come before each of these."""
    parameters: nnx.State
    """All of them; those below have no gradient here."""
    vectors: Arrays
    """Slots [L, R, ...] of the vectors of all layers."""
    handed: Handed
    """For the first layer."""
    sums: Sums
    """Of the matrices."""

    @property
    def paths(self) -> set[Path]:
        """Parameters whose gradients are reduced after their layer."""
        return {path for path, _ in self.sums} | self.vectors.keys()

    def run(
        self, block: Any, inputs: tuple[Any, ...], handed: Handed, vectors: Arrays, following: jax.Array, *, with_experts: bool
    ) -> tuple[jax.Array, Handed]:
        """Run a layer: a block (models/block.py) on its inputs, with what the layer before hands over.

        vectors: its slots of vectors; empty without experts. following: index of the next layer with experts among these (int32 []).

        Returns the residual stream, and what the layer hands over.
        """
        if with_experts:
            set_slots(block, handed.slots | vectors)
            handed = Handed(handed.stacks, {})
        if handed.slots or (with_experts and self.dense_between):  # they are for a later layer; the next one has no experts
            return block(*inputs), handed
        hand_over_to = HandOver(self.partitioner, self.sums, handed, following)
        return block(*inputs, hand_over_to), hand_over_to.following


def defer(partitioner: Partitioner, stacked: nnx.State, *, dense_between: bool) -> Deferred:
    """Divide the parameters of layers with experts, stacked [L, ...]; dense_between: as in `Deferred`."""
    flat = dict(nnx.to_flat_state(stacked))
    sums = {path: found for path, param in flat.items() if (found := Sum.of(partitioner, param)) is not None}
    values = {path: flat[path][...] for path in sums}
    for path in sums:
        flat[path] = flat[path].replace(jax.lax.stop_gradient(values[path]))
    matrices = tuple((path, each) for path, each in sums.items() if "experts" in each.axes)
    vectors = {path: _slots_of_layers(partitioner, each, values[path]) for path, each in sums.items() if "experts" not in each.axes}
    handed = Handed({path: values[path] for path, _ in matrices}, {})
    if not dense_between:  # the first layer is one of these
        _, handed = hand_over(partitioner, matrices, None, handed.stacks, jnp.int32(0))
    return Deferred(partitioner, dense_between, nnx.from_flat_state(list(flat.items())), vectors, handed, matrices)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def hand_over(partitioner: Partitioner, sums: Sums, x_BTD: Stream, stacks: Arrays, layer: jax.Array) -> tuple[Stream, Handed]:
    """Return the residual stream, and what `layer` (int32 []) gets.

    In the backward pass the unreduced gradients of that layer are summed and written into the stack; the gradient of the residual stream is
    not used before.
    """
    return x_BTD, Handed(stacks, {path: each.slot(partitioner, stacks[path].shape[1:]) for path, each in sums})


def _hand_over_forward(
    partitioner: Partitioner, sums: Sums, x_BTD: Stream, stacks: Arrays, layer: jax.Array
) -> tuple[tuple[Stream, Handed], jax.Array]:
    return hand_over(partitioner, sums, x_BTD, stacks, layer), layer


def _hand_over_backward(
    partitioner: Partitioner, sums: Sums, layer: jax.Array, gradients: tuple[Stream, Handed]
) -> tuple[Stream, Arrays, None]:
    dx_BTD, (stacks, unreduced) = gradients
    dx_BTD, reduced = jax.lax.optimization_barrier((dx_BTD, _reduced(partitioner, sums, unreduced, stacks)))
    return dx_BTD, _written(stacks, reduced, layer), None


hand_over.defvjp(_hand_over_forward, _hand_over_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def end_sums(partitioner: Partitioner, sums: Sums, heads: Heads, stacks: Arrays, layer: jax.Array) -> tuple[Heads, Arrays, Arrays]:
    """Return queries, keys and values, the stacks, and for `begin_sums` zeros, whose gradients are the sums of `layer` (int32 []).

    In the backward pass these are written into the stacks; the gradients of queries, keys and values are not used before.
    """
    return heads, stacks, {path: jnp.zeros(stacks[path].shape[1:], stacks[path].dtype) for path, _ in sums}


def _end_sums_forward(
    partitioner: Partitioner, sums: Sums, heads: Heads, stacks: Arrays, layer: jax.Array
) -> tuple[tuple[Heads, Arrays, Arrays], jax.Array]:
    return end_sums(partitioner, sums, heads, stacks, layer), layer


def _end_sums_backward(
    partitioner: Partitioner, sums: Sums, layer: jax.Array, gradients: tuple[Heads, Arrays, Arrays]
) -> tuple[Heads, Arrays, None]:
    dheads, stacks, reduced = gradients
    dheads, reduced = jax.lax.optimization_barrier((dheads, reduced))
    return dheads, _written(stacks, reduced, layer), None


end_sums.defvjp(_end_sums_forward, _end_sums_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def begin_sums(partitioner: Partitioner, sums: Sums, context_BTNH: jax.Array, zeros: Arrays) -> tuple[jax.Array, Arrays]:
    """Return attention's result and slots. In the backward pass their gradients are summed when that of attention's result is there."""
    return context_BTNH, {path: each.slot(partitioner, zeros[path].shape) for path, each in sums}


def _begin_sums_forward(
    partitioner: Partitioner, sums: Sums, context_BTNH: jax.Array, zeros: Arrays
) -> tuple[tuple[jax.Array, Arrays], Arrays]:
    return begin_sums(partitioner, sums, context_BTNH, zeros), {path: jnp.zeros(0, each.dtype) for path, each in zeros.items()}


def _begin_sums_backward(
    partitioner: Partitioner, sums: Sums, like: Arrays, gradients: tuple[jax.Array, Arrays]
) -> tuple[jax.Array, Arrays]:
    dcontext_BTNH, unreduced = jax.lax.optimization_barrier(gradients)
    return dcontext_BTNH, _reduced(partitioner, sums, unreduced, like)


begin_sums.defvjp(_begin_sums_forward, _begin_sums_backward)


def _reduced(partitioner: Partitioner, sums: Sums, unreduced: Arrays, like: Arrays) -> Arrays:
    """Return the sums of unreduced gradients, in the dtypes of other arrays."""
    return {path: sum_shards(partitioner, unreduced[path], each.axes, each.over).astype(like[path].dtype) for path, each in sums}


def _written(stacks: Arrays, reduced: Arrays, layer: jax.Array) -> Arrays:
    # After the last layer comes none: its zeros are written to the place of the last one, whose gradients come after them.
    put = partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
    return {path: put(stacks[path], each) for path, each in reduced.items()}


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _slots_of_layers(partitioner: Partitioner, sum_: Sum, stack_Lx: jax.Array) -> jax.Array:
    """Return a slot of each layer for a stack of parameters [L, ...]: zeros [L, R, ...]."""
    slot = sum_.slot(partitioner, stack_Lx.shape[1:])
    return jnp.zeros((len(stack_Lx), *slot.shape), slot.dtype)


def _slots_forward(partitioner: Partitioner, sum_: Sum, stack_Lx: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _slots_of_layers(partitioner, sum_, stack_Lx), jnp.zeros(0, stack_Lx.dtype)


def _slots_backward(partitioner: Partitioner, sum_: Sum, like: jax.Array, gradient_LRx: jax.Array) -> tuple[jax.Array]:
    return (jnp.sum(gradient_LRx, 1).astype(like.dtype),)


_slots_of_layers.defvjp(_slots_forward, _slots_backward)


class HandOver:
    """The function of the residual stream at which a layer hands over to `layer` (int32 []), the next one.

    `end` and `begin` in its place let the sums run while attention does (models/beside_attention.py).
    """

    def __init__(self, partitioner: Partitioner, sums: Sums, handed: Handed, layer: jax.Array) -> None:
        self._partitioner, self._sums = partitioner, sums
        self._stacks, self._layer = handed.stacks, layer
        self._zeros: Arrays = {}
        self.following: Handed
        """For the next layer, after the call."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Return the residual stream."""
        x_BTD, self.following = hand_over(self._partitioner, self._sums, x_BTD, self._stacks, self._layer)
        return x_BTD

    def end(self, *heads: jax.Array) -> Heads:
        """Return queries, keys and values of the layer's attention, at whose gradients the sums of the next layer end."""
        heads, self._stacks, self._zeros = end_sums(self._partitioner, self._sums, heads, self._stacks, self._layer)
        return heads

    def begin(self, context_BTNH: jax.Array) -> jax.Array:
        """Return attention's result, at whose gradient they begin; after `end`."""
        context_BTNH, slots = begin_sums(self._partitioner, self._sums, context_BTNH, self._zeros)
        self.following = Handed(self._stacks, slots)
        return context_BTNH
