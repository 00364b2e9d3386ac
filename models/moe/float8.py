"""Grouped matmuls of float8 values: the experts' products with `precision.matmul=fp8` (models/matmul/fp8.py has the formats and scales).

Rows have one scale per device, matrices one per expert over all devices; both are powers of two. Sums are in float32 and scales are
multiplied in afterwards, which is exact.

Legend: R rows of the buffer, E experts, I inputs, O outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ridgeline.models.matmul import fp8
from ridgeline.models.moe.grouped_matmul import GroupedMatmul


class Quantized(NamedTuple):
    """Float8 values and their scale, float32: a scalar; of the matrices of experts [E]."""

    values: jax.Array
    scale: jax.Array


Operand = jax.Array | Quantized


def quantize(x: jax.Array, dtype: jnp.dtype) -> Quantized:
    """Return the rows of one device with one scale."""
    return Quantized(*fp8.quantize(x, dtype))


def quantize_experts(w_DEF: jax.Array, amax_E: jax.Array | None) -> Quantized:
    """Return matrices with one scale per expert; amax_E: over all devices, None where it is not known yet."""
    return Quantized(
        *jax.vmap(lambda w, amax: fp8.quantize(w, fp8.VALUES, amax), (1, None if amax_E is None else 0), (1, 0))(w_DEF, amax_E)
    )


def matmul(kernel: GroupedMatmul, x_RI: Operand, w_IEO: Operand, load_E: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Return the rows times the matrix of their expert, as `GroupedMatmul.matmul`; of quantized operands in bfloat16."""
    if not isinstance(x_RI, Quantized):
        assert not isinstance(w_IEO, Quantized)
        return kernel.matmul(x_RI, w_IEO, load_E, transposed=transposed)
    assert isinstance(w_IEO, Quantized)
    y_RO = kernel.matmul(x_RI.values, w_IEO.values, load_E, transposed=transposed)
    rows = jnp.arange(y_RO.shape[0])
    expert_R = jnp.searchsorted(kernel.starts(load_E, y_RO.shape[0]), rows, side="right", method="compare_all") - 1
    return y_RO * (x_RI.scale * w_IEO.scale).astype(y_RO.dtype)[expert_R][:, None]


def outer(kernel: GroupedMatmul, x_RI: Operand, y_RO: Operand, load_E: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the sum over each expert's rows of x times y, as `GroupedMatmul.outer`."""
    if not isinstance(x_RI, Quantized):
        assert not isinstance(y_RO, Quantized)
        return kernel.outer(x_RI, y_RO, load_E, dtype)
    assert isinstance(y_RO, Quantized)
    return kernel.outer(x_RI.values, y_RO.values, load_E, dtype) * (x_RI.scale * y_RO.scale).astype(dtype)
