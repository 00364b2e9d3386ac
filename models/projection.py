"""Matrix products with a parameter: cast, gathered over fsdp for use, and its gradient summed in the gradient dtype.

Written with its own backward pass for two reasons. The gathered weight is not kept from forward to backward (ZeRO-3 gathers it again;
otherwise every device would hold the whole model as residuals), and the weight's gradient leaves the product in `precision.gradients`,
so that the sum over devices happens in that dtype whatever the compute dtype is. With `precision.matmul: fp8` all three products read
8-bit inputs (models/fp8.py), and parameters are gathered as such: half the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from models import fp8
from models.params import LAYERS

if TYPE_CHECKING:
    from sharding.partition import Partitioner


@dataclass(frozen=True)
class Projector:
    """How parameters are used in products: where they lie and in which dtypes."""

    partitioner: Partitioner
    compute_dtype: jnp.dtype
    gradient_dtype: jnp.dtype
    eight_bit: bool = False
    """Whether products read float8."""

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


def _weight(projector: Projector, axes: tuple[str, ...], w: jax.Array) -> jax.Array:
    """Cast for use, then gathered: what moves is the narrow dtype."""
    gather, compute = projector.partitioner.gather_param, projector.compute_dtype
    if not projector.eight_bit:
        return gather(w.astype(compute), *axes)
    q, scale = fp8.quantise(w, fp8.VALUES)
    return fp8.dequantise(gather(q, *axes), scale, compute)


def _operand(projector: Projector, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """As a product reads it: as it is, or rounded to this 8-bit dtype."""
    return fp8.dequantise(*fp8.quantise(x, dtype), x.dtype) if projector.eight_bit else x


def _product(projector: Projector, equation: str, axes: tuple[str, ...], x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(equation, _operand(projector, x, fp8.VALUES), _weight(projector, axes, w))


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
    dy = _operand(projector, dy, fp8.GRADIENTS)
    dx = jnp.einsum(f"{y_dims},{w_dims}->{x_dims}", dy, _weight(projector, axes, w))
    x = _operand(projector, x, fp8.VALUES)
    dw = jnp.einsum(f"{x_dims},{y_dims}->{w_dims}", x, dy, preferred_element_type=projector.gradient_dtype)
    return dx, projector.partitioner.constrain(dw, *axes).astype(w.dtype)


_project.defvjp(_project_forward, _project_backward)
