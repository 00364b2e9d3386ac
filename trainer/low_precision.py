"""Low-precision training state: Adam moments in 8 bits and bfloat16 master weights, both rounded stochastically.

Moments: a code per element, and one float32 scale per block of elements along one dim (planner/optimizer_state.py).

Block-wise scales limit the effect of an outlier to its block (Dettmers et al., 8-bit optimizers via block-wise quantization, arXiv
2110.02861). The codes are logarithmic (our choice): neighboring codes differ by a factor of 2^(1/8), so that the relative precision is the
same for all magnitudes down to a small part of the block's largest: 2^-31 for second moments, none of which is rounded to zero (its update
would explode), and 2^-15 for first moments, which need a sign bit. With linear codes, elements far below the block's largest would change
in large steps or not at all. Rounding is stochastic and unbiased: a decay of 0.1 % per step is far smaller than the distance of two codes
and would be lost when rounding to nearest, and a bias of that size would accumulate to a wrong moment.

Master weights: a bfloat16 parameter has 8 bits. An update below 1/512 of the parameter is lost when rounding to nearest, and accumulates
in expectation when rounding stochastically (Zamirai et al., Revisiting bfloat16 training, arXiv 2010.06192, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ridgeline.planner.optimizer_state import block_width
from ridgeline.sharding.rules import LogicalAxes

Tree = Any
FIRST_MOST, SECOND_MOST = 127, 255
"""Largest codes of first moments (besides the sign) and second moments."""
PER_OCTAVE = 8
"""Codes per factor of two."""
_TINY = float(jnp.finfo(jnp.float32).tiny)
_NEVER = -1000.0  # 2 to this power is zero in float32
_HALF = 16  # bits of one random uint32 for each of the two codes
_DROPPED = 16  # mantissa bits of float32 that bfloat16 does not have


@dataclass(frozen=True)
class Blocks:
    """The blocks of a parameter: `width` neighboring elements along `dim` share a scale."""

    dim: int
    width: int

    @classmethod
    def of(cls, shape: tuple[int, ...], axes: LogicalAxes) -> Blocks:
        """Return blocks along the last dim that fsdp does not shard."""
        dim = max(d for d, axis in enumerate(axes) if axis != "embed")
        return cls(dim, block_width(shape[dim], divided=axes[dim] != "head_dim"))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a parameter."""
        return (*shape[: self.dim], shape[self.dim] // self.width, *shape[self.dim + 1 :])

    def most(self, x: jax.Array) -> jax.Array:
        """Return the largest element of each block, in the shape of the scales."""
        return jnp.max(self._split(x), axis=self.dim + 1)

    def spread(self, scale: jax.Array) -> jax.Array:
        """Repeat each scale over its block, in the shape of the parameter."""
        shape = (*scale.shape[: self.dim + 1], self.width, *scale.shape[self.dim + 1 :])
        whole = (*scale.shape[: self.dim], scale.shape[self.dim] * self.width, *scale.shape[self.dim + 1 :])
        return jnp.broadcast_to(jnp.expand_dims(scale, self.dim + 1), shape).reshape(whole)

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[: self.dim], x.shape[self.dim] // self.width, self.width, *x.shape[self.dim + 1 :])


class Moment(NamedTuple):
    """An 8-bit moment: two trees with the structure of the parameters."""

    code: Tree
    """int8 (first moments) or uint8 (second moments), in the shape of the parameter."""
    scale: Tree
    """float32: largest magnitude of each block; `Blocks.scale_shape`."""


class EightBitAdam(NamedTuple):
    """State of `scale_by_eight_bit_adam`."""

    steps: jax.Array
    mu: Moment
    nu: Moment


def scale_by_eight_bit_adam(b1: float, b2: float, eps: float, axes_of: Callable[[Tree], Tree]) -> optax.GradientTransformationExtraArgs:
    """Return Adam's direction (arXiv 1412.6980, algorithm 1) with 8-bit moments; `update` takes the keyword `key` for rounding.

    `axes_of`: tree of parameters -> tree of their logical axes. `update` also takes `first`, as `keys_of`.
    """

    def blocks(params: Tree) -> Tree:
        return jax.tree.map(lambda p, axes: Blocks.of(p.shape, axes), params, axes_of(params))

    def init(params: Tree) -> EightBitAdam:
        def empty(dtype: Any) -> Moment:
            scales = jax.tree.map(lambda p, cut: jnp.zeros(cut.scale_shape(p.shape), jnp.float32), params, blocks(params))
            return Moment(jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params), scales)

        return EightBitAdam(jnp.zeros((), jnp.int32), empty(jnp.int8), empty(jnp.uint8))

    def update(
        updates: Tree, state: EightBitAdam, params: Tree = None, *, key: jax.Array, first: int = 0, **extra: Any
    ) -> tuple[Tree, EightBitAdam]:
        steps = state.steps + 1
        bias1, bias2 = 1 - b1**steps, 1 - b2**steps

        def one(g: jax.Array, cut: Blocks, key: jax.Array, mq: jax.Array, ms: jax.Array, vq: jax.Array, vs: jax.Array) -> tuple[Any, ...]:
            def moments(mq: jax.Array, vq: jax.Array) -> tuple[jax.Array, jax.Array]:
                return b1 * decode_first(mq, ms, cut) + (1 - b1) * g, b2 * decode_second(vq, vs, cut) + (1 - b2) * g * g

            m, v = moments(mq, vq)
            scales = cut.most(jnp.abs(m)), cut.most(v)
            # A block's scale is known only after a pass over the whole block. The barrier makes the second pass decode the codes again;
            # without it XLA keeps both moments of the whole model in float32 between the passes, which 8-bit moments should avoid.
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

        trees = (blocks(updates), keys_of(key, updates, first), *state.mu, *state.nu)
        found = jax.tree.map(one, updates, *trees)
        direction, mq, ms, vq, vs = (jax.tree.map(lambda _, parts, at=at: parts[at], updates, found) for at in range(5))
        return direction, EightBitAdam(steps, Moment(mq, ms), Moment(vq, vs))

    return optax.GradientTransformationExtraArgs(init, update)


