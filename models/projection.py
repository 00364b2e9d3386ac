"""Matrix products with a parameter: cast, gathered over fsdp for use, and its gradient summed in the gradient dtype.

Written with its own backward pass for two reasons. The gathered weight is not kept from forward to backward (ZeRO-3 gathers it again;
otherwise every device would hold the whole model as residuals), and the weight's gradient leaves the product in `precision.gradients`,
so that the sum over devices happens in that dtype whatever the compute dtype is. With `precision.matmul: fp8` all three products read
8-bit inputs (models/fp8.py), and parameters are gathered as such: half the bytes; with `mxfp8` and `nvfp4` they read block-scaled ones.
Products that share their input are computed together: it is rounded once for all of them, forward and backward.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.models import block_scaled, fp8
from ridgeline.models.params import LAYERS, Recent
from ridgeline.models.product import product, weight_gradient

if TYPE_CHECKING:
    from ridgeline.sharding.partition import Partitioner


Path = tuple[Any, ...]


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

    @property
    def eight_bit_weights(self) -> bool:
        """Whether parameters are rounded to float8, with a scale per tensor, before they travel."""
        return self.eight_bit or self.blocks == block_scaled.MXFP8.name

    def __call__(self, equation: str, x: jax.Array, param: nnx.Param, recent: Recent | None = None) -> jax.Array:
        """Return einsum(equation, x, param) in the compute dtype; see `several`."""
        return self.several((equation,), x, (param,), recent)[0]

    def several(
        self, equations: Sequence[str], x: jax.Array, params: Sequence[nnx.Param], recent: Recent | None = None
    ) -> tuple[jax.Array, ...]:
        """Return einsum(equation, x, param) of each pair, in the compute dtype; x is rounded once where products read narrow numbers.

        Every index of a result and of its inputs appears exactly twice. x [B, T, ...] is in the compute dtype; parameters may be in any;
        their gradients are accumulated in the gradient dtype. `recent`: what inputs and gradients in 8 bits are scaled by (None: by
        themselves); its "gradient" is the largest magnitudes of this pass.
        """
        axes = tuple(tuple(axis for axis in param.axes if axis != LAYERS) for param in params)
        ws = tuple(Weight(param[...], param.get_metadata().get(LARGEST)) for param in params)
        return _project(self, tuple(equations), axes, x, ws, None if recent is None else recent[...])

    def add_bias(self, x: jax.Array, param: nnx.Param | None) -> jax.Array:
        """Return x plus a bias over its last dims, or x when there is none."""
        if param is None:
            return x
        axes = tuple(axis for axis in param.axes if axis != LAYERS)
        return x + self.partitioner.gather_param(param[...].astype(self.compute_dtype), *axes)


class Weight(NamedTuple):
    """A parameter as it lies, and its largest magnitude where that is known."""

    w: jax.Array
    largest: jax.Array | None


LARGEST = "largest"
"""Metadata of a parameter whose largest magnitude was found beforehand."""


def largest_of_layers(stacked: nnx.State) -> dict[Path, jax.Array]:
    """Return the largest magnitude of every stacked parameter of a product, by layer: float32 [layers].

    All layers at once, so that the step has one small sum over devices for all parameters, and no product waits for it.
    """
    found = {path: leaf for path, leaf in nnx.to_flat_state(stacked) if "embed" in (leaf.get_metadata().get("axes") or ())}
    largest = {path: jnp.max(jnp.abs(leaf[...]), range(1, leaf[...].ndim)).astype(jnp.float32) for path, leaf in found.items()}
    return jax.lax.stop_gradient(largest)


def tell_largest(module: nnx.Module, largest: Mapping[Path, jax.Array]) -> None:
    """Write into the parameters of a block, by path, what `largest_of_layers` found for its layer."""
    for path, magnitude in largest.items():
        param: Any = functools.reduce(getattr, path, module)
        param.set_metadata(LARGEST, magnitude)


LogicalAxes = tuple[str, ...]
Gathered = tuple[jax.Array, jax.Array | None]
"""A parameter on every device of fsdp, in the dtype that moved, and its scale where that is 8-bit."""


Magnitudes = jax.Array | None
"""As in models.params.Recent: of the input, then of the gradient of each product; None: operands are scaled by their own."""
INPUT_START, GRADIENT_START = 1.0, 2.0**-24
"""Scales of delayed scaling before it has seen anything. e4m3 then holds inputs from 0.02 to 448 at full precision; e5m2 holds 4e-12 to
3e-3, where the gradients of a loss that is a mean over 1e3 to 1e7 tokens lie."""


def _gather(projector: Projector, axes: LogicalAxes, weight: Weight) -> Gathered:
    """Cast for use, then gathered: what moves is the narrow dtype."""
    gather = projector.partitioner.gather_param
    if not projector.eight_bit_weights:
        return gather(weight.w.astype(projector.compute_dtype), *axes), None
    q, scale = fp8.quantise(weight.w, fp8.VALUES, weight.largest)
    return gather(q, *axes), scale


def _weight(projector: Projector, gathered: Gathered) -> Any:
    """As a product reads it."""
    w, scale = gathered
    if scale is not None and projector.blocks is not None:
        return block_scaled.Scaled(w, scale)
    return w if scale is None else fp8.dequantise(w, scale, projector.compute_dtype)


def _input(projector: Projector, x: jax.Array, recent: Magnitudes) -> jax.Array:
    """As a product reads it: as it is, or rounded to 8 bits."""
    if not projector.eight_bit:
        return x
    return fp8.rounded(projector.partitioner, x, fp8.VALUES, None if recent is None else recent[0], INPUT_START)


def _gradient(projector: Projector, dy: jax.Array, recent: Magnitudes, product: int) -> jax.Array:
    """The same of the gradient of a product, by its number."""
    if not projector.eight_bit:
        return dy
    return fp8.rounded(projector.partitioner, dy, fp8.GRADIENTS, None if recent is None else recent[1 + product], GRADIENT_START)


Equations = tuple[str, ...]
AxesOfEach = tuple[LogicalAxes, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _project(
    projector: Projector, equations: Equations, axes: AxesOfEach, x: jax.Array, ws: tuple[Weight, ...], recent: Magnitudes = None
) -> tuple[jax.Array, ...]:
    return _products(projector, equations, x, [_gather(projector, *each) for each in zip(axes, ws, strict=True)], recent)


def _products(
    projector: Projector, equations: Equations, x: jax.Array, gathered: Sequence[Gathered], recent: Magnitudes
) -> tuple[jax.Array, ...]:
    pairs = list(zip(equations, (_weight(projector, each) for each in gathered), strict=True))
    if projector.blocks is not None:
        format = block_scaled.FORMATS[projector.blocks]
        return tuple(block_scaled.product(projector.partitioner, format, equation, x, w) for equation, w in pairs)
    x = _input(projector, x, recent)
    return tuple(product(projector.partitioner, equation, x, w) for equation, w in pairs)


Residuals = tuple[jax.Array, tuple[Weight, ...], Magnitudes, list[Gathered] | None]


def _project_forward(
    projector: Projector, equations: Equations, axes: AxesOfEach, x: jax.Array, ws: tuple[Weight, ...], recent: Magnitudes = None
) -> tuple[tuple[jax.Array, ...], Residuals]:
    # Not through _project: a rematerialisation policy looks for the product itself and cannot see into a nested custom_vjp.
    gathered = [_gather(projector, *each) for each in zip(axes, ws, strict=True)]
    return _products(projector, equations, x, gathered, recent), (x, ws, recent, gathered if projector.gather_once else None)


def _project_backward(
    projector: Projector, equations: Equations, axes: AxesOfEach, residuals: Residuals, dys: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[Weight, ...], Magnitudes]:
    x, ws, recent, kept = residuals
    gathered = kept or [_gather(projector, *each) for each in zip(axes, ws, strict=True)]
    now = None
    if recent is not None:
        now = jnp.stack([fp8.largest_of_rows(projector.partitioner, operand) for operand in (x, *dys)])
    x = _input(projector, x, recent)
    dxs, dws = [], []
    for index, (equation, of, w, dy) in enumerate(zip(equations, axes, gathered, dys, strict=True)):
        dy = _gradient(projector, dy, recent, index)
        dxs.append(_input_gradient(projector, equation, dy, _weight(projector, w)))
        dws.append(Weight(_weight_gradient(projector, equation, of, x, dy).astype(ws[index].w.dtype), None))
    return functools.reduce(jnp.add, dxs), tuple(dws), now


def _input_gradient(projector: Projector, equation: str, dy: jax.Array, w: Any) -> jax.Array:
    inputs, y_dims = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    equation = f"{y_dims},{w_dims}->{x_dims}"
    if projector.blocks is not None:
        return block_scaled.product(projector.partitioner, block_scaled.GRADIENTS, equation, dy, w)
    return product(projector.partitioner, equation, dy, w)


def _weight_gradient(projector: Projector, equation: str, axes: LogicalAxes, x: jax.Array, dy: jax.Array) -> jax.Array:
    inputs, y_dims = equation.split("->")
    x_dims, w_dims = inputs.split(",")
    equation = f"{x_dims},{y_dims}->{w_dims}"
    if projector.blocks is not None:
        format = block_scaled.GRADIENTS
        return block_scaled.weight_gradient(projector.partitioner, format, equation, axes, x, dy, projector.gradient_dtype)
    dw = weight_gradient(projector.partitioner, equation, x, dy, projector.gradient_dtype)
    return projector.partitioner.constrain(dw, *axes)


_project.defvjp(_project_forward, _project_backward)
