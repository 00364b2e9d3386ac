"""Adam with its moments in 8 bits: a code per element, and one float32 scale per block of BLOCK elements of the last dim.

Block-wise scales keep an outlier from costing its whole tensor its precision (Dettmers et al., 8-bit optimizers via block-wise
quantization, arXiv 2110.02861). The maps are our own choice. First moments are linear between minus and plus the block's largest. Second
moments are logarithmic, a factor of 2^(1/8) between neighbours: each has the same relative precision down to 2^-31 of the largest, so that
none is rounded to zero, which would make its update explode. Both are rounded stochastically, in the map's own measure: a decay of 5 % or
0.1 % per step is less than the distance of two codes, and would be lost to nearest rounding step after step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainer.rounding import keys_of

Tree = Any
BLOCK = 128
"""Elements of the last dim that share a scale, where they divide it; else the whole dim shares one."""
LINEAR_MOST = 127
LOG_MOST, LOG_PER_OCTAVE = 255, 8


class Moment(NamedTuple):
    """A moment in 8 bits, two trees of the parameters' structure."""

    code: Tree
    """int8 (first moments) or uint8 (second), shaped as the parameter."""
    scale: Tree
    """float32: the largest magnitude of each block, [..., blocks]."""


class EightBitAdam(NamedTuple):
    """State of `scale_by_eight_bit_adam`."""

    steps: jax.Array
    mu: Moment
    nu: Moment


def blocks(width: int) -> int:
    """Return into how many blocks a last dim of this width is cut."""
    return width // BLOCK if width % BLOCK == 0 else 1


def scale_by_eight_bit_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Return Adam's direction (arXiv 1412.6980, algorithm 1) from moments in 8 bits; `update` takes the keyword `key` for the rounding."""

    def init(params: Tree) -> EightBitAdam:
        def empty(dtype: Any) -> Moment:
            scales = jax.tree.map(lambda p: jnp.zeros((*p.shape[:-1], blocks(p.shape[-1])), jnp.float32), params)
            return Moment(jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params), scales)

        return EightBitAdam(jnp.zeros((), jnp.int32), empty(jnp.int8), empty(jnp.uint8))

    def update(updates: Tree, state: EightBitAdam, params: Tree = None, *, key: jax.Array, **extra: Any) -> tuple[Tree, EightBitAdam]:
        steps = state.steps + 1
        first, second = jax.random.split(key)
        mu = jax.tree.map(lambda g, q, s: b1 * decode_linear(q, s) + (1 - b1) * g, updates, state.mu.code, state.mu.scale)
        nu = jax.tree.map(lambda g, q, s: b2 * decode_log(q, s) + (1 - b2) * g * g, updates, state.nu.code, state.nu.scale)
        bias1, bias2 = 1 - b1**steps, 1 - b2**steps
        direction = jax.tree.map(lambda m, v: (m / bias1) / (jnp.sqrt(v / bias2) + eps), mu, nu)
        return direction, EightBitAdam(steps, _encode(encode_linear, mu, first), _encode(encode_log, nu, second))

    return optax.GradientTransformationExtraArgs(init, update)


def _encode(encode: Any, moments: Tree, key: jax.Array) -> Moment:
    pairs = jax.tree.map(encode, moments, keys_of(key, moments))
    return Moment(*(jax.tree.map(lambda _, pair, at=at: pair[at], moments, pairs) for at in (0, 1)))


def encode_linear(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return int8 codes and scales of float32 x."""
    cut = _cut(x)
    scale = jnp.max(jnp.abs(cut), axis=-1)
    steps = cut / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)[..., None] * LINEAR_MOST
    code = jnp.floor(steps.reshape(x.shape) + jax.random.uniform(key, x.shape))
    return jnp.clip(code, -LINEAR_MOST, LINEAR_MOST).astype(jnp.int8), scale


def decode_linear(code: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the float32 values of codes."""
    return _spread(code.astype(jnp.float32) / LINEAR_MOST, scale)


def encode_log(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return uint8 codes and scales of float32 x >= 0. Code 0 is 0."""
    cut = _cut(x)
    scale = jnp.max(cut, axis=-1)
    tiny = jnp.finfo(jnp.float32).tiny
    ratio = jnp.maximum(cut / jnp.maximum(scale, tiny)[..., None], 2.0**-126)
    steps = (LOG_MOST + LOG_PER_OCTAVE * jnp.log2(ratio)).reshape(x.shape)
    code = jnp.clip(jnp.floor(steps + jax.random.uniform(key, x.shape)), 1, LOG_MOST)
    return jnp.where(x > 0, code, 0).astype(jnp.uint8), scale


def decode_log(code: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the float32 values of codes."""
    value = jnp.exp2((code.astype(jnp.float32) - LOG_MOST) / LOG_PER_OCTAVE)
    return _spread(jnp.where(code > 0, value, 0.0), scale)


def _cut(x: jax.Array) -> jax.Array:
    """[..., D] -> [..., blocks, D / blocks]."""
    count = blocks(x.shape[-1])
    return x.reshape(*x.shape[:-1], count, x.shape[-1] // count)


def _spread(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (_cut(x) * scale[..., None]).reshape(x.shape)
