"""Attention behind one function: choose a backend by name, check that it supports the request, run it.

Legend: B batch, T query positions, S key positions (T = S), N query heads, K key/value heads (N a multiple of K), H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ridgeline.configs.errors import UserError, unknown_name
from ridgeline.configs.model_schema import ModelConfig
from ridgeline.configs.schema import AttentionConfig
from ridgeline.models.attention.chunked import Chunked
from ridgeline.models.attention.cudnn import Cudnn
from ridgeline.models.attention.interface import AttentionRequest, Backend
from ridgeline.models.attention.pallas import Pallas, RingKernel
from ridgeline.models.attention.reference import Reference
from ridgeline.models.attention.ring import Blockwise, Kernel, ring_attention
from ridgeline.models.attention.xla import Xla
from ridgeline.sharding.manual import on_shards
from ridgeline.sharding.partition import Partitioner
from ridgeline.sharding.rules import PIPELINE_AXIS, LogicalAxes

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Reference(), Xla(), Chunked(), Cudnn(), Pallas())}
QUERY_AXES = ("batch", "seq", "act_heads", None)
KEY_AXES = ("batch", "seq", "act_kv_heads", None)
CONTEXT_AXIS = "context"
OWN_VALUE_WIDTH = ("reference", "chunked")
"""Backends with heads of values narrower than those of queries and keys (latent attention); for the others values are padded."""
AUTO = ("cudnn", "pallas", "chunked")
"""Backends of `auto`, the fastest first; the last supports everything. The memory of each grows with T, not with T * T."""


def backend_names() -> list[str]:
    """Return the values that `compute.attention.backend` may have."""
    return ["auto", *BACKENDS]


def resolve_backend(name: str, request: AttentionRequest) -> Backend:
    """Return the backend called `name`, or for "auto" the first of AUTO that supports the request.

    Raises UserError for an unknown name and for a request that the named backend does not support.
    """
    if name == "auto":
        return next(BACKENDS[each] for each in AUTO if BACKENDS[each].refusal(request) is None)
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
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    backend: str = "auto",
    chunk: int = 512,
    platform: str | None = None,
) -> jax.Array:
    """Scaled dot-product attention of rows to themselves.

    Shapes: q [B, T, N, H]; k [B, T, K, H]; v [B, T, K, V] with V <= H, of the same dtype; segment_ids int32 [B, T] (0 = padding) or None
    for one document per row; sinks float32 [N]: a learned logit per head in the denominator of the softmax, or None.
    Returns [B, T, N, V] in q's dtype; softmax in float32; padding gives zeros and no gradient.
    `platform` is that of the devices that will run it (default: JAX's default backend).
    Raises UserError when the backend does not support the request.
    """
    assert q_BTNH.shape[1] == k_BSKH.shape[1] and k_BSKH.shape[:3] == v_BSKH.shape[:3], (q_BTNH.shape, k_BSKH.shape, v_BSKH.shape)
    assert q_BTNH.shape[2] % k_BSKH.shape[2] == 0, (q_BTNH.shape, k_BSKH.shape)
    request = AttentionRequest(
        platform=platform or jax.default_backend(),
        dtype=jnp.dtype(q_BTNH.dtype),
        head_dim=q_BTNH.shape[3],
        num_heads=q_BTNH.shape[2],
        num_kv_heads=k_BSKH.shape[2],
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks is not None,
        packed=segment_ids is not None,
        length=q_BTNH.shape[1],
    )
    run = resolve_backend(backend, request)
    v_BSKH, width = v_BSKH if run.name in OWN_VALUE_WIDTH else _as_wide(v_BSKH, k_BSKH), v_BSKH.shape[3]
    arrays = (q_BTNH, k_BSKH, v_BSKH, segment_ids)
    out_BTNH = run(*arrays, causal=causal, sliding_window=sliding_window, softcap=softcap, sinks_N=sinks, chunk=chunk)
    return out_BTNH[..., :width]


def _as_wide(v_BSKH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
    """Pad values with zeros to the width of keys."""
    missing = k_BSKH.shape[3] - v_BSKH.shape[3]
    return jnp.pad(v_BSKH, [(0, 0), (0, 0), (0, 0), (0, missing)]) if missing else v_BSKH


@dataclass(frozen=True)
class SelfAttention:
    """Causal attention of one model on one mesh, with a checked backend."""

    partitioner: Partitioner
    backend: str
    chunk: int
    request: AttentionRequest
    """Of the whole model; `packed` and `length` are those of a call."""

    @classmethod
    def resolve(
        cls, model: ModelConfig, config: AttentionConfig, platform: str, compute_dtype: jnp.dtype, partitioner: Partitioner
    ) -> SelfAttention:
        """Check a config. Raises UserError, before the first step is compiled, when the backend does not support the model."""
        # Chunks are segments (`masks.chunk_segments`); as a window their size tells backends which keys to skip.
        heads, kv_heads, window = model.num_heads, model.kv_heads, model.local_span
        request = AttentionRequest(
            platform,
            compute_dtype,
            model.head_width,
            heads,
            kv_heads,
            sliding_window=window,
            packed=False,
            softcap=model.attention_softcap,
            sinks=model.attention_sinks,
        )
        attention = cls(partitioner, config.backend, config.chunk, request)
        attention.resolved(packed=False)
        return attention

    def without_window(self) -> SelfAttention:
        """Return attention to all earlier tokens, for a model where only some layers have the window or chunks."""
        return replace(self, request=replace(self.request, sliding_window=None))

    def resolved(self, *, packed: bool) -> Backend:
        """Return the backend of packed rows, or of rows of one document. Raises UserError when it does not support them."""
        backend = resolve_backend(self.backend, replace(self.request, packed=packed))
        alike = self.partitioner.axis_size(QUERY_AXES[2]) == self.partitioner.axis_size(KEY_AXES[2])
        if alike or not self._per_device(backend):
            return backend
        if self.backend == "auto":
            return BACKENDS[AUTO[-1]]
        raise UserError(f"compute.attention.backend: {self.backend} needs queries and keys sharded alike over tensor (mesh.rules)")

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        segment_ids_BT: jax.Array | None,
        sinks_N: jax.Array | None = None,
    ) -> jax.Array:
        """Return [B, T, N, H]; arguments as `attend`."""
        arrays = (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N)
        if self.partitioner.mesh.shape[CONTEXT_AXIS] > 1:  # every device has the segment ids of its whole rows
            return self._on_shards(self._over_context, arrays, ("batch", None))
        backend, request = self.resolved(packed=segment_ids_BT is not None), self.request
        run = partial(
            attend,
            sliding_window=request.sliding_window,
            softcap=request.softcap,
            backend=backend.name,
            chunk=self.chunk,
            platform=request.platform,
        )
        # XLA cannot partition the kernels of some backends: they run under shard_map on the rows and heads of one device.
        if not self._per_device(backend) or self.partitioner.mesh.size == 1:
            return run(q_BTNH, k_BTKH, v_BTKH, segment_ids=segment_ids_BT, sinks=sinks_N)

        def one_device(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids_BT: jax.Array | None, sinks_N: jax.Array | None) -> jax.Array:
            return run(q, k, v, segment_ids=segment_ids_BT, sinks=sinks_N)

        return self._on_shards(one_device, arrays, ("batch", "seq"))

    def _per_device(self, backend: Backend) -> bool:
        return backend.per_device_in_stages if self.partitioner.mesh.shape[PIPELINE_AXIS] > 1 else backend.per_device

    def _over_context(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids_BT: jax.Array | None, sinks_N: jax.Array | None
    ) -> jax.Array:
        """Return attention of this device's tokens to rows whose sequence is sharded (inside `on_shards`)."""
        window = self.request.sliding_window
        if self.partitioner.zigzag:
            return ring_attention(self._ring_kernel(), q, k, _as_wide(v, k), segment_ids_BT, window, sinks_N)[..., : v.shape[3]]
        exchange = partial(jax.lax.all_to_all, axis_name=CONTEXT_AXIS, tiled=True)
        q, k, v = (exchange(x, split_axis=2, concat_axis=1) for x in (q, k, v))  # all tokens of some heads
        if sinks_N is not None:
            sinks_N = jax.lax.dynamic_slice_in_dim(sinks_N, jax.lax.axis_index(CONTEXT_AXIS) * q.shape[2], q.shape[2])
        backend, platform = self.resolved(packed=segment_ids_BT is not None).name, self.request.platform
        run = partial(attend, sliding_window=window, softcap=self.request.softcap, backend=backend, chunk=self.chunk, platform=platform)
        out = run(q, k, v, segment_ids=segment_ids_BT, sinks=sinks_N)
        gathered: jax.Array = exchange(out, split_axis=1, concat_axis=2)
        return gathered

    def _ring_kernel(self) -> Kernel:
        """Return the kernel of ring attention: Pallas where the backend allows it and supports the model, else plain XLA."""
        if self.backend != "chunked" and BACKENDS["pallas"].refusal(self.request) is None:
            return RingKernel(interpret=getattr(BACKENDS["pallas"], "interpret", False))
        return Blockwise(self.chunk)

    def _on_shards(self, fn: Callable[..., jax.Array], arrays: Sequence[jax.Array | None], row_axes: LogicalAxes) -> jax.Array:
        """Run on the shards of each device: queries, keys, values and, where there are any, segment ids and sinks; return [B, T, N, H]."""
        q, k, row, sinks = (self._spec(axes) for axes in (QUERY_AXES, KEY_AXES, row_axes, QUERY_AXES[2:3]))
        specs = [None if array is None else spec for array, spec in zip(arrays, (q, k, k, row, sinks), strict=True)]
        out: jax.Array = on_shards(self.partitioner, fn, tuple(specs), q)(*arrays)
        return out

    def _spec(self, axes: LogicalAxes) -> PartitionSpec:
        """Return the spec, with the mesh axes of one device on the first dim: a gradient is reduced over all axes that are not in it."""
        first, *rest = self.partitioner.spec(axes)
        groups = [(entry,) if isinstance(entry, str) else entry or () for entry in (first, *rest)]
        single = (axis for axis, size in self.partitioner.mesh.shape.items() if size == 1 and all(axis not in group for group in groups))
        return PartitionSpec((*groups[0], *single), *rest)
