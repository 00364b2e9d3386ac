"""Matrix products with a parameter: cast, gathered over fsdp for use, and its gradient summed in the gradient dtype.

Written with its own backward pass for two reasons. The gathered weight is not kept from forward to backward (ZeRO-3 gathers it again;
otherwise every device would hold the whole model as residuals), and the weight's gradient leaves the product in `precision.gradients`,
so that the sum over devices happens in that dtype whatever the compute dtype is. With `precision.matmul: fp8` all three products read
8-bit inputs (models/fp8.py), and parameters are gathered as such: half the bytes; with `mxfp8` and `nvfp4` they read block-scaled ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from models import block_scaled, fp8
from models.params import LAYERS, Recent
from models.product import product

if TYPE_CHECKING:
    from sharding.partition import Partitioner


@dataclass(frozen=True)
class Projector:
    """How parameters are used in products: where they lie and in which dtypes."""

    partitioner: Partitioner
    compute_dtype: jnp.dtype
    gradient_dtype: jnp.dtype
    eight_bit: bool = False
    """Whether products read float8 with a scale per tensor."""
    blocks: str | None = None
    """The block-scaled format that products read (models/block_scaled.py)."""
    gather_once: bool = False
    """Whether the backward pass finds the gathered parameter among its residuals. For blocks that are recomputed: what recomputes the
    product gathers its parameter, and the gradients use the same copy. Elsewhere the copies of all layers would be kept."""

    def __call__(self, equation: str, x: jax.Array, param: nnx.Param, recent: Recent | None = None) -> jax.Array:
        """Return einsum(equation, x, param) in the compute dtype; every index of the result and of both inputs appears exactly twice.

        x is in the compute dtype; the parameter may be in any; its gradient is accumulated in the gradient dtype. `recent`: what 8-bit
        operands are scaled by (None: by themselves); its "gradient" is the largest magnitudes of this pass.
        """
        axes = tuple(axis for axis in param.axes if axis != LAYERS)
        return _project(self, equation, axes, x, param[...], None if recent is None else recent[...])

    def add_bias(self, x: jax.Array, param: nnx.Param | None) -> jax.Array:
        """Return x plus a bias over its last dims, or x when there is none."""
        if param is None:
            return x
        axes = tuple(axis for axis in param.axes if axis != LAYERS)
        return x + self.partitioner.gather_param(param[...].astype(self.compute_dtype), *axes)


Gathered = tuple[jax.Array, jax.Array | None]
"""A parameter on every device of fsdp, in the dtype that moved, and its scale where that is 8-bit."""


Magnitudes = jax.Array | None
"""Of input, parameter and gradient lately: float32 [3]; None: they are scaled by their own."""
INPUT, PARAMETER, GRADIENT = range(3)
STARTS = (1.0, 2.0**-6, 2.0**-24)
"""Scales of delayed scaling before it has seen anything. e4m3 then holds inputs from 0.02 to 448 and parameters from 2e-4 to 7 at full
precision; e5m2 holds 4e-12 to 3e-3, where the gradients of a loss that is a mean over 1e3 to 1e7 tokens lie."""


def _gather(projector: Projector, axes: tuple[str, ...], w: jax.Array, recent: Magnitudes) -> Gathered:
    """Cast for use, then gathered: what moves is the narrow dtype."""
    gather = projector.partitioner.gather_param
    if not projector.eight_bit:
        return gather(w.astype(projector.compute_dtype), *axes), None
    q, scale = fp8.quantise(w, fp8.VALUES, None if recent is None else recent[PARAMETER], STARTS[PARAMETER])
    return gather(q, *axes), scale


def _weight(projector: Projector, gathered: Gathered) -> jax.Array:
    """As a product reads it."""
    w, scale = gathered
    return w if scale is None else fp8.dequantise(w, scale, projector.compute_dtype)


def _operand(projector: Projector, x: jax.Array, recent: Magnitudes, which: int) -> jax.Array:
    """As a product reads it: as it is, or rounded to the 8-bit dtype of an input or a gradient."""
    if not projector.eight_bit:
        return x
    dtype = fp8.GRADIENTS if which == GRADIENT else fp8.VALUES
    return fp8.dequantise(*fp8.quantise(x, dtype, None if recent is None else recent[which], STARTS[which]), x.dtype)


def _product(projector: Projector, equation: str, x: jax.Array, gathered: Gathered, recent: Magnitudes) -> jax.Array:
    if projector.blocks is not None:
        format = block_scaled.FORMATS[projector.blocks]
        return block_scaled.product(projector.partitioner, format, equation, x, _weight(projector, gathered))
    return product(projector.partitioner, equation, _operand(projector, x, recent, INPUT), _weight(projector, gathered))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _project(
    projector: Projector, equation: str, axes: tuple[str, ...], x: jax.Array, w: jax.Array, recent: Magnitudes = None
) -> jax.Array:
    return _product(projector, equation, x, _gather(projector, axes, w, recent), recent)


Residuals = tuple[jax.Array, jax.Array, Magnitudes, Gathered | None]


def _project_forward(
    projector: Projector, equation: str, axes: tuple[str, ...], x: jax.Array, w: jax.Array, recent: Magnitudes = None
) -> tuple[jax.Array, Residuals]:
    # Not through _project: a rematerialisation policy looks for the product itself and cannot see into a nested custom_vjp.
    gathered = _gather(projector, axes, w, recent)
    return _product(projector, equation, x, gathered, recent), (x, w, recent, gathered if projector.gather_once else None)


def _project_backward(
    projector: Projector, equation: str, axes: tuple[str, ...], residuals: Residuals, dy: jax.Array
) -> tuple[jax.Array, jax.Array, Magnitudes]:
    x, w, recent, gathered = residuals
    inputs, y_dims = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    if projector.blocks is not None:
        format, used = block_scaled.GRADIENTS, _weight(projector, gathered or _gather(projector, axes, w, recent))
        dx = block_scaled.product(projector.partitioner, format, f"{y_dims},{w_dims}->{x_dims}", dy, used)
        swapped = f"{x_dims},{y_dims}->{w_dims}"
        dw = block_scaled.weight_gradient(projector.partitioner, format, swapped, axes, x, dy, projector.gradient_dtype)
        return dx, dw.astype(w.dtype), None
    now = None if recent is None else jnp.stack([fp8.largest(operand) for operand in (x, w, dy)])
    dy = _operand(projector, dy, recent, GRADIENT)
    used = _weight(projector, gathered or _gather(projector, axes, w, recent))
    dx = product(projector.partitioner, f"{y_dims},{w_dims}->{x_dims}", dy, used)
    x = _operand(projector, x, recent, INPUT)
    dw = jnp.einsum(f"{x_dims},{y_dims}->{w_dims}", x, dy, preferred_element_type=projector.gradient_dtype)
    return dx, projector.partitioner.constrain(dw, *axes).astype(w.dtype), now


_project.defvjp(_project_forward, _project_backward)
