"""Adam with its moments in 8 bits: a code per element, and one float32 scale per block of elements along one dim (planner/scales.py).

Block-wise scales keep an outlier from costing its whole tensor its precision (Dettmers et al., 8-bit optimizers via block-wise
quantization, arXiv 2110.02861). The map is our own choice: logarithmic, a factor of 2^(1/8) between neighbours, so that every element has
the same relative precision down to a small part of its block's largest: 2^-31 for second moments, none of which is rounded to zero (its
update would explode), and 2^-15 for first moments, which need a bit for their sign. With linear codes an element far below its block's
largest would move by leaps or not at all. Rounding is stochastic and leaves the mean as it is: a decay of 0.1 % per step is far less than
the distance of two codes and would be lost to nearest rounding, and even a bias of that size would add up to a wrong moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ridgeline.planner.scales import block_width
from ridgeline.sharding.rules import LogicalAxes
from ridgeline.trainer.rounding import keys_of

Tree = Any
FIRST_MOST, SECOND_MOST = 127, 255
"""Largest codes of first (beside a sign) and second moments."""
PER_OCTAVE = 8
"""Codes between a value and its double."""
_TINY = float(jnp.finfo(jnp.float32).tiny)
_NEVER = -1000.0  # a power of two that float32 rounds to zero
_HALF = 16  # bits of one draw of 32 for each of the two codes


@dataclass(frozen=True)
class Blocks:
    """How a parameter is cut into blocks: `width` neighbours along `dim` share a scale."""

    dim: int
    width: int

    @classmethod
    def of(cls, shape: tuple[int, ...], axes: LogicalAxes) -> Blocks:
        """Cut along the last dim that fsdp does not shard."""
        dim = max(d for d, axis in enumerate(axes) if axis != "embed")
        return cls(dim, block_width(shape[dim], divided=axes[dim] != "head_dim"))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a parameter."""
        return (*shape[: self.dim], shape[self.dim] // self.width, *shape[self.dim + 1 :])

    def most(self, x: jax.Array) -> jax.Array:
        """Largest element of each block, in the shape of the scales."""
        return jnp.max(self._cut(x), axis=self.dim + 1)

    def spread(self, scale: jax.Array) -> jax.Array:
        """Repeat each scale over its block, in the shape of the parameter."""
        shape = (*scale.shape[: self.dim + 1], self.width, *scale.shape[self.dim + 1 :])
        whole = (*scale.shape[: self.dim], scale.shape[self.dim] * self.width, *scale.shape[self.dim + 1 :])
        return jnp.broadcast_to(jnp.expand_dims(scale, self.dim + 1), shape).reshape(whole)

    def _cut(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[: self.dim], x.shape[self.dim] // self.width, self.width, *x.shape[self.dim + 1 :])


class Moment(NamedTuple):
    """A moment in 8 bits, two trees of the parameters' structure."""

    code: Tree
    """int8 (first moments) or uint8 (second), shaped as the parameter."""
    scale: Tree
    """float32: the largest magnitude of each block, shaped as the parameter with blocks for elements."""


class EightBitAdam(NamedTuple):
    """State of `scale_by_eight_bit_adam`."""

    steps: jax.Array
    mu: Moment
    nu: Moment


def scale_by_eight_bit_adam(b1: float, b2: float, eps: float, axes_of: Callable[[Tree], Tree]) -> optax.GradientTransformationExtraArgs:
    """Return Adam's direction (arXiv 1412.6980, algorithm 1) from moments in 8 bits; `update` takes the keyword `key` for the rounding.

    `axes_of`: tree of parameters to the tree of their logical axes.
    """

    def blocks(params: Tree) -> Tree:
        return jax.tree.map(lambda p, axes: Blocks.of(p.shape, axes), params, axes_of(params))

    def init(params: Tree) -> EightBitAdam:
        def empty(dtype: Any) -> Moment:
            scales = jax.tree.map(lambda p, cut: jnp.zeros(cut.scale_shape(p.shape), jnp.float32), params, blocks(params))
            return Moment(jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params), scales)

        return EightBitAdam(jnp.zeros((), jnp.int32), empty(jnp.int8), empty(jnp.uint8))

    def update(updates: Tree, state: EightBitAdam, params: Tree = None, *, key: jax.Array, **extra: Any) -> tuple[Tree, EightBitAdam]:
        steps = state.steps + 1
        bias1, bias2 = 1 - b1**steps, 1 - b2**steps

        def one(g: jax.Array, cut: Blocks, key: jax.Array, mq: jax.Array, ms: jax.Array, vq: jax.Array, vs: jax.Array) -> tuple[Any, ...]:
            def moments(mq: jax.Array, vq: jax.Array) -> tuple[jax.Array, jax.Array]:
                return b1 * decode_first(mq, ms, cut) + (1 - b1) * g, b2 * decode_second(vq, vs, cut) + (1 - b2) * g * g

            m, v = moments(mq, vq)
            scales = cut.most(jnp.abs(m)), cut.most(v)
            # A block's scale is known only after a pass over all of it. The barrier has the second pass decode the codes again; without it
            # XLA keeps both moments of the whole model in float32 from one pass to the next, which is what 8 bits should save.
            (mq, vq), scales = jax.lax.optimization_barrier(((mq, vq), scales))
            m, v = moments(mq, vq)
            bits = jax.random.bits(key, g.shape, jnp.uint32)
            direction = (m / bias1) / (jnp.sqrt(v / bias2) + eps)
            return (
                direction,
                encode_first(m, scales[0], low_half(bits), cut),
                scales[0],
                encode_second(v, scales[1], high_half(bits), cut),
                scales[1],
            )

        trees = (blocks(updates), keys_of(key, updates), *state.mu, *state.nu)
        found = jax.tree.map(one, updates, *trees)
        direction, mq, ms, vq, vs = (jax.tree.map(lambda _, parts, at=at: parts[at], updates, found) for at in range(5))
        return direction, EightBitAdam(steps, Moment(mq, ms), Moment(vq, vs))

    return optax.GradientTransformationExtraArgs(init, update)


def low_half(bits: jax.Array) -> jax.Array:
    """Return uniform numbers between 0 and 1 from the low bits of uint32."""
    return ((bits & (2**_HALF - 1)).astype(jnp.float32) + 0.5) * 2.0**-_HALF


def high_half(bits: jax.Array) -> jax.Array:
    """Return uniform numbers between 0 and 1 from the high bits of uint32."""
    return ((bits >> _HALF).astype(jnp.float32) + 0.5) * 2.0**-_HALF


def encode_first(x: jax.Array, scale: jax.Array, uniform: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the int8 codes of float32 x; `uniform` in (0, 1) decides between neighbours, the least of which are plus and minus 1 and 0."""
    ratio = jnp.abs(x) / blocks.spread(jnp.maximum(scale, _TINY))
    code = _round(ratio, uniform, FIRST_MOST)
    # Integer zeros here and below: XLA would take a zero in float32 for the one that a layer's gradients start from, and keep that array
    # of the parameters' size from the backward pass to the update.
    magnitude = jnp.where(code >= 1, code.astype(jnp.int8), (uniform < ratio * 2.0 ** ((FIRST_MOST - 1) / PER_OCTAVE)).astype(jnp.int8))
    return jnp.where(jnp.signbit(x), -magnitude, magnitude)


def decode_first(code: jax.Array, scale: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the float32 values of codes."""
    magnitude = jnp.exp2(_exponent(jnp.abs(code), FIRST_MOST)) * blocks.spread(scale)
    return jnp.where(jnp.sign(code) < 0, -magnitude, magnitude)


def encode_second(x: jax.Array, scale: jax.Array, uniform: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the uint8 codes of float32 x >= 0; `uniform` in (0, 1) decides between neighbours. Code 0 is 0 (and what is subnormal)."""
    code = _round(x / blocks.spread(jnp.maximum(scale, _TINY)), uniform, SECOND_MOST)
    return jnp.where(x >= _TINY, jnp.maximum(code, 1).astype(jnp.uint8), jnp.uint8(0))


def decode_second(code: jax.Array, scale: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the float32 values of codes."""
    return jnp.exp2(_exponent(code, SECOND_MOST)) * blocks.spread(scale)


def _exponent(code: jax.Array, most: int) -> jax.Array:
    return jnp.where(code > 0, (code.astype(jnp.float32) - most) / PER_OCTAVE, _NEVER)


def _round(ratio: jax.Array, uniform: jax.Array, most: int) -> jax.Array:
    """Return float32 codes of ratios up to 1, at random such that the mean of their values is the ratio; below 1: less than code 1 is."""
    exact = most + PER_OCTAVE * jnp.log2(jnp.maximum(ratio, 2.0**-126))
    below = jnp.floor(exact)
    up = (jnp.exp2((exact - below) / PER_OCTAVE) - 1) / (2.0 ** (1 / PER_OCTAVE) - 1)
    return jnp.minimum(jnp.where(uniform < up, below + 1, below), most)
