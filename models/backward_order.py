"""The order of the backward pass of layers in one turn of the loop over layers, which XLA's scheduler would mix.

Where kinds of layers alternate, a turn has one layer of each kind. The scheduler would begin the recomputation of several layers at once,
and delay the weight gradients of all layers to the end of the turn, with all that these are computed from.
"""

from __future__ import annotations

from typing import TypeVar

import jax

Tree = TypeVar("Tree")


@jax.custom_vjp
def noted(parameters: Tree, copy: Tree) -> Tree:
    """Return the parameters of a layer. Their gradients are also those of `copy`, whose values are not used."""
    return parameters


noted.defvjp(lambda parameters, copy: (parameters, None), lambda _, gradients: (gradients, gradients))


@jax.custom_vjp
def before(x: jax.Array, copy: Tree) -> tuple[jax.Array, Tree]:
    """Return the input of a layer, and `copy` for `noted` in the next layer.

    The gradient of the input is not used before the next layer's weight gradients have been computed and reduced: these have the backward
    pass of this layer to overlap with, and those of two layers at most are pending.
    """
    return x, copy


def _before_backward(residuals: None, gradients: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
    dx, pending = gradients
    for _again in range(2):  # XLA removes from a barrier what has no other user, and results that are not used
        dx, _unused = jax.lax.optimization_barrier((dx, pending))
    return dx, pending


before.defvjp(lambda x, copy: ((x, copy), None), _before_backward)
