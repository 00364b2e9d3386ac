"""float8 matmuls: exact scales, errors within the format's, gradients too, and the same on every mesh."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import MeshConfig
from ridgeline.models.matmul import Matmul, fp8
from ridgeline.models.matmul.interface import Weight, _matmuls
from ridgeline.sharding.mesh import build_mesh
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import Rules

EPS = {fp8.VALUES: 2.0**-4, fp8.GRADIENTS: 2.0**-3}
"""Half a unit in the last place, relative: 3 and 2 bits of mantissa."""


def matmul(mesh=None, quantized=True):
    mesh = mesh or MeshConfig(fsdp=1)
    size = int(np.prod([abs(v) for v in mesh.sizes.values()]))
    partitioner = Partitioner(build_mesh(mesh, jax.devices()[:size]), Rules.from_config(mesh))
    return Matmul(partitioner, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32), float8=quantized)


def several(of, x, ws, amax=None):
    """Matmuls of x [B, T, D] with matrices of a hidden layer [D, F]."""
    return _matmuls(of, ("btd,df->btf",) * len(ws), (("embed", "mlp"),) * len(ws), x, tuple(Weight(w, None) for w in ws), amax)


@pytest.mark.parametrize("dtype", [fp8.VALUES, fp8.GRADIENTS])
@pytest.mark.parametrize("delayed", [False, True])
def test_quantized_values_are_those_of_a_division(dtype, delayed):
    rng = np.random.default_rng()
    for exponent in (-120, -60, -1, 0, 7, 60, 120):
        x = np.float32(2.0**exponent) * rng.standard_normal((64, 64)).astype(np.float32)
        amax = jnp.float32(np.abs(x).max() * rng.uniform(0.5, 2)) if delayed else None
        q, scale = jax.jit(fp8.quantize, static_argnums=1)(x, dtype, amax)
        top = float(jnp.finfo(dtype).max)
        expected = jnp.asarray(np.clip(x / np.float32(scale), -top, top)).astype(dtype)
        assert np.array_equal(np.asarray(q, np.float32), np.asarray(expected, np.float32)), exponent


@pytest.mark.parametrize("dtype", [fp8.VALUES, fp8.GRADIENTS])
@pytest.mark.parametrize("size", [1e-20, 3e-4, 1.0, 448.0, 449.0, 57344.0, 1e25])
def test_quantizing_keeps_values_within_half_a_step_and_the_largest_in_range(dtype, size):
    x = size * jax.random.uniform(jax.random.key(0), (64, 64), minval=-1.0)
    q, scale = fp8.quantize(x, dtype)
    assert np.frexp(float(scale))[0] == 0.5, "a power of two"
    top = float(jnp.max(jnp.abs(q.astype(jnp.float32))))
    largest = float(jnp.finfo(dtype).max)
    assert largest / 2 <= top * (1 + EPS[dtype]) and top <= largest
    back, least = q.astype(jnp.float32) * scale, float(jnp.finfo(dtype).tiny) * float(scale)
    assert bool(jnp.all(jnp.abs(back - x) <= EPS[dtype] * jnp.maximum(jnp.abs(x), least)))


def test_zeros_stay_zero_and_values_that_are_not_finite_are_not_hidden():
    q, scale = fp8.quantize(jnp.zeros((4, 4)), fp8.VALUES)
    assert float(scale) == 1.0 and not np.asarray(q, np.float32).any()
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        back = fp8.dequantize(*fp8.quantize(jnp.ones((4, 4)).at[1, 2].set(bad), fp8.VALUES), jnp.float32)
        assert not bool(jnp.all(jnp.isfinite(back)))


@pytest.mark.parametrize("dtype", [fp8.VALUES, fp8.GRADIENTS])
def test_a_scale_from_earlier_steps_saturates_larger_values_and_never_hides_values_that_are_not_finite(dtype):
    top = float(jnp.finfo(dtype).max)
    x = jnp.array([0.5, -1.0, 300.0, -jnp.inf, jnp.nan, 0.0])
    q, scale = fp8.quantize(x, dtype, jnp.float32(1.0))
    assert top / 2 < 1.0 / float(scale) <= top, "the earlier amax lands in the upper half"
    back = np.asarray(fp8.dequantize(q, scale, jnp.float32))
    np.testing.assert_array_equal(back[[0, 1, 2, 5]], [0.5, -1.0, top * float(scale), 0.0])
    assert not np.isfinite(back[[3, 4]]).any()


def test_before_the_first_step_the_scale_is_the_one_given():
    q, scale = fp8.quantize(jnp.array([1e-6, -3e-6]), fp8.GRADIENTS, jnp.float32(0.0), 2.0**-24)
    assert float(scale) == 2.0**-24
    np.testing.assert_allclose(np.asarray(fp8.dequantize(q, scale, jnp.float32)), [1e-6, -3e-6], rtol=2.0**-3)


def test_matmuls_of_one_input_return_the_amax_of_their_operands_as_the_gradient_of_the_amax_given():
    key = jax.random.split(jax.random.key(2), 5)
    x = jax.random.normal(key[0], (2, 16, 64), jnp.bfloat16)
    ws = [0.05 * jax.random.normal(key[1], (64, 96)), jax.random.normal(key[2], (64, 32))]
    dys = tuple(size * jax.random.normal(k, (2, 16, n), jnp.bfloat16) for size, k, n in ((1e-4, key[3], 96), (3e-2, key[4], 32)))
    of, sizes = matmul(), jnp.stack([fp8.amax_of(operand) for operand in (x, *dys)])[:, None, None]

    def both(amax):
        y, back = jax.vjp(lambda x, ws, amax: several(of, x, ws, amax), x, ws, amax)
        return [*y, *back(dys)]

    *delayed, now = both(sizes)
    np.testing.assert_array_equal(now, sizes)
    *current, _ = both(None)
    for one, other in zip(jax.tree.leaves(delayed), jax.tree.leaves(current), strict=True):
        np.testing.assert_array_equal(
            np.asarray(one, np.float32), np.asarray(other, np.float32), "with the true amax it is current scaling"
        )
    assert float(jnp.max(jnp.abs(both(sizes / 16)[0].astype(jnp.float32)))) < 0.5 * float(jnp.max(jnp.abs(delayed[0].astype(jnp.float32))))


def test_dequantizing_is_exact_in_bfloat16():
    q, scale = fp8.quantize(jax.random.normal(jax.random.key(1), (32, 32)) * 1e-3, fp8.VALUES)
    narrow = fp8.dequantize(q, scale, jnp.bfloat16).astype(jnp.float32)
    assert np.array_equal(np.asarray(narrow), np.asarray(q.astype(jnp.float32) * scale))


def test_matmuls_and_both_gradients_are_within_what_rounding_allows():
    key = jax.random.split(jax.random.key(2), 3)
    x = jax.random.normal(key[0], (2, 48, 64), jnp.bfloat16)
    w = 0.05 * jax.random.normal(key[1], (64, 96))
    dy = 1e-4 * jax.random.normal(key[2], (2, 48, 96), jnp.bfloat16)

    def both(quantized):
        y, back = jax.vjp(lambda x, w: several(matmul(quantized=quantized), x, [w])[0], x, w)
        return [np.asarray(a, np.float32) for a in (y, *back(dy))]

    for name, narrow, wide, eps in zip(("y", "dx", "dw"), both(True), both(False), (2.0**-4, 2.0**-3, 2.0**-3), strict=True):
        error = np.linalg.norm(narrow - wide) / np.linalg.norm(wide)
        assert 0.1 * eps < error < eps, name  # independent errors average out in a sum, but there are errors


@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"tensor": 4, "fsdp": 1}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_every_mesh_gives_the_matmuls_of_one_device(mesh):
    """One element of each operand is far larger than the rest and is on one device."""
    x = jax.random.normal(jax.random.key(3), (8, 16, 64), jnp.bfloat16).at[5, 3, 7].set(300.0)
    w = jax.random.normal(jax.random.key(4), (64, 64)).at[1, 60].set(80.0)

    def run(of):
        def f(x, w):
            x = of.partitioner.constrain(x, "batch", "seq", "act_embed")
            w = of.partitioner.constrain(w, "embed", "mlp")
            [y] = several(of, x, [w])
            return jnp.sum(jnp.square(y.astype(jnp.float32)) / 1e4), y

        (_, y), grads = jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(x, w)
        return [np.asarray(a, np.float32) for a in (y, *grads)]

    for one, many in zip(run(matmul()), run(matmul(MeshConfig(**mesh))), strict=True):
        np.testing.assert_allclose(many, one, rtol=2e-2, atol=1e-2 * np.abs(one).max())


def test_a_gpu_without_8_bit_units_is_refused():
    device = SimpleNamespace(device_kind="NVIDIA A100-SXM4-80GB")
    with pytest.raises(UserError, match=r"a100-80gb.* has no 8-bit tensor cores"):
        fp8.check_mesh(SimpleNamespace(devices=np.array([device])))
    fp8.check_mesh(SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="NVIDIA H200")])))
