"""Rotary position embedding (arXiv 2104.09864) in the "rotate half" layout, with the scalings linear, llama3 and yarn.

Dim i of a head is paired with dim i + H/2, the layout Hugging Face checkpoints use, so weights map without permutation.

Legend: B batch, T sequence, N heads, H head width, P = H/2 rotated pairs.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from ridgeline.configs.schema import RopeScaling

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
    """Return the factor on queries and keys: 1, or yarn's 0.1 ln(factor) + 1 (arXiv 2309.00071, equation 22)."""
    if scaling is None or scaling.kind != "yarn" or scaling.factor <= 1:
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1.0


def _linear(frequencies: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    return frequencies / scaling.factor


def _llama3(frequencies: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Divide low frequencies by the factor, keep high ones, interpolate linearly between (the rule published with Llama 3.1)."""
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    keep = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn(frequencies: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Interpolate by parts: a ramp over the pair index between the pairs with beta_fast and beta_slow turns."""

    def pair_turning(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_turning(YARN_BETA_FAST)), 0)
    last = min(math.ceil(pair_turning(YARN_BETA_SLOW)), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
    return frequencies * (1 - ramp) + frequencies / scaling.factor * ramp


def rotary_table(positions_BT: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None) -> RotaryTable:
    """Return (cos, sin) of every position and pair, float32 [B, T, P], with yarn's attention factor applied."""
    frequencies_P = jnp.asarray(inverse_frequencies(head_dim, theta, scaling), jnp.float32)
    angles_BTP = positions_BT[..., None].astype(jnp.float32) * frequencies_P
    factor = attention_factor(scaling)
    return jnp.cos(angles_BTP) * factor, jnp.sin(angles_BTP) * factor


def apply_rotary(x_BTNH: jax.Array, table: RotaryTable) -> jax.Array:
    """Rotate every head by its position; computed in float32, returned in x's dtype."""
    cos, sin = table[0][:, :, None, :], table[1][:, :, None, :]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
