"""Attention through cuDNN's fused flash kernels (`jax.nn.dot_product_attention(implementation="cudnn")`).

The kernel supports causal masks and causal sliding windows. Its public interface has no packing (jax 0.10 - 0.12) but as a mask of T * T
elements per row, so packed rows are refused. Its private one limits the segments of a row at compile time and keeps float32 statistics of
[B * segments, N, T]; any packing within a row may be trained here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ridgeline.models.attention.interface import NO_SINKS, NO_SOFTCAP, AttentionRequest

MAX_HEAD_DIM = 128
"""Widest head on every supported GPU; 256 needs Hopper, which is unknown when compiling ahead of time."""


class Cudnn:
    """cuDNN flash attention: NVIDIA GPUs, 16-bit dtypes, head width a multiple of 8."""

    name = "cudnn"
    per_device = False
    per_device_in_stages = True  # JAX partitions it over shardings with named axes, which are gone in a partly manual program

    def refusal(self, request: AttentionRequest) -> str | None:
        """Return why the kernels do not support the request, or None."""
        if request.softcap is not None:
            return NO_SOFTCAP
        if request.sinks:
            return NO_SINKS
        if request.platform not in ("gpu", "cuda"):  # gpu in JAX, cuda in a compile-only topology
            return f"runs on NVIDIA GPUs only, and the devices are {request.platform}"
        if request.dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
            return f"computes in bfloat16 or float16 only, not {request.dtype.name} (precision.compute)"
        if request.head_dim % 8 or request.head_dim > MAX_HEAD_DIM:
            return f"needs a head width that is a multiple of 8 and at most {MAX_HEAD_DIM}, not {request.head_dim}"
        if request.sliding_window is not None and not request.causal:
            return "supports a sliding window only with a causal mask"
        if request.packed:
            return "supports no packed documents (data.document_masking)"
        return None

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
        assert segment_ids_BT is None
        # JAX's window excludes the query itself, ours includes it.
        window = None if sliding_window is None else (sliding_window - 1, 0)
        out = jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=causal, local_window_size=window, implementation="cudnn")
        return checkpoint_name(out, "attention_context")
