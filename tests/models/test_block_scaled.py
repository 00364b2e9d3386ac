"""Block-scaled matmuls: what is stored, and errors within the formats'."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ridgeline.models.matmul import fp8
from ridgeline.models.matmul.block_scaled import FORMATS, MXFP8, NVFP4, TensorScaled, dequantize, matmul, quantize
from ridgeline.sharding.partition import Partitioner

pytestmark = pytest.mark.usefixtures("quick_compile")

STEP = {"mxfp8": 2.0**-4, "nvfp4": 0.25}
"""Half a unit in the last place, relative to a value: 3 and 1 bits of mantissa; nvfp4's scale is rounded too."""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1e-12, 3e-4, 1.0, 1e6])
def test_a_block_is_stored_within_a_step_of_its_values_and_relative_to_its_own_largest(name, size):
    format = FORMATS[name]
    x = size * jax.random.normal(jax.random.key(0), (8, 4 * format.block))
    x = x.at[:, : format.block].multiply(1e-2)  # a block of small values beside large ones
    q = quantize(x, format)
    assert q.values.shape == x.shape and q.scales.shape == (8, 4)
    back = dequantize(q)
    blocks = jnp.abs(x).reshape(8, 4, -1)
    floor = jnp.repeat(jnp.max(blocks, axis=-1), format.block, axis=-1).reshape(x.shape) / format.largest
    assert bool(jnp.all(jnp.abs(back - x) <= STEP[name] * jnp.maximum(jnp.abs(x), floor) * 1.35))


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_and_what_is_not_finite_is_not_hidden(name):
    format = FORMATS[name]
    assert not np.asarray(dequantize(quantize(jnp.zeros((4, 64)), format))).any()
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        x = jnp.ones((4, 64)).at[1, 2].set(bad)
        y = matmul(Partitioner.single(), format, "td,df->tf", x, jnp.ones((64, 8)))
        assert not np.isfinite(np.asarray(y)[1]).any()


@pytest.mark.parametrize(("format", "error"), [(MXFP8, 0.04), (NVFP4, 0.16)])
@pytest.mark.parametrize("equation", ["btd,dnh->btnh", "btnh,dnh->btd", "btd,btf->df"])
def test_matmuls_are_those_of_the_stored_values_and_near_the_exact_ones(format, error, equation):
    sizes = {"b": 2, "t": 32, "d": 64, "n": 4, "h": 16, "f": 48}
    inputs, _ = equation.split("->")
    a, b = (jax.random.normal(jax.random.key(i), [sizes[d] for d in dims]) for i, dims in enumerate(inputs.split(",")))
    y = matmul(Partitioner.single(), format, equation, a, b)
    exact = jnp.einsum(equation, a, b, precision="highest")
    assert y.shape == exact.shape
    relative = float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact))
    assert error / 3 < relative < error


@pytest.mark.parametrize("equation", ["btd,dnh->btnh", "btnh,dnh->btd"])
def test_a_parameter_that_was_rounded_once_is_read_along_either_dim(equation):
    sizes = {"b": 2, "t": 32, "d": 64, "n": 4, "h": 16}
    inputs, _ = equation.split("->")
    x, w = (jax.random.normal(jax.random.key(i), [sizes[d] for d in dims]) for i, dims in enumerate(inputs.split(",")))
    rounded = TensorScaled(*fp8.quantize(0.02 * w, fp8.VALUES))
    y = matmul(Partitioner.single(), MXFP8, equation, x, rounded)
    same = jnp.einsum(equation, dequantized(x, inputs.split(",")[0]), fp8.dequantize(*rounded, jnp.float32), precision="highest")
    np.testing.assert_allclose(np.asarray(y), np.asarray(same), rtol=1e-5, atol=1e-5)


def dequantized(x, dims):
    """x as mxfp8 stores it, its blocks along the dims that are summed."""
    rows = x.reshape(x.shape[0] * x.shape[1], -1)
    return dequantize(quantize(rows, MXFP8)).reshape(x.shape)
