"""The attention half of a block: projections, head norms, rotation, `attend`, output projection.

Legend: B batch, T sequence, D embed width, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import AttentionConfig, ModelConfig
from ridgeline.models.attention.dispatch import attend, resolve_backend
from ridgeline.models.attention.interface import AttentionRequest
from ridgeline.models.norms import Prepare, RMSNorm, unprepared
from ridgeline.models.params import ParamFactory
from ridgeline.models.projection import Projector
from ridgeline.models.remat import Remat
from ridgeline.models.rope import apply_rotary
from ridgeline.sharding.manual import on_shards

RotaryTable = tuple[jax.Array, jax.Array]
AttendWith = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Rotated q [B, T, N, H] and k, v [B, T, K, H] -> context [B, T, N, H]."""

QUERY_AXES = ("batch", "seq", "act_heads", None)
KEY_AXES = ("batch", "seq", "act_kv_heads", None)


class Attention(nnx.Module):
    """Grouped-query self-attention (arXiv 2305.13245)."""

    def __init__(
        self,
        model: ModelConfig,
        config: AttentionConfig,
        remat: Remat,
        platform: str,
        residual_std: float,
        make: ParamFactory,
        projector: Projector,
    ) -> None:
        width, head = model.embed_dim, model.head_width
        heads, kv_heads, std = model.num_heads, model.kv_heads, model.init_std
        self.query = make.normal((width, heads, head), ("embed", "heads", "head_dim"), std)
        self.key = make.normal((width, kv_heads, head), ("embed", "kv_heads", "head_dim"), std)
        self.value = make.normal((width, kv_heads, head), ("embed", "kv_heads", "head_dim"), std)
        self.out = make.normal((heads, head, width), ("heads", "head_dim", "embed"), residual_std)
        bias = model.attention_bias
        self.query_bias = make.constant((heads, head), ("heads", "head_dim"), 0.0) if bias else None
        self.key_bias = make.constant((kv_heads, head), ("kv_heads", "head_dim"), 0.0) if bias else None
        self.value_bias = make.constant((kv_heads, head), ("kv_heads", "head_dim"), 0.0) if bias else None
        self.out_bias = make.constant((width,), ("norm",), 0.0) if model.output_bias else None
        self.query_norm = RMSNorm(head, model.norm_eps, make, projector.partitioner, "head_dim") if model.qk_norm else None
        self.key_norm = RMSNorm(head, model.norm_eps, make, projector.partitioner, "head_dim") if model.qk_norm else None
        self.input_recent, self.out_recent = make.recent(3), make.recent()
        self.project = projector
        self.remat = remat
        self.attend_options = (config.backend, config.chunk, model.sliding_window, platform)
        request = AttentionRequest(platform, projector.compute_dtype, head, heads, kv_heads, True, model.sliding_window, True)
        self.per_device = resolve_backend(config.backend, request).per_device  # refuses at construction, not in the first step
        if self.per_device and len({projector.partitioner.axis_size(axes[2]) for axes in (QUERY_AXES, KEY_AXES)}) > 1:
            raise UserError(f"compute.attention.backend: {config.backend} needs queries and keys cut alike over tensor (mesh.rules)")

    def __call__(
        self,
        x_BTD: jax.Array,
        rotary: RotaryTable | None,
        segment_ids_BT: jax.Array | None,
        attend_with: AttendWith | None = None,
        prepare: Prepare = unprepared,
    ) -> jax.Array:
        """Map prepare(x), which is the normed input, to the residual update, same shape and dtype.

        `attend_with` replaces attention over the row itself (decoding attends to a cache).
        """
        backend, chunk, window, platform = self.attend_options

        def project(x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            kernels = (self.query, self.key, self.value)
            q_BTNH, k_BTKH, v_BTKH = self.project.several(["btd,dnh->btnh"] * 3, prepare(x_BTD), kernels, self.input_recent)
            return (
                self._heads(q_BTNH, self.query_bias, "act_heads"),
                self._heads(k_BTKH, self.key_bias, "act_kv_heads"),
                self._heads(v_BTKH, self.value_bias, "act_kv_heads"),
            )

        q_BTNH, k_BTKH, v_BTKH = self.remat.wrap_products(project)(x_BTD)
        q_BTNH = checkpoint_name(self._turned(q_BTNH, self.query_norm, rotary), "query")
        k_BTKH = checkpoint_name(self._turned(k_BTKH, self.key_norm, rotary), "key")
        v_BTKH = checkpoint_name(v_BTKH, "value")

        def run(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
            call = partial(attend, sliding_window=window, backend=backend, chunk=chunk, platform=platform)
            return self._over_devices(call)(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)

        context_BTNH = (attend_with or self.remat.wrap_attention(run))(q_BTNH, k_BTKH, v_BTKH)
        context_BTNH = self.project.partitioner.constrain(context_BTNH, "batch", "seq", "act_heads", None)
        return self.project.add_bias(self.project("btnh,nhd->btd", context_BTNH, self.out, self.out_recent), self.out_bias)

    def _over_devices(self, call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Give a backend whose kernels XLA cannot cut the rows and heads of one device."""
        partitioner = self.project.partitioner
        if not self.per_device or partitioner.mesh.size == 1:
            return lambda q, k, v, segment_ids: call(q, k, v, segment_ids=segment_ids)
        q, k, row = (partitioner.spec(axes) for axes in (QUERY_AXES, KEY_AXES, ("batch", "seq")))

        def one_device(q: jax.Array, k: jax.Array, v: jax.Array, *segment_ids: jax.Array) -> jax.Array:
            return call(q, k, v, segment_ids=segment_ids[0] if segment_ids else None)

        def run(*arrays: jax.Array | None) -> jax.Array:
            given = [x for x in arrays if x is not None]
            out: jax.Array = on_shards(partitioner, one_device, (q, k, k, row)[: len(given)], q)(*given)
            return out

        return run

    def _heads(self, x_BTNH: jax.Array, bias: nnx.Param | None, axis: str) -> jax.Array:
        return self.project.partitioner.constrain(self.project.add_bias(x_BTNH, bias), "batch", "seq", axis, None)

    def _turned(self, x_BTNH: jax.Array, norm: RMSNorm | None, rotary: RotaryTable | None) -> jax.Array:
        if norm is not None:
            x_BTNH = norm(x_BTNH)
        return x_BTNH if rotary is None else apply_rotary(x_BTNH, rotary)
