"""The attention of a block: query, key and value projections, head norms, rotary embedding, attention, output projection.

Legend: B batch, T sequence, D embed width, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ridgeline.configs.model_schema import ModelConfig
from ridgeline.models.lora import adapters_of, make_adapters
from ridgeline.models.mup import matrix_std
from ridgeline.models.norms import RMSNorm, RMSNorm1p, unit_rms
from ridgeline.models.parallelize import Execution
from ridgeline.models.params import ParamFactory
from ridgeline.models.rope import RotaryTable, apply_rotary

AttendWith = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""Rotated q [B, T, N, H], k and v [B, T, K, H], and the sinks [N] of a model that has them -> context [B, T, N, H]."""


class Attention(nnx.Module):
    """Grouped-query self-attention (arXiv 2305.13245)."""

    def __init__(self, model: ModelConfig, execution: Execution, residual_std: float, make: ParamFactory) -> None:
        width, head = model.embed_dim, model.head_width
        heads, kv_heads, std = model.num_heads, model.kv_heads, matrix_std(model)
        self.query = make.matrix((width, heads, head), ("embed", "heads", "head_dim"), std)
        self.key = make.matrix((width, kv_heads, head), ("embed", "kv_heads", "head_dim"), std)
        self.value = make.matrix((width, kv_heads, head), ("embed", "kv_heads", "head_dim"), std)
        self.out = make.matrix((heads, head, width), ("heads", "head_dim", "embed"), residual_std)
        bias = model.attention_bias
        self.query_bias = make.constant((heads, head), ("heads", "head_dim"), 0.0) if bias else None
        self.key_bias = make.constant((kv_heads, head), ("kv_heads", "head_dim"), 0.0) if bias else None
        self.value_bias = make.constant((kv_heads, head), ("kv_heads", "head_dim"), 0.0) if bias else None
        self.out_bias = make.constant((width,), ("norm",), 0.0) if model.output_bias else None
        self.sinks = make.normal((heads,), ("heads",), model.init_std) if model.attention_sinks else None
        scaled_norms = model.qk_norm and model.qk_norm_scale
        self.query_norm = _head_norm(model, heads, "heads", execution, make) if scaled_norms else None
        self.key_norm = _head_norm(model, kv_heads, "kv_heads", execution, make) if scaled_norms else None
        self.unit_eps = model.norm_eps if model.qk_norm and not model.qk_norm_scale else None
        self.adapters = make_adapters(make, query=self.query, key=self.key, value=self.value, out=self.out)
        # Backends divide scores by sqrt(head width); queries are multiplied by what remains.
        self.query_scale = model.query_scale
        self.rope_interleaved = model.rope_interleaved
        self.input_recent, self.out_recent = make.amax(3), make.amax()
        self.execution = execution

    def __call__(
        self,
        x_BTD: jax.Array,
        norm: Callable[[jax.Array], jax.Array],
        rotary: RotaryTable | None,
        segment_ids_BT: jax.Array | None,
        attend_with: AttendWith | None = None,
    ) -> jax.Array:
        """Map the residual stream to its update by attention over norm(x), same shape and dtype.

        `attend_with` replaces attention of the row to itself (decoding attends to a cache).
        """
        matmul = self.execution.matmul

        def project(x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            kernels = (self.query, self.key, self.value)
            adapters = adapters_of(self.adapters, "query", "key", "value")
            q_BTNH, k_BTKH, v_BTKH = matmul.shared(["btd,dnh->btnh"] * 3, x_BTD, kernels, self.input_recent, adapters)
            return (
                self._heads(q_BTNH, self.query_bias, "act_heads"),
                self._heads(k_BTKH, self.key_bias, "act_kv_heads"),
                self._heads(v_BTKH, self.value_bias, "act_kv_heads"),
            )

        q_BTNH, k_BTKH, v_BTKH = self.execution.after_norm(norm, project, x_BTD)
        q_BTNH = checkpoint_name(self._rotated(q_BTNH, self.query_norm, rotary, self.query_scale), "query")
        k_BTKH = checkpoint_name(self._rotated(k_BTKH, self.key_norm, rotary), "key")
        v_BTKH = checkpoint_name(v_BTKH, "value")
        sinks_N = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        if attend_with is not None:
            context_BTNH = attend_with(q_BTNH, k_BTKH, v_BTKH, sinks_N)
        else:
            context_BTNH = self.execution.attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N)
        context_BTNH = self.execution.partitioner.constrain(context_BTNH, "batch", "seq", "act_heads", None)
        adapters = adapters_of(self.adapters, "out")
        return matmul.add_bias(matmul("btnh,nhd->btd", context_BTNH, self.out, self.out_recent, adapters), self.out_bias)

    def _heads(self, x_BTNH: jax.Array, bias: nnx.Param | None, axis: str) -> jax.Array:
        return self.execution.partitioner.constrain(self.execution.matmul.add_bias(x_BTNH, bias), "batch", "seq", axis, None)

    def _rotated(self, x_BTNH: jax.Array, norm: RMSNorm | None, rotary: RotaryTable | None, scale: float = 1.0) -> jax.Array:
        if norm is not None:
            x_BTNH = norm(x_BTNH)
        if self.unit_eps is not None and rotary is not None:
            x_BTNH = unit_rms(x_BTNH, self.unit_eps)
        if scale != 1.0:
            x_BTNH = (x_BTNH.astype(jnp.float32) * scale).astype(x_BTNH.dtype)
        return x_BTNH if rotary is None else apply_rotary(x_BTNH, rotary, interleaved=self.rope_interleaved)


def _head_norm(model: ModelConfig, heads: int, axis: str, execution: Execution, make: ParamFactory) -> RMSNorm:
    """Return the norm of queries or keys: of each head, or of all heads together."""
    kind = RMSNorm1p if model.norm == "rmsnorm_1p" else RMSNorm
    if model.qk_norm_dims == "head":
        return kind(model.head_width, model.norm_eps, make, execution.partitioner, ("head_dim",), ("batch", "seq", f"act_{axis}"))
    return kind((heads, model.head_width), model.norm_eps, make, execution.partitioner, (axis, "head_dim"), ("batch", "seq"))
