"""A learning rate that falls with the inverse square root of the progress."""

import jax
import jax.numpy as jnp

from ridgeline.configs.schema import ScheduleConfig


def inverse_sqrt(config: ScheduleConfig, progress: jax.Array, decay_start: float) -> jax.Array:
    """Return the factor of the peak: 1 at the end of the warm-up (progress 0), `final_fraction` at the last step (progress 1)."""
    falling = 1.0 / jnp.sqrt(1.0 + 99.0 * progress)  # 1 to 0.1
    return config.final_fraction + (1.0 - config.final_fraction) * (falling - 0.1) / 0.9
