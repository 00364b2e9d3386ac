"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1): keys and values are projections of one latent per token.

A latent is computed where the residual stream is, sharded along the sequence over `tensor`, and gathered in place of the stream, which is
wider. Keys and values of all heads are formed from it for attention, so every attention backend runs. Each head of queries and keys has
dims without positions, followed by dims with rotary positions; the latter are one vector per token in the keys of all heads.

Legend: B batch, T sequence, D embed width, R width of a latent, N heads, H width of query and key heads, C of it without positions,
P of it with positions, V width of value heads.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.attention.layer import AttendWith
from ridgeline.models.lora import adapters_of, make_adapters
from ridgeline.models.norms import RMSNorm
from ridgeline.models.parallelize import Execution
from ridgeline.models.params import ParamFactory
from ridgeline.models.rope import RotaryTable, apply_rotary, score_factor

LATENT_NORM_EPS = 1e-6
"""Added to the variance in the norms of latents, whatever model.norm_eps is (as in the published code and in transformers)."""


class LatentSelfAttention(nnx.Module):
    """Attention with low-rank projections of keys and values, and of queries where model.latent_attention.q_rank is set.

    The input dim of an up-projection is a latent; its logical axis is `embed`, as that of every other matrix, so that fsdp shards it.
    """

    def __init__(self, model: ModelConfig, execution: Execution, residual_std: float, make: ParamFactory) -> None:
        latent = model.latent_attention
        assert latent is not None
        width, heads, std, partitioner = model.embed_dim, model.num_heads, model.init_std, execution.partitioner
        self.query_down = make.matrix((width, latent.q_rank), ("embed", "latent"), std) if latent.q_rank else None
        self.query_norm = RMSNorm(latent.q_rank, LATENT_NORM_EPS, make, partitioner) if latent.q_rank else None
        self.query = make.matrix((latent.q_rank or width, heads, model.head_width), ("embed", "heads", "head_dim"), std)
        self.key_value_down = make.matrix((width, latent.kv_rank + latent.rope_dim), ("embed", "latent"), std)
        self.key_value_norm = RMSNorm(latent.kv_rank, LATENT_NORM_EPS, make, partitioner)
        shape = (latent.kv_rank, heads, latent.nope_dim + latent.value_dim)
        self.key_value = make.matrix(shape, ("embed", "kv_heads", "head_dim"), std)
        self.out = make.matrix((heads, latent.value_dim, width), ("heads", "head_dim", "embed"), residual_std)
        self.adapters = make_adapters(
            make,
            query_down=self.query_down,
            query=self.query,
            key_value_down=self.key_value_down,
            key_value=self.key_value,
            out=self.out,
        )
        self.down_recent, self.query_recent, self.key_value_recent = make.amax(1 + bool(latent.q_rank)), make.amax(), make.amax()
        self.out_recent = make.amax()
        self.latent, self.execution, self.rope_interleaved = latent, execution, model.rope_interleaved
        self.score_factor = score_factor(model.rope_scaling)

    def __call__(
        self,
        x_BTD: jax.Array,
        norm: Callable[[jax.Array], jax.Array],
        rotary: RotaryTable | None,
        segment_ids_BT: jax.Array | None,
        attend_with: AttendWith | None = None,
    ) -> jax.Array:
        """Map the residual stream to its update by attention over norm(x), same shape and dtype; `attend_with` as in `Attention`."""
        execution, partitioner = self.execution, self.execution.partitioner
        matmul = execution.matmul
        assert rotary is not None

        def on_shards(x_BTR: jax.Array) -> jax.Array:
            return partitioner.constrain(x_BTR, "batch", "residual_seq", None)

        def compress(x_BTD: jax.Array) -> list[jax.Array]:
            kernels = [kernel for kernel in (self.key_value_down, self.query_down) if kernel is not None]
            adapters = adapters_of(self.adapters, "key_value_down", "query_down")[: len(kernels)]
            ys = matmul.shared(["btd,dr->btr"] * len(kernels), on_shards(norm(x_BTD)), kernels, self.down_recent, adapters)
            return [on_shards(y) for y in ys]

        def inputs(arrays: list[jax.Array]) -> tuple[jax.Array, ...]:
            """Return what the queries are projected from, the latent of keys and values, and the dims of the keys to be rotated."""
            kv_BTR, source = arrays
            queries = norm(source) if self.query_norm is None else self.query_norm(source)
            latent_BTR, rope_BTP = kv_BTR[..., : self.latent.kv_rank], kv_BTR[..., self.latent.kv_rank :]
            return queries, self.key_value_norm(latent_BTR), rope_BTP

        def expand(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            queries, latent_BTR, rope_BTP = arrays
            q_BTNH = matmul("btd,dnh->btnh", queries, self.query, self.query_recent, adapters_of(self.adapters, "query"))
            adapters = adapters_of(self.adapters, "key_value")
            kv_BTNH = matmul("btd,dnh->btnh", latent_BTR, self.key_value, self.key_value_recent, adapters)
            q_BTNH = partitioner.constrain(q_BTNH, "batch", "seq", "act_heads", None)
            return q_BTNH, partitioner.constrain(kv_BTNH, "batch", "seq", "act_kv_heads", None), rope_BTP

        latents = execution.remat.wrap_matmuls(compress)(x_BTD)
        sources = latents if self.query_down is not None else [*latents, x_BTD]
        q_BTNH, kv_BTNH, rope_BTP = execution.after_norm(inputs, expand, sources)
        q_BTNH = checkpoint_name(self._queries(q_BTNH, rotary), "query")
        rope_BT1P = apply_rotary(rope_BTP[:, :, None], rotary, interleaved=self.rope_interleaved)
        k_BTNH = checkpoint_name(self._keys(kv_BTNH, rope_BT1P), "key")
        v_BTNV = checkpoint_name(kv_BTNH[..., self.latent.nope_dim :], "value")
        if attend_with is not None:
            context_BTNV = attend_with(q_BTNH, k_BTNH, v_BTNV, None)
        else:
            context_BTNV = execution.attend(q_BTNH, k_BTNH, v_BTNV, segment_ids_BT)
        context_BTNV = partitioner.constrain(context_BTNV, "batch", "seq", "act_heads", None)
        adapters = adapters_of(self.adapters, "out")
        update: jax.Array = execution.after_attention("btnh,nhd->btd", context_BTNV, self.out, self.out_recent, adapters)
        return update

    def _queries(self, q_BTNH: jax.Array, rotary: RotaryTable) -> jax.Array:
        """Return the queries with the last dims rotated, times the factor on the scores."""
        q_BTNC, q_BTNP = q_BTNH[..., : self.latent.nope_dim], q_BTNH[..., self.latent.nope_dim :]
        if self.score_factor != 1:
            q_BTNC = (q_BTNC.astype(jnp.float32) * self.score_factor).astype(q_BTNH.dtype)
            rotary = rotary[0] * self.score_factor, rotary[1] * self.score_factor
        return jnp.concatenate([q_BTNC, apply_rotary(q_BTNP, rotary, interleaved=self.rope_interleaved)], axis=-1)

    def _keys(self, kv_BTNH: jax.Array, rope_BT1P: jax.Array) -> jax.Array:
        """Return the keys of all heads: dims of their own, then the rotated ones, which all share."""
        k_BTNC = kv_BTNH[..., : self.latent.nope_dim]
        shared_BTNP = jnp.broadcast_to(rope_BT1P, (*k_BTNC.shape[:3], rope_BT1P.shape[-1]))
        k_BTNH = jnp.concatenate([k_BTNC, shared_BTNP], axis=-1)
        return self.execution.partitioner.constrain(k_BTNH, "batch", "seq", "act_kv_heads", None)
