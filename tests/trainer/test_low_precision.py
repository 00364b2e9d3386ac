"""Parameters in bfloat16 rounded stochastically, moments in 8 bits: unbiased, the same on every mesh, and they train as float32 does."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ridgeline.planner.optimizer_state import block_width
from ridgeline.trainer.low_precision import (
    Blocks,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    scale_by_eight_bit_adam,
    to_bfloat16,
)


def keys(count):
    return jax.random.split(jax.random.key(1), count)


def test_stochastic_rounding_is_unbiased_and_lands_on_a_neighbor():
    x = jnp.float32([1.001, -3.3, 1e-3, 7.0e5, -1e-30, 0.0])
    draws = np.asarray(jax.vmap(lambda key: to_bfloat16(x, key))(keys(20_000)), np.float64)
    gap = np.abs(np.asarray(x, np.float64)) * 2.0**-7
    assert (np.abs(draws - np.asarray(x)) <= gap).all()
    assert (np.abs(draws.mean(axis=0) - np.asarray(x)) <= 0.02 * gap).all()  # 20,000 draws: 3 sigma of a fair coin is 0.011 gaps


def test_what_bfloat16_has_or_is_not_finite_stays():
    exact = jnp.float32([1.0, -0.5, 0.0, -0.0, 2.0**100, np.inf, -np.inf])
    assert np.array_equal(np.asarray(to_bfloat16(exact, jax.random.key(0))), np.asarray(exact.astype(jnp.bfloat16)))
    assert np.isnan(np.asarray(to_bfloat16(jnp.float32([np.nan]), jax.random.key(0)), np.float32)).all()


def test_small_updates_add_up_where_rounding_to_nearest_loses_them():
    def walk(step):
        return jax.lax.fori_loop(0, 1000, step, jnp.ones(64, jnp.bfloat16))

    nearest = walk(lambda i, p: (p.astype(jnp.float32) + 1e-4).astype(jnp.bfloat16))
    drawn = walk(lambda i, p: to_bfloat16(p.astype(jnp.float32) + 1e-4, jax.random.fold_in(jax.random.key(3), i)))
    assert float(nearest.mean()) == 1.0
    assert float(drawn.astype(jnp.float32).mean()) == pytest.approx(1.1, abs=0.01)


@partial(jax.jit, static_argnums=(0, 1, 3))
def recoded(encode, decode, x, blocks, key):
    scale = blocks.most(jnp.abs(x))
    return decode(encode(x, scale, jax.random.uniform(key, x.shape), blocks), scale, blocks)


@pytest.mark.parametrize(("shape", "axes"), [((4, 256), ("embed", "mlp")), ((4, 50), ("embed", "mlp")), ((256, 4), ("mlp", "embed"))])
def test_codes_are_unbiased_within_a_step_of_the_map(shape, axes):
    blocks = Blocks.of(shape, axes)
    magnitudes = jnp.float32([1e-6, 1, 30, 1e4])
    x = jax.random.normal(jax.random.key(2), shape) * (magnitudes if blocks.dim == 0 else magnitudes[:, None])
    for encode, decode, values in ((encode_first, decode_first, x), (encode_second, decode_second, x * x)):
        error = jax.vmap(lambda key, e=encode, d=decode, v=values: recoded(e, d, v, blocks, key))(keys(2000)) / values - 1
        assert float(jnp.max(jnp.abs(error))) <= 2 ** (1 / 8) - 1 + 1e-5
        assert float(jnp.max(jnp.abs(error.mean(axis=0)))) <= 0.005  # 2,000 draws: 5 sigma of a fair one


def test_first_moments_far_below_the_largest_keep_sign_and_mean():
    x, blocks = jnp.float32([[1.0, -1.0, 1e-3, -1e-3, 1e-6, -1e-6, 0.0, 0.5]]), Blocks.of((1, 8), ("embed", "mlp"))
    draws = jax.vmap(lambda key: recoded(encode_first, decode_first, x, blocks, key))(keys(20_000))
    assert float(jnp.max(jnp.abs(draws[:, :, :4] / x[:, :4] - 1))) < 0.1
    np.testing.assert_allclose(draws.mean(axis=0)[0, 4:7], x[0, 4:7], atol=2e-7)


def test_no_second_moment_becomes_zero_and_zero_stays():
    x, blocks = jnp.float32([[1.0, 1e-9, 1e-30, 0.0]]), Blocks.of((1, 4), ("embed", "mlp"))
    back = recoded(encode_second, decode_second, x, blocks, jax.random.key(0))
    assert (np.asarray(back)[0, :3] > 0).all()
    assert float(back[0, 3]) == 0.0
    nothing = recoded(encode_first, decode_first, jnp.zeros((2, 8)), Blocks.of((2, 8), ("embed", "mlp")), jax.random.key(0))
    assert not np.asarray(nothing).any()


@pytest.mark.parametrize("size", [14336, 11008, 28672, 29568, 18944, 5632, 4864, 13824, 27648])
def test_a_block_is_whole_on_one_of_up_to_eight_devices(size):
    width = block_width(size, divided=True)
    assert 16 <= width <= 128 and size % (8 * width) == 0


def test_blocks_follow_the_side_that_fsdp_does_not_cut():
    query = Blocks.of((2, 64, 4, 128), ("layers", "embed", "heads", "head_dim"))
    out = Blocks.of((2, 4, 128, 64), ("layers", "heads", "head_dim", "embed"))
    down = Blocks.of((2, 2048, 64), ("layers", "mlp", "embed"))
    assert [(b.dim, b.width) for b in (query, out, down)] == [(3, 128), (2, 128), (1, 128)]
    assert out.scale_shape((2, 4, 128, 64)) == (2, 4, 1, 64) and down.scale_shape((2, 2048, 64)) == (2, 16, 64)


def descend(rule, scale=1.0, **extra):
    """A noisy quadratic, 300 steps, whose gradients have these scales: Adam does not see them."""
    target = jax.random.normal(jax.random.key(5), (8, 256))

    def step(carry, number):
        params, state = carry
        noise, own = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
        grads = scale * (params - target + 0.3 * jax.random.normal(noise, params.shape))
        updates, state = rule.update(grads, state, params, **({"key": own} if extra else {}))
        return (params - 0.01 * updates, state), None

    start = jnp.zeros((8, 256))
    (params, _), _ = jax.jit(lambda: jax.lax.scan(step, (start, rule.init(start)), jnp.arange(300)))()
    return params, target


@pytest.mark.parametrize("decades", [0, 4])
def test_directions_follow_those_of_adam(decades):
    """The parameters end where Adam's do, far nearer than the way they came, where neighbors in a block differ by decades too."""
    scale = 10 ** jax.random.uniform(jax.random.key(9), (256,), minval=-decades, maxval=0)
    plain, target = descend(optax.scale_by_adam(0.9, 0.95, 1e-12), scale)
    rule = scale_by_eight_bit_adam(0.9, 0.95, 1e-12, lambda params: ("embed", "mlp"))
    narrow, _ = descend(rule, scale, key=True)
    assert float(jnp.sqrt(jnp.mean((plain - narrow) ** 2))) < 0.02
    assert float(jnp.sqrt(jnp.mean((narrow - target) ** 2))) < 1.2 * float(jnp.sqrt(jnp.mean((plain - target) ** 2)))


def test_a_second_moment_of_a_thousand_steps_is_not_drawn_away():
    """Rounding in the codes' own measure would add 0.06 % per step, and to a moment that forgets 0.1 % more than its half."""
    rule = scale_by_eight_bit_adam(0.9, 0.999, 1e-12, lambda params: ("embed", "mlp"))
    start = jnp.zeros((8, 256))

    def step(state, number):
        key = jax.random.fold_in(jax.random.key(2), number)
        grads = jax.random.normal(jax.random.fold_in(key, 1), start.shape)
        return rule.update(grads, state, start, key=key)[1], None

    state, _ = jax.jit(lambda: jax.lax.scan(step, rule.init(start), jnp.arange(3000)))()
    blocks = Blocks.of(start.shape, ("embed", "mlp"))
    second = decode_second(state.nu.code, state.nu.scale, blocks)
    assert float(second.mean()) == pytest.approx(1 - 0.999**3000, rel=0.02)
