"""Matrix products with a parameter: cast, gathered over fsdp for use, and its gradient summed in the gradient dtype.

Written with its own backward pass for two reasons. The gathered weight is not kept from forward to backward (ZeRO-3 gathers it again;
otherwise every device would hold the whole model as residuals), and the weight's gradient leaves the product in `precision.gradients`,
so that the sum over devices happens in that dtype whatever the compute dtype is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from models.params import LAYERS

if TYPE_CHECKING:
    from sharding.partition import Partitioner


@dataclass(frozen=True)
class Projector:
    """How parameters are used in products: where they lie and in which dtypes."""

    partitioner: Partitioner
    compute_dtype: jnp.dtype
    gradient_dtype: jnp.dtype

    def __call__(self, equation: str, x: jax.Array, param: nnx.Param) -> jax.Array:
        """Return einsum(equation, x, param) in the compute dtype; every index of the result and of both inputs appears exactly twice.

        x is in the compute dtype; the parameter may be in any; its gradient is accumulated in the gradient dtype.
        """
        axes = tuple(axis for axis in param.axes if axis != LAYERS)
        return _project(self, equation, axes, x, param[...])

    def add_bias(self, x: jax.Array, param: nnx.Param | None) -> jax.Array:
        """Return x plus a bias over its last dims, or x when there is none."""
        if param is None:
            return x
        axes = tuple(axis for axis in param.axes if axis != LAYERS)
        return x + self.partitioner.gather_param(param[...].astype(self.compute_dtype), *axes)


def _product(projector: Projector, equation: str, axes: tuple[str, ...], x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, projector.partitioner.gather_param(w.astype(projector.compute_dtype), *axes))


_project = jax.custom_vjp(_product, nondiff_argnums=(0, 1, 2))


def _project_forward(
    projector: Projector, equation: str, axes: tuple[str, ...], x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not through _project: a rematerialisation policy looks for the product itself and cannot see into a nested custom_vjp.
    return _product(projector, equation, axes, x, w), (x, w)


def _project_backward(
    projector: Projector, equation: str, axes: tuple[str, ...], residuals: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    inputs, y_dims = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    gathered = projector.partitioner.gather_param(w.astype(projector.compute_dtype), *axes)
    dx = jnp.einsum(f"{y_dims},{w_dims}->{x_dims}", dy, gathered)
    dw = jnp.einsum(f"{x_dims},{y_dims}->{w_dims}", x, dy, preferred_element_type=projector.gradient_dtype)
    return dx, projector.partitioner.constrain(dw, *axes).astype(w.dtype)


_project.defvjp(_project_forward, _project_backward)
