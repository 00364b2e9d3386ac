"""Rotary position embedding (arXiv 2104.09864), of whole heads or of their first dims, with the scalings linear, llama3 and yarn.

Dim i of R rotated dims is paired with dim i + R/2 ("rotate half") or, interleaved, dim 2i with 2i + 1: the layouts of Hugging Face
checkpoints, so weights map without permutation.

Legend: B batch, T sequence, N heads, H head width, R rotated dims, P = R/2 pairs.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from ridgeline.configs.model_schema import AttentionTemperature, RopeScaling

RotaryTable = tuple[jax.Array, jax.Array]
"""(cos, sin) of every position and pair, float32 [B, T, P] each."""
YARN_BETA_FAST = 32.0
"""Pairs with more turns than this over the original context keep their frequency (arXiv 2309.00071, section 3.2)."""
YARN_BETA_SLOW = 1.0
"""Pairs with fewer turns than this over the original context are interpolated fully."""


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Return the angle per position of each pair, float64 [P], with the `scaling` applied."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    rules = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
    return rules[scaling.kind](frequencies, head_dim, theta, scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor on the rotated dims of queries and keys: 1, or yarn's 0.1 ln(factor) + 1 (arXiv 2309.00071, equation 22).

    DeepSeek's has two factors instead, of which it divides one out again: see `score_factor`.
    """
    if scaling is not None and scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _yarn_factor(scaling, scaling.mscale) / _yarn_factor(scaling, scaling.mscale_all_dim)
    return _yarn_factor(scaling, 1.0)


def score_factor(scaling: RopeScaling | None) -> float:
    """Return the factor on attention scores of latent attention: 1, or yarn's (0.1 mscale_all_dim ln(factor) + 1)^2."""
    return 1.0 if scaling is None or scaling.mscale_all_dim is None else _yarn_factor(scaling, scaling.mscale_all_dim) ** 2


def _yarn_factor(scaling: RopeScaling | None, mscale: float) -> float:
    if scaling is None or scaling.kind != "yarn" or scaling.factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(scaling.factor) + 1.0


def _linear(frequencies: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    return frequencies / scaling.factor


def _llama3(frequencies: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Divide low frequencies by the factor, keep high ones, interpolate linearly between (the rule published with Llama 3.1).

    With equal bounds (Llama 4) nothing is between.
    """
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    if scaling.low_freq_factor == scaling.high_freq_factor:
        return np.where(turns < scaling.low_freq_factor, frequencies / scaling.factor, frequencies)
    keep = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn(frequencies: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Interpolate by parts: a ramp over the pair index between the pairs with beta_fast and beta_slow turns."""

    def pair_turning(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_turning(YARN_BETA_FAST), pair_turning(YARN_BETA_SLOW)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
    return frequencies * (1 - ramp) + frequencies / scaling.factor * ramp


def rotary_table(positions_BT: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None) -> RotaryTable:
    """Return (cos, sin) of every position and pair, float32 [B, T, P], with yarn's attention factor applied."""
    frequencies_P = jnp.asarray(inverse_frequencies(head_dim, theta, scaling), jnp.float32)
    angles_BTP = positions_BT[..., None].astype(jnp.float32) * frequencies_P
    factor = attention_factor(scaling)
    return jnp.cos(angles_BTP) * factor, jnp.sin(angles_BTP) * factor


def tempered(q_BTNH: jax.Array, positions_BT: jax.Array, temperature: AttentionTemperature | None) -> jax.Array:
    """Return queries times their factor by position (model.attention_temperature), in their dtype."""
    if temperature is None:
        return q_BTNH
    intervals_BT = (positions_BT + 1) // temperature.interval
    factor_BT = 1 + temperature.scale * jnp.log1p(intervals_BT.astype(jnp.float32))
    return (q_BTNH.astype(jnp.float32) * factor_BT[..., None, None]).astype(q_BTNH.dtype)


def apply_rotary(x_BTNH: jax.Array, table: RotaryTable, *, interleaved: bool = False) -> jax.Array:
    """Rotate the first dims of every head, as many as the table has, by its position; computed in float32, returned in x's dtype."""
    cos, sin = table[0][:, :, None, :], table[1][:, :, None, :]
    rotated_dims = 2 * cos.shape[-1]
    x = x_BTNH[..., :rotated_dims].astype(jnp.float32)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    sides = [first * cos - second * sin, second * cos + first * sin]
    rotated = jnp.stack(sides, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(sides, axis=-1)
    rotated = rotated.astype(x_BTNH.dtype)
    return rotated if rotated_dims == x_BTNH.shape[-1] else jnp.concatenate([rotated, x_BTNH[..., rotated_dims:]], axis=-1)
