"""Adam with its moments in 8 bits: a code per element, and one float32 scale per block of elements along one dim (planner/scales.py).

Block-wise scales keep an outlier from costing its whole tensor its precision (Dettmers et al., 8-bit optimizers via block-wise
quantization, arXiv 2110.02861). The maps are our own choice. First moments are linear between minus and plus the block's largest. Second
moments are logarithmic, a factor of 2^(1/8) between neighbours: each has the same relative precision down to 2^-31 of the largest, so that
none is rounded to zero, which would make its update explode. Both are rounded stochastically, in the map's own measure: a decay of 5 % or
0.1 % per step is less than the distance of two codes, and would be lost to nearest rounding step after step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from planner.scales import block_width
from sharding.rules import LogicalAxes
from trainer.rounding import keys_of

Tree = Any
LINEAR_MOST = 127
LOG_MOST, LOG_PER_OCTAVE = 255, 8
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
                return b1 * decode_linear(mq, ms, cut) + (1 - b1) * g, b2 * decode_log(vq, vs, cut) + (1 - b2) * g * g

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
                encode_linear(m, scales[0], low_half(bits), cut),
                scales[0],
                encode_log(v, scales[1], high_half(bits), cut),
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


def encode_linear(x: jax.Array, scale: jax.Array, uniform: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the int8 codes of float32 x; `uniform` in (0, 1) decides between neighbours."""
    steps = x / blocks.spread(jnp.maximum(scale, _TINY)) * LINEAR_MOST
    return jnp.clip(jnp.floor(steps + uniform), -LINEAR_MOST, LINEAR_MOST).astype(jnp.int8)


def decode_linear(code: jax.Array, scale: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the float32 values of codes."""
    return code.astype(jnp.float32) * blocks.spread(scale / LINEAR_MOST)


def encode_log(x: jax.Array, scale: jax.Array, uniform: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the uint8 codes of float32 x >= 0; `uniform` in (0, 1) decides between neighbours. Code 0 is 0 (and what is subnormal)."""
    ratio = jnp.maximum(x / blocks.spread(jnp.maximum(scale, _TINY)), 2.0**-126)
    code = jnp.clip(jnp.floor(LOG_MOST + LOG_PER_OCTAVE * jnp.log2(ratio) + uniform), 1, LOG_MOST).astype(jnp.uint8)
    return jnp.where(x >= _TINY, code, jnp.uint8(0))


def decode_log(code: jax.Array, scale: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the float32 values of codes."""
    # No zero in float32: XLA would take the one that a layer's gradients start from, and keep that array for the whole step.
    exponent = jnp.where(code > 0, (code.astype(jnp.float32) - LOG_MOST) / LOG_PER_OCTAVE, _NEVER)
    return jnp.exp2(exponent) * blocks.spread(scale)
