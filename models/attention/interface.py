"""The interface of attention backends.

A backend reports which requests it does not support; those raise UserError. Masks are never approximated.

Legend: B batch, T query positions, S key positions (T = S), N query heads, K key/value heads (N a multiple of K), H head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class AttentionRequest:
    """The static properties of a call, from which a backend reports whether it supports it."""

    platform: str
    """Of the devices that will run it: cpu, gpu (NVIDIA), rocm or tpu (see models.matmul.platform_of)."""
    dtype: jnp.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    causal: bool = True
    sliding_window: int | None = None
    packed: bool = True
    """Segment ids restrict attention to documents."""
    length: int | None = None
    """Tokens per row; None while unknown (when a model is created)."""
    softcap: float | None = None
    """Soft-capping of the scores."""
    sinks: bool = False
    """A learned logit per head in the denominator of the softmax."""


NO_SOFTCAP = "does not support soft-capping of scores (model.attention_softcap)"
NO_SINKS = "does not support attention sinks (model.attention_sinks)"


class Backend(Protocol):
    """One implementation of attention. It tags its result with the checkpoint name "attention_context" (models/remat.py)."""

    @property
    def name(self) -> str:
        """Its value of `compute.attention.backend`."""

    @property
    def per_device(self) -> bool:
        """Whether XLA cannot partition its kernels: it has to run under shard_map, on the shards of one device."""

    @property
    def per_device_in_stages(self) -> bool:
        """As per_device, inside of a pipeline stage, whose program is under shard_map over other axes already."""

    def refusal(self, request: AttentionRequest) -> str | None:
        """Return why the request is not supported, or None when it is."""

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
        """Return softmax(soft_cap(q k^T / sqrt(H))) v under the mask, [B, T, N, H] in q's dtype; zeros where the segment is 0.

        sinks: float32 logits of one further key per head, which every query sees and whose value is zero; None: no such key.
        """
