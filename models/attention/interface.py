"""The contract every attention backend keeps.

A backend states what it refuses; asking for that raises a UserError. Masks are never approximated.

Legend: B batch, T query positions, S key positions (T = S), N query heads, K key/value heads (N a multiple of K), H head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class AttentionRequest:
    """The static facts a backend decides on."""

    platform: str
    """Of the devices that will run it: cpu, gpu (NVIDIA), rocm or tpu (see models.product.platform_of)."""
    dtype: jnp.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    causal: bool = True
    sliding_window: int | None = None
    packed: bool = True
    """Segment ids restrict who sees whom."""
    length: int | None = None
    """Tokens per row; None where it is not known yet (at construction of a model)."""


class Backend(Protocol):
    """One implementation of attention. It tags its result "attention_context" (see models/remat.py)."""

    @property
    def name(self) -> str:
        """What `compute.attention.backend` calls it."""

    @property
    def per_device(self) -> bool:
        """Whether XLA cannot cut its kernels over devices: it must be given what lies on one device."""

    def refusal(self, request: AttentionRequest) -> str | None:
        """Return why the request cannot be honoured, or None when it is supported."""

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BSKH: jax.Array,
        v_BSKH: jax.Array,
        segment_ids_BT: jax.Array | None,
        *,
        causal: bool,
        sliding_window: int | None,
        chunk: int,
    ) -> jax.Array:
        """Return softmax(q k^T / sqrt(H)) v under the mask, [B, T, N, H] in q's dtype; zeros where the segment is 0."""
