"""Attention behind one function: choose a backend by name, check that it supports the request, run it.

Legend: B batch, T query positions, S key positions (T = S), N query heads, K key/value heads (N a multiple of K), H head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.configs.schema import AttentionConfig, ModelConfig
from ridgeline.models.attention.chunked import Chunked
from ridgeline.models.attention.cudnn import Cudnn
from ridgeline.models.attention.interface import AttentionRequest, Backend
from ridgeline.models.attention.pallas import Pallas
from ridgeline.models.attention.reference import Reference
from ridgeline.models.attention.xla import Xla
from ridgeline.sharding.manual import on_shards
from ridgeline.sharding.partition import Partitioner

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Reference(), Xla(), Chunked(), Cudnn(), Pallas())}
QUERY_AXES = ("batch", "seq", "act_heads", None)
KEY_AXES = ("batch", "seq", "act_kv_heads", None)


def backend_names() -> list[str]:
    """Return the values that `compute.attention.backend` may have."""
    return ["auto", *BACKENDS]


def resolve_backend(name: str, request: AttentionRequest) -> Backend:
    """Return the backend called `name`, or for "auto" cudnn where it supports the request and chunked elsewhere.

    Raises UserError for an unknown name and for a request that the named backend does not support.
    """
    if name == "auto":
        return BACKENDS["chunked" if BACKENDS["cudnn"].refusal(request) else "cudnn"]
    if name not in BACKENDS:
        raise unknown_name("attention backend", name, backend_names())
    reason = BACKENDS[name].refusal(request)
    if reason is not None:
        supported = [other for other, backend in BACKENDS.items() if backend.refusal(request) is None]
        raise UserError(f"compute.attention.backend: {name} {reason} (supported here: {', '.join(supported)})")
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
    """Scaled dot-product attention of rows to themselves.

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


@dataclass(frozen=True)
class SelfAttention:
    """Causal attention of one model on one mesh, with a checked backend."""

    partitioner: Partitioner
    backend: str
    chunk: int
    sliding_window: int | None
    platform: str
    per_device: bool
    """XLA cannot partition the backend's kernels: it runs under shard_map on the rows and heads of one device."""

    @classmethod
    def resolve(
        cls, model: ModelConfig, config: AttentionConfig, platform: str, compute_dtype: jnp.dtype, partitioner: Partitioner
    ) -> SelfAttention:
        """Check a config. Raises UserError, before the first step is compiled, when the backend does not support the model."""
        heads, kv_heads, window = model.num_heads, model.kv_heads, model.sliding_window
        request = AttentionRequest(platform, compute_dtype, model.head_width, heads, kv_heads, True, window, True)
        per_device = resolve_backend(config.backend, request).per_device
        if per_device and partitioner.axis_size(QUERY_AXES[2]) != partitioner.axis_size(KEY_AXES[2]):
            raise UserError(f"compute.attention.backend: {config.backend} needs queries and keys sharded alike over tensor (mesh.rules)")
        return cls(partitioner, config.backend, config.chunk, window, platform, per_device)

    def __call__(self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
        """Return [B, T, N, H]; arguments as `attend`."""
        run = partial(attend, sliding_window=self.sliding_window, backend=self.backend, chunk=self.chunk, platform=self.platform)
        if not self.per_device or self.partitioner.mesh.size == 1:
            return run(q_BTNH, k_BTKH, v_BTKH, segment_ids=segment_ids_BT)

        def one_device(q: jax.Array, k: jax.Array, v: jax.Array, *segment_ids: jax.Array) -> jax.Array:
            return run(q, k, v, segment_ids=segment_ids[0] if segment_ids else None)

        q, k, row = (self.partitioner.spec(axes) for axes in (QUERY_AXES, KEY_AXES, ("batch", "seq")))
        arrays = [x for x in (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) if x is not None]
        out: jax.Array = on_shards(self.partitioner, one_device, (q, k, k, row)[: len(arrays)], q)(*arrays)
        return out
