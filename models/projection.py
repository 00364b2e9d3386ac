"""Matrix products with a parameter: cast, gathered over fsdp for use, and its gradient summed in the gradient dtype.

Written with its own backward pass for two reasons. The gathered weight is not kept from forward to backward (ZeRO-3 gathers it again;
otherwise every device would hold the whole model as residuals), and the weight's gradient leaves the product in `precision.gradients`,
so that the sum over devices happens in that dtype whatever the compute dtype is. With `precision.matmul: fp8` all three products read
8-bit inputs (models/fp8.py), and parameters are gathered as such: half the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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
    gather_once: bool = False
    """Whether the backward pass finds the gathered parameter among its residuals. For blocks that are recomputed: what recomputes the
    product gathers its parameter, and the gradients use the same copy. Elsewhere the copies of all layers would be kept."""

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


Gathered = tuple[jax.Array, jax.Array | None]
"""A parameter on every device of fsdp, in the dtype that moved, and its scale where that is 8-bit."""


def _gather(projector: Projector, axes: tuple[str, ...], w: jax.Array) -> Gathered:
    """Cast for use, then gathered: what moves is the narrow dtype."""
    gather = projector.partitioner.gather_param
    if not projector.eight_bit:
        return gather(w.astype(projector.compute_dtype), *axes), None
    q, scale = fp8.quantise(w, fp8.VALUES)
    return gather(q, *axes), scale


def _weight(projector: Projector, gathered: Gathered) -> jax.Array:
    """As a product reads it."""
    w, scale = gathered
    return w if scale is None else fp8.dequantise(w, scale, projector.compute_dtype)


def _operand(projector: Projector, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """As a product reads it: as it is, or rounded to this 8-bit dtype."""
    return fp8.dequantise(*fp8.quantise(x, dtype), x.dtype) if projector.eight_bit else x


def _product(projector: Projector, equation: str, x: jax.Array, gathered: Gathered) -> jax.Array:
    return jnp.einsum(equation, _operand(projector, x, fp8.VALUES), _weight(projector, gathered))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _project(projector: Projector, equation: str, axes: tuple[str, ...], x: jax.Array, w: jax.Array) -> jax.Array:
    return _product(projector, equation, x, _gather(projector, axes, w))


def _project_forward(
    projector: Projector, equation: str, axes: tuple[str, ...], x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Gathered | None]]:
    # Not through _project: a rematerialisation policy looks for the product itself and cannot see into a nested custom_vjp.
    gathered = _gather(projector, axes, w)
    return _product(projector, equation, x, gathered), (x, w, gathered if projector.gather_once else None)


def _project_backward(
    projector: Projector, equation: str, axes: tuple[str, ...], residuals: tuple[jax.Array, jax.Array, Gathered | None], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w, gathered = residuals
    inputs, y_dims = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    dy = _operand(projector, dy, fp8.GRADIENTS)
    dx = jnp.einsum(f"{y_dims},{w_dims}->{x_dims}", dy, _weight(projector, gathered or _gather(projector, axes, w)))
    x = _operand(projector, x, fp8.VALUES)
    dw = jnp.einsum(f"{x_dims},{y_dims}->{w_dims}", x, dy, preferred_element_type=projector.gradient_dtype)
    return dx, projector.partitioner.constrain(dw, *axes).astype(w.dtype)


_project.defvjp(_project_forward, _project_backward)