def low_half(bits: jax.Array) -> jax.Array:
    """Return uniform numbers in (0, 1) from the low bits of uint32."""
    return ((bits & (2**_HALF - 1)).astype(jnp.float32) + 0.5) * 2.0**-_HALF


def high_half(bits: jax.Array) -> jax.Array:
    """Return uniform numbers in (0, 1) from the high bits of uint32."""
    return ((bits >> _HALF).astype(jnp.float32) + 0.5) * 2.0**-_HALF


def encode_first(x: jax.Array, scale: jax.Array, uniform: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the int8 codes of float32 x; `uniform` in (0, 1) selects the neighboring code; the smallest are 0 and plus or minus 1."""
    ratio = jnp.abs(x) / blocks.spread(jnp.maximum(scale, _TINY))
    code = _round(ratio, uniform, FIRST_MOST)
    # Integer zeros here and below: XLA would merge a float32 zero with the initial value of a layer's gradients, and keep that array of
    # the size of the parameters from the backward pass to the update.
    magnitude = jnp.where(code >= 1, code.astype(jnp.int8), (uniform < ratio * 2.0 ** ((FIRST_MOST - 1) / PER_OCTAVE)).astype(jnp.int8))
    return jnp.where(jnp.signbit(x), -magnitude, magnitude)


def decode_first(code: jax.Array, scale: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the float32 values of codes."""
    magnitude = jnp.exp2(_exponent(jnp.abs(code), FIRST_MOST)) * blocks.spread(scale)
    return jnp.where(jnp.sign(code) < 0, -magnitude, magnitude)


def encode_second(x: jax.Array, scale: jax.Array, uniform: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the uint8 codes of float32 x >= 0; `uniform` in (0, 1) selects the neighboring code. Code 0 is 0 or subnormal."""
    code = _round(x / blocks.spread(jnp.maximum(scale, _TINY)), uniform, SECOND_MOST)
    return jnp.where(x >= _TINY, jnp.maximum(code, 1).astype(jnp.uint8), jnp.uint8(0))


def decode_second(code: jax.Array, scale: jax.Array, blocks: Blocks) -> jax.Array:
    """Return the float32 values of codes."""
    return jnp.exp2(_exponent(code, SECOND_MOST)) * blocks.spread(scale)


def _exponent(code: jax.Array, most: int) -> jax.Array:
    return jnp.where(code > 0, (code.astype(jnp.float32) - most) / PER_OCTAVE, _NEVER)


def _round(ratio: jax.Array, uniform: jax.Array, most: int) -> jax.Array:
    """Return float32 codes of ratios up to 1, rounded stochastically without bias; a result below 1 means less than code 1."""
    exact = most + PER_OCTAVE * jnp.log2(jnp.maximum(ratio, 2.0**-126))
    below = jnp.floor(exact)
    up = (jnp.exp2((exact - below) / PER_OCTAVE) - 1) / (2.0 ** (1 / PER_OCTAVE) - 1)
    return jnp.minimum(jnp.where(uniform < up, below + 1, below), most)


def to_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round float32 to bfloat16 stochastically. Exact bfloat16 values are unchanged; non-finite values are cast.

    A random number is added to the dropped bits: it carries into the kept bits with the probability of rounding up. The random numbers
    depend on the key and the shape, not on the mesh.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    kept = ((bits + noise) >> _DROPPED).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(kept, jnp.bfloat16), x.astype(jnp.bfloat16))


def keys_of(key: jax.Array, tree: Tree, first: int = 0) -> Tree:
    """Return one key per array of a tree. `first`: position of its first array in the tree of all parameters."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [jax.random.fold_in(key, first + index) for index in range(len(leaves))])


def apply_updates(params: Tree, updates: Tree, key: jax.Array, first: int = 0) -> Tree:
    """Add float32 updates to parameters of any dtype; results in bfloat16 are rounded stochastically. `first`: as in `keys_of`."""

    def one(param: jax.Array, update: jax.Array, key: jax.Array) -> jax.Array:
        total = param.astype(jnp.float32) + update
        return to_bfloat16(total, key) if param.dtype == jnp.bfloat16 else total.astype(param.dtype)

    return jax.tree.map(one, params, updates, keys_of(key, params, first))
