"""Normalization with float32 statistics.

Legend: B batch, T sequence, D the normalized dims (residual stream, one head or all heads); any leading dims work.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ridgeline.models.params import ParamFactory, logical_axes, may_defer, slot_of, use_param
from ridgeline.sharding.manual import on_shards, summed_over, unreduced_spec

if TYPE_CHECKING:
    from ridgeline.sharding.partition import Partitioner


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dims, those of the scale (arXiv 1910.07467); statistics in float32, result in x's dtype."""

    offset = 0.0
    """What is added to the stored scale."""

    def __init__(
        self,
        dims: int | tuple[int, ...],
        eps: float,
        make: ParamFactory,
        partitioner: Partitioner,
        axes: tuple[str, ...] = ("norm",),
        over: tuple[str, ...] = ("batch", "residual_seq"),
    ) -> None:
        """Create the scale, with these dims and logical axes; over: logical axes of the other dims of the input."""
        self.scale = make.constant((dims,) if isinstance(dims, int) else dims, axes, 1.0 - self.offset)
        may_defer(self.scale, *over, dtype=jnp.dtype("float32"))
        self.over = over
        self.eps = eps
        self.partitioner = partitioner

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Normalize the last dims."""
        with jax.named_scope("norm"):
            scale_D = use_param(self.scale, self.partitioner, jnp.dtype(jnp.float32))
            scale_D = scale_D + self.offset if self.offset else scale_D
            slot = slot_of(self.scale)
            if slot is None:
                return _rms_norm(x_BTD, scale_D, self.eps)
            deferred = _Deferred(self.partitioner, logical_axes(self.scale), self.over)
            return _rms_norm_deferred(deferred, x_BTD, scale_D, slot, self.eps)


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
    return (_unit_rms(x_BTD, scale_D.ndim, eps) * scale_D).astype(x_BTD.dtype)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(0, 4))
def _rms_norm_deferred(deferred: _Deferred, x_BTD: jax.Array, scale_D: jax.Array, slot_RD: jax.Array, eps: float) -> jax.Array:
    """As `_rms_norm`; the unreduced gradients of the scale are those of the slot."""
    return _times(deferred, _unit_rms(x_BTD, scale_D.ndim, eps), scale_D, slot_RD).astype(x_BTD.dtype)


def _unit_rms(x_BTD: jax.Array, dims: int, eps: float) -> jax.Array:
    """Return x / rms(x) over the last dims, float32."""
    x = x_BTD.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=tuple(range(-dims, 0)), keepdims=True) + eps)


class _Deferred(NamedTuple):
    """Where the gradient of a scale is unreduced."""

    partitioner: Partitioner
    axes: tuple[str, ...]
    """Logical axes of the scale."""
    over: tuple[str, ...]
    """Logical axes of the other dims of the input."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _times(deferred: _Deferred, normed_BTD: jax.Array, scale_D: jax.Array, slot_RD: jax.Array) -> jax.Array:
    return normed_BTD * scale_D


def _times_forward(
    deferred: _Deferred, normed_BTD: jax.Array, scale_D: jax.Array, slot_RD: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return normed_BTD * scale_D, (normed_BTD, scale_D)


def _times_backward(deferred: _Deferred, residuals: tuple[jax.Array, jax.Array], dy_BTD: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    normed_BTD, scale_D = residuals
    spec = deferred.partitioner.rules.spec((*deferred.over, *deferred.axes))

    def local(normed_BTD: jax.Array, dy_BTD: jax.Array) -> jax.Array:
        return jnp.sum(normed_BTD * dy_BTD, tuple(range(normed_BTD.ndim - scale_D.ndim)))[None]

    over = summed_over(deferred.partitioner, deferred.axes, deferred.over)
    run = on_shards(deferred.partitioner, local, (spec, spec), unreduced_spec(deferred.partitioner, deferred.axes, over))
    return dy_BTD * scale_D, None, run(normed_BTD, dy_BTD)


_times.defvjp(_times_forward, _times_backward)


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
