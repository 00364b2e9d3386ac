"""Attention through `jax.nn.dot_product_attention(implementation="xla")`: plain XLA, scores materialized."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

from ridgeline.models.attention.interface import NO_SINKS, NO_SOFTCAP, AttentionRequest
from ridgeline.models.attention.masks import whole_mask, zero_padding


class Xla:
    """JAX's own XLA attention with an explicit mask; supports every mask."""

    name = "xla"
    per_device = False
    per_device_in_stages = False

    def refusal(self, request: AttentionRequest) -> str | None:
        """Return why the request is not supported, or None; every mask is, because it is materialized."""
        if request.softcap is not None:
            return NO_SOFTCAP
        return NO_SINKS if request.sinks else None

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
        mask_BTS = whole_mask(q_BTNH.shape[1], segment_ids_BT, causal, sliding_window)
        mask = None if mask_BTS is None else mask_BTS[:, None]
        out = jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, mask=mask, implementation="xla")
        return checkpoint_name(zero_padding(out, segment_ids_BT), "attention_context")
