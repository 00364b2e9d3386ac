"""A straightforward Llama and train step in JAX, without Ridgeline: the baseline of several benchmarks.

Legend: B batch, T sequence, D embed width, N query heads, K key/value heads, G = N/K, H head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

if TYPE_CHECKING:
    from ridgeline.configs.model_schema import ModelConfig
    from ridgeline.configs.schema import Config

Tree = Any
Step = Callable[[Tree, dict[str, jax.Array]], tuple[Tree, jax.Array]]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps) * scale).astype(x.dtype)


def rotate(x_BTNH: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of positions 0..T-1, rotate-half layout."""
    length, half = x_BTNH.shape[1], x_BTNH.shape[-1] // 2
    angles = jnp.arange(length)[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def hand_written_loss(model: ModelConfig, dtype: Any, layers: str, params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy of a Llama as one would write it down: materialized scores with a causal mask, whole logits, optax's loss."""

    def block(x_BTD: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        layer = jax.tree.map(lambda w: w.astype(dtype), layer)
        attention, mlp = layer["attention"], layer["mlp"]
        h = rms_norm(x_BTD, layer["attention_norm"]["scale"], model.norm_eps)
        q = rotate(jnp.einsum("btd,dnh->btnh", h, attention["query"]), model.rope_theta)
        k = rotate(jnp.einsum("btd,dkh->btkh", h, attention["key"]), model.rope_theta)
        v = jnp.einsum("btd,dkh->btkh", h, attention["value"])
        groups = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        context = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores).astype(dtype), v)
        x_BTD = x_BTD + jnp.einsum("btnh,nhd->btd", context, attention["out"])
        h = rms_norm(x_BTD, layer["mlp_norm"]["scale"], model.norm_eps)
        return x_BTD + (jax.nn.silu(h @ mlp["gate"]) * (h @ mlp["up"])) @ mlp["down"], None

    x_BTD = params["embedding"].astype(dtype)[batch["tokens"]]
    if layers == "unrolled":
        for index in range(model.num_layers):
            x_BTD, _ = block(x_BTD, jax.tree.map(lambda w, at=index: w[at], params["blocks"]))
    else:
        x_BTD, _ = jax.lax.scan(jax.checkpoint(block) if layers == "scan, remat" else block, x_BTD, params["blocks"])
    x_BTD = rms_norm(x_BTD, params["final_norm"]["scale"], model.norm_eps)
    unembedding = params["embedding"].T if model.tie_embeddings else params["output"]
    logits = (x_BTD @ unembedding.astype(dtype)).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))


def hand_written_step(config: Config, layers: str) -> tuple[optax.GradientTransformation, Step]:
    """AdamW with clipping around `hand_written_loss`; state is (params, optimizer state)."""
    o = config.optimizer
    optimizer = optax.chain(
        optax.clip_by_global_norm(o.clip_norm or 1.0),
        optax.adamw(
            o.learning_rate, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=lambda p: jax.tree_util.tree_map_with_path(_is_matrix, p)
        ),
    )
    loss_of = partial(hand_written_loss, config.model, jnp.dtype(config.precision.compute), layers)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: dict[str, jax.Array]) -> tuple[Tree, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return optimizer, step


def _is_matrix(path: Any, leaf: jax.Array) -> bool:
    return "norm" not in jax.tree_util.keystr(path)
