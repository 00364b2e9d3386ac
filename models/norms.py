"""Normalization with float32 statistics.

Legend: B batch, T sequence, D the normalized dim (residual stream or one head); any leading dims work.
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
    """x / rms(x) * scale over the last dim (arXiv 1910.07467); statistics in float32, result in x's dtype."""

    def __init__(self, dim: int, eps: float, make: ParamFactory, partitioner: Partitioner, axis: str = "norm") -> None:
        self.scale = make.constant((dim,), (axis,), 1.0)
        self.eps = eps
        self.partitioner = partitioner

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Normalize the last dim."""
        with jax.named_scope("norm"):
            return _rms_norm(x_BTD, use_param(self.scale, self.partitioner, jnp.dtype(jnp.float32)), self.eps)


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias over the last dim (arXiv 1607.06450); statistics in float32, result in x's dtype."""

    def __init__(self, dim: int, eps: float, make: ParamFactory, partitioner: Partitioner, axis: str = "norm") -> None:
        self.scale = make.constant((dim,), (axis,), 1.0)
        self.bias = make.constant((dim,), (axis,), 0.0)
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
    normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return (normed * scale_D).astype(x_BTD.dtype)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _layer_norm(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, eps: float) -> jax.Array:
    x = x_BTD.astype(jnp.float32)
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + eps)
    return (normed * scale_D + bias_D).astype(x_BTD.dtype)


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}
"""model.norm -> module."""
