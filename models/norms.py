"""Normalization with float32 statistics.

Legend: B batch, T sequence, D the normalized dims (residual stream, one head or all heads); any leading dims work.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.models.params import ParamFactory, use_param

if TYPE_CHECKING:
    from ridgeline.sharding.partition import Partitioner


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dims, those of the scale (arXiv 1910.07467); statistics in float32, result in x's dtype."""

    offset = 0.0
    """What is added to the stored scale."""

    def __init__(
        self, dims: int | tuple[int, ...], eps: float, make: ParamFactory, partitioner: Partitioner, axes: tuple[str, ...] = ("norm",)
    ) -> None:
        self.scale = make.constant((dims,) if isinstance(dims, int) else dims, axes, 1.0 - self.offset)
        self.eps = eps
        self.partitioner = partitioner

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Normalize the last dims."""
        with jax.named_scope("norm"):
            scale_D = use_param(self.scale, self.partitioner, jnp.dtype(jnp.float32))
            return _rms_norm(x_BTD, scale_D + self.offset if self.offset else scale_D, self.eps)


class RMSNorm1p(RMSNorm):
    """RMSNorm whose scale is 1 + the stored weight, which weight decay pulls to 1 and not to 0 (Gemma)."""

    offset = 1.0


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias over the last dim (arXiv 1607.06450); statistics in float32, result in x's dtype."""

    def __init__(self, dim: int, eps: float, make: ParamFactory, partitioner: Partitioner) -> None:
        self.scale = make.constant((dim,), ("norm",), 1.0)
        self.bias = make.constant((dim,), ("norm",), 0.0)
        self.eps = eps
        self.partitioner = partitioner

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Normalize the last dim."""
        with jax.named_scope("norm"):
            float32 = jnp.dtype(jnp.float32)
            scale_D, bias_D = use_param(self.scale, self.partitioner, float32), use_param(self.bias, self.partitioner, float32)
            return _layer_norm(x_BTD, scale_D, bias_D, self.eps)


# Checkpointed: the backward pass keeps x in its own dtype only, not the float32 intermediates.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    x = x_BTD.astype(jnp.float32)
    dims = tuple(range(-scale_D.ndim, 0))
    normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True) + eps)
    return (normed * scale_D).astype(x_BTD.dtype)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _layer_norm(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, eps: float) -> jax.Array:
    x = x_BTD.astype(jnp.float32)
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + eps)
    return (normed * scale_D + bias_D).astype(x_BTD.dtype)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def unit_rms(x_BTD: jax.Array, eps: float) -> jax.Array:
    """Return x / rms(x) over the last dim, without a scale; statistics in float32, result in x's dtype."""
    x = x_BTD.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)).astype(x_BTD.dtype)


Norm = RMSNorm | LayerNorm
NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rmsnorm": RMSNorm, "rmsnorm_1p": RMSNorm1p, "layernorm": LayerNorm}
"""model.norm -> module."""
