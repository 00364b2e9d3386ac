"""Parameters in bfloat16 rounded stochastically, moments in 8 bits: unbiased, the same on every mesh, and they train as float32 does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from planner.scales import block_width
from trainer.eight_bit import LOG_PER_OCTAVE, Blocks, decode_linear, decode_log, encode_linear, encode_log, scale_by_eight_bit_adam
from trainer.rounding import to_bfloat16


def keys(count):
    return jax.random.split(jax.random.key(1), count)


def test_stochastic_rounding_is_unbiased_and_lands_on_a_neighbour():
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


def recoded(encode, decode, x, blocks, key):
    scale = blocks.most(jnp.abs(x))
    return decode(encode(x, scale, jax.random.uniform(key, x.shape), blocks), scale, blocks)


@pytest.mark.parametrize(("shape", "axes"), [((4, 256), ("embed", "mlp")), ((4, 50), ("embed", "mlp")), ((256, 4), ("mlp", "embed"))])
def test_codes_are_unbiased_within_a_step_of_the_map(shape, axes):
    blocks = Blocks.of(shape, axes)
    magnitudes = jnp.float32([1e-6, 1, 30, 1e4])
    x = jax.random.normal(jax.random.key(2), shape) * (magnitudes if blocks.dim == 0 else magnitudes[:, None])
    first = jax.vmap(lambda key: recoded(encode_linear, decode_linear, x, blocks, key))(keys(2000))
    step = blocks.spread(blocks.most(jnp.abs(x))) / 127
    assert float(jnp.max(jnp.abs(first - x) / step)) <= 1.001
    assert float(jnp.max(jnp.abs((first - x).mean(axis=0)) / step)) <= 0.06
    second = jax.vmap(lambda key: recoded(encode_log, decode_log, x * x, blocks, key))(keys(2000))
    ratio = jnp.log2(second / (x * x)) * LOG_PER_OCTAVE
    assert float(jnp.max(jnp.abs(ratio))) <= 1.001
    assert float(jnp.max(jnp.abs(ratio.mean(axis=0)))) <= 0.06


def test_no_second_moment_becomes_zero_and_zero_stays():
    x, blocks = jnp.float32([[1.0, 1e-9, 1e-30, 0.0]]), Blocks.of((1, 4), ("embed", "mlp"))
    back = recoded(encode_log, decode_log, x, blocks, jax.random.key(0))
    assert (np.asarray(back)[0, :3] > 0).all()
    assert float(back[0, 3]) == 0.0
    nothing = recoded(encode_linear, decode_linear, jnp.zeros((2, 8)), Blocks.of((2, 8), ("embed", "mlp")), jax.random.key(0))
    assert not np.asarray(nothing).any()


@pytest.mark.parametrize("size", [14336, 11008, 28672, 29568, 18944, 5632, 4864, 13824, 27648])
def test_a_block_lies_whole_on_a_device_of_up_to_eight(size):
    width = block_width(size, divided=True)
    assert 16 <= width <= 128 and size % (8 * width) == 0


def test_blocks_follow_the_side_that_fsdp_does_not_cut():
    query = Blocks.of((2, 64, 4, 128), ("layers", "embed", "heads", "head_dim"))
    out = Blocks.of((2, 4, 128, 64), ("layers", "heads", "head_dim", "embed"))
    down = Blocks.of((2, 2048, 64), ("layers", "mlp", "embed"))
    assert [(b.dim, b.width) for b in (query, out, down)] == [(3, 128), (2, 128), (1, 128)]
    assert out.scale_shape((2, 4, 128, 64)) == (2, 4, 1, 64) and down.scale_shape((2, 2048, 64)) == (2, 16, 64)


def test_directions_follow_those_of_adam():
    """A noisy quadratic, 300 steps: the parameters end where Adam's do, far nearer than the way they came."""
    target = jax.random.normal(jax.random.key(5), (8, 256))

    def descend(rule, **extra):
        params = jnp.zeros((8, 256))
        state = rule.init(params)

        @jax.jit
        def step(params, state, key):
            noise, own = jax.random.split(key)
            grads = params - target + 0.3 * jax.random.normal(noise, params.shape)
            updates, state = rule.update(grads, state, params, key=own) if extra else rule.update(grads, state, params)
            return params - 0.01 * updates, state

        for key in keys(300):
            params, state = step(params, state, key)
        return params

    plain = descend(optax.scale_by_adam(0.9, 0.95, 1e-8))
    narrow = descend(scale_by_eight_bit_adam(0.9, 0.95, 1e-8, lambda params: ("embed", "mlp")), key=True)
    assert float(jnp.sqrt(jnp.mean((plain - narrow) ** 2))) < 0.05
    assert float(jnp.sqrt(jnp.mean((narrow - target) ** 2))) < 0.15
