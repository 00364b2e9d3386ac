"""Attention as its definition: float32, scores materialized. The oracle of the other backends' tests.

Legend: B batch, T queries, S keys, K key/value heads, G query heads per key/value head, H head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ridgeline.models.attention.interface import AttentionRequest
from ridgeline.models.attention.masks import soft_cap, whole_mask, zero_padding


class Reference:
    """Naive attention; supports everything."""

    name = "reference"
    per_device = False
    per_device_in_stages = False

    def refusal(self, request: AttentionRequest) -> str | None:
        """Return None: everything is supported."""
        return None

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        segment_ids_BT: jax.Array | None,
        *,
        causal: bool,
        sliding_window: int | None,
        softcap: float | None,
        sinks_N: jax.Array | None,
        chunk: int,
    ) -> jax.Array:
        """See `Backend`; `chunk` is ignored."""
        batch, length, heads, width = q_BTNH.shape
        q_BTKGH = q_BTNH.astype(jnp.float32).reshape(batch, length, k_BSKH.shape[2], -1, width)
        scores_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH.astype(jnp.float32)) * width**-0.5
        scores_BKGTS = soft_cap(scores_BKGTS, softcap)
        mask_BTS = whole_mask(length, segment_ids_BT, causal, sliding_window)
        if mask_BTS is not None:
            # Finite, so that a row without any key stays finite; zero_padding then clears it.
            scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)
        if sinks_N is not None:
            sinks_BKGT1 = jnp.broadcast_to(sinks_N.reshape(1, k_BSKH.shape[2], -1, 1, 1), (*scores_BKGTS.shape[:4], 1))
            scores_BKGTS = jnp.concatenate([scores_BKGTS, sinks_BKGT1], axis=-1)
        weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)[..., :length]
        out = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS, v_BSKH.astype(jnp.float32)).reshape(batch, length, heads, -1)
        return checkpoint_name(zero_padding(out, segment_ids_BT).astype(q_BTNH.dtype), "attention_context")
