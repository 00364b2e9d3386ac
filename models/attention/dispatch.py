"""The one entry to attention: from a backend's name to its result.

Legend: B batch, T query positions, S key positions (T = S), N query heads, K key/value heads (N a multiple of K), H head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.models.attention.chunked import Chunked
from ridgeline.models.attention.cudnn import Cudnn
from ridgeline.models.attention.interface import AttentionRequest, Backend
from ridgeline.models.attention.pallas import Pallas
from ridgeline.models.attention.reference import Reference
from ridgeline.models.attention.xla import Xla

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Reference(), Xla(), Chunked(), Cudnn(), Pallas())}


def backend_names() -> list[str]:
    """Return the names `compute.attention.backend` may take."""
    return ["auto", *BACKENDS]


def resolve_backend(name: str, request: AttentionRequest) -> Backend:
    """Return the backend called `name`, or for "auto" cudnn where it supports the request and chunked elsewhere.

    Raises UserError for an unknown name and for a request the named backend refuses.
    """
    if name == "auto":
        return BACKENDS["chunked" if BACKENDS["cudnn"].refusal(request) else "cudnn"]
    if name not in BACKENDS:
        raise unknown_name("attention backend", name, backend_names())
    reason = BACKENDS[name].refusal(request)
    if reason is not None:
        able = [other for other, backend in BACKENDS.items() if backend.refusal(request) is None]
        raise UserError(f"compute.attention.backend: {name} {reason} (these can: {', '.join(able)})")
    return BACKENDS[name]


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
