"""The one entry to attention, and the contract every backend keeps.

A backend states what it refuses; asking for that raises a UserError. Masks are never approximated.

Legend: B batch, T query positions, S key positions (T = S), N query heads, K key/value heads (N a multiple of K), H head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from configs.errors import UserError, unknown_name


@dataclass(frozen=True)
class AttentionRequest:
    """The static facts a backend decides on."""

    platform: str
    """Of the devices that will run it: cpu, gpu (NVIDIA), rocm or tpu (see models.decoder.platform_of)."""
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

    name: str

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


def _backends() -> dict[str, Backend]:
    from models.attention import chunked, cudnn, reference, xla

    return {backend.name: backend for backend in (reference.Reference(), xla.Xla(), chunked.Chunked(), cudnn.Cudnn())}


def backend_names() -> list[str]:
    """Return the names `compute.attention.backend` may take."""
    return ["auto", *_backends()]


def resolve_backend(name: str, request: AttentionRequest) -> Backend:
    """Return the backend called `name`, or for "auto" cudnn where it supports the request and chunked elsewhere.

    Raises UserError for an unknown name and for a request the named backend refuses.
    """
    backends = _backends()
    if name == "auto":
        return backends["chunked" if backends["cudnn"].refusal(request) else "cudnn"]
    if name not in backends:
        raise unknown_name("attention backend", name, backend_names())
    reason = backends[name].refusal(request)
    if reason is not None:
        able = [other for other, backend in backends.items() if backend.refusal(request) is None]
        raise UserError(f"compute.attention.backend: {name} {reason} (these can: {', '.join(able)})")
    return backends[name]


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    backend: str = "auto",
    chunk: int = 512,
    platform: str | None = None,
) -> jax.Array:
    """Scaled dot-product attention of rows against themselves.

    Shapes: q [B, T, N, H]; k, v [B, T, K, H] of the same dtype; segment_ids int32 [B, T] (0 = padding) or None for one document per row.
    Returns [B, T, N, H] in q's dtype; softmax in float32; padding gives zeros and no gradient.
    `platform` is that of the devices that will run it (default: JAX's default backend).
    Raises UserError when the backend does not support the request.
    """
    assert q_BTNH.shape[1] == k_BSKH.shape[1] and k_BSKH.shape == v_BSKH.shape, (q_BTNH.shape, k_BSKH.shape, v_BSKH.shape)
    assert q_BTNH.shape[2] % k_BSKH.shape[2] == 0, (q_BTNH.shape, k_BSKH.shape)
    request = AttentionRequest(
        platform=platform or jax.default_backend(),
        dtype=jnp.dtype(q_BTNH.dtype),
        head_dim=q_BTNH.shape[3],
        num_heads=q_BTNH.shape[2],
        num_kv_heads=k_BSKH.shape[2],
        causal=causal,
        sliding_window=sliding_window,
        packed=segment_ids is not None,
        length=q_BTNH.shape[1],
    )
    run = resolve_backend(backend, request)
    return run(q_BTNH, k_BSKH, v_BSKH, segment_ids, causal=causal, sliding_window=sliding_window, chunk=chunk)
