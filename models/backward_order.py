"""The order of the backward pass: after all that the loop over layers saved (`after_forward`), and of the layers in one turn of that loop;
and zeros that are not written early (`with_zeros`).

Where kinds of layers alternate, a turn has one layer of each kind. XLA's scheduler would mix them: begin the recomputation of several
layers at once, and delay the weight gradients of all layers to the end of the turn, with all that these are computed from. Matmuls of dense
layers also have their weight gradients computed first, each before the gradient of its input is used (`Matmul.gradients_first`).

A slot has arrays like the parameters of a layer, whose values are not used: its gradient is that of the parameters. The loop carries one
from turn to turn (models/parallelize.py says where it does not): outside of the loop XLA would delay the weight gradients of a turn's first
layer for several turns (Llama 4 Scout, fsdp=32 x tensor=8, `full`: 42.5 GB without, 28.9 with it; Gemma 3 4B, fsdp=16 x tensor=4, block
inputs in host memory: 26.7 and 15.9).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.models.params import Path

Tree = TypeVar("Tree")


@jax.custom_vjp
def send_gradients(parameters: Tree, slot: Tree) -> Tree:
    """Return the parameters of a layer; their gradients are also those of the slot."""
    return parameters


send_gradients.defvjp(lambda parameters, slot: (parameters, None), lambda _, gradients: (gradients, gradients))


@jax.custom_vjp
def wait_for_gradients(x: jax.Array, slot: Tree) -> tuple[jax.Array, Tree]:
    """Return the input of a layer, and the slot for `send_gradients` in the next layer.

    The gradient of the input is not used before the next layer's weight gradients have been computed and reduced: these have the backward
    pass of this layer to overlap with, and those of two layers at most are pending.
    """
    return x, slot


def _backward(residuals: None, gradients: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
    dx, pending = gradients
    # Compiled memory of one and of two barriers: 28.8 and 29.2 GB (Gemma 3 12B, full), 48.3 and 47.4 (4B, full), 22.8 and 22.8 (4B, dots).
    for _again in range(2):
        dx, _unused = jax.lax.optimization_barrier((dx, pending))
    return dx, pending


wait_for_gradients.defvjp(lambda x, slot: ((x, slot), None), _backward)


def slot_like_layer(stacked: nnx.State, without: Collection[Path]) -> dict[Path, jax.Array]:
    """Return a slot for the parameters of one layer of a stack [L, ...], those apart whose gradients are reduced later."""
    return {path: jnp.zeros(each.shape[1:], each.dtype) for path, each in nnx.to_flat_state(stacked) if path not in without}


def with_gradients_sent(parameters: nnx.State, slot: dict[Path, jax.Array]) -> nnx.State:
    """Return the parameters of a layer; the gradients of those that the slot has are also the slot's."""
    flat = dict(nnx.to_flat_state(parameters))
    sent = send_gradients({path: flat[path][...] for path in slot}, slot)
    return nnx.from_flat_state([(path, each.replace(sent[path]) if path in sent else each) for path, each in flat.items()])


def after_forward(run: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return `run`, a function of arrays, whose backward pass reads nothing that it saved on the device before all of that is there.

    A loop over layers writes what each layer saves into stacks. XLA takes the last layer out of the loop. Where it reads the stacks for
    that layer's backward pass before that layer is written into them, it copies whole stacks.
    """

    @jax.custom_vjp
    def ordered(*args: Any) -> Tree:
        return run(*args)

    def forward(*args: Any) -> tuple[Tree, Any]:
        leaves, structure = jax.tree.flatten(jax.vjp(run, *args))
        # Else the backward pass would wait for copies to host memory.
        on_device = [at for at, leaf in enumerate(leaves) if jax.typeof(leaf).memory_space == jax.memory.Space.Device]
        for at, leaf in zip(on_device, jax.lax.optimization_barrier([leaves[at] for at in on_device]), strict=True):
            leaves[at] = leaf
        found: tuple[Tree, Any] = jax.tree.unflatten(structure, leaves)
        return found

    ordered.defvjp(forward, lambda pullback, gradient: pullback(gradient))
    return ordered


def with_zeros(arrays: Any, like: Any) -> tuple[Any, Any]:
    """Return the arrays, and zeros of the given shapes and dtypes that XLA writes when the arrays are computed.

    XLA makes one operation of equal zeros: it wrote those of all layers that are not in the loop over layers before the first of them, and
    kept them until the last had run. The arrays that are returned have to be used: XLA drops what is unused of a barrier, and the zeros
    would wait for nothing.
    """
    dtypes = sorted({jnp.dtype(each.dtype) for each in jax.tree.leaves(like)}, key=str)
    arrays, zeros = jax.lax.optimization_barrier((arrays, [jnp.zeros((), dtype) for dtype in dtypes]))
    of = dict(zip(dtypes, zeros, strict=True))
    return arrays, jax.tree.map(lambda each: jnp.broadcast_to(of[jnp.dtype(each.dtype)], each.shape), like)
