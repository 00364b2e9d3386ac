"""Learning rate as a pure function of the step.

Every schedule warms up linearly from the fraction f (`initial_fraction`) of the peak: step s of W warm-up steps has
f + (1 - f) (s + 1) / (W + 1) of the peak, so that the first step (s = 0) trains too and step W has the peak. It takes its final value,
`final_fraction` of the peak, at the last step of the run. Steps beyond the run keep it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ridgeline.configs import plugins
from ridgeline.configs.errors import UserError
from ridgeline.configs.schema import ScheduleConfig

Schedule = Callable[[jax.Array | int], jax.Array]
"""int32 step -> float32 learning rate; traceable."""
Decay = Callable[[ScheduleConfig, jax.Array, float], jax.Array]
"""(config, progress, progress at which wsd starts to fall) -> factor; progress is 0 at the end of the warm-up and 1 at the last step."""


def _constant(config: ScheduleConfig, progress: jax.Array, decay_start: float) -> jax.Array:
    return jnp.ones_like(progress)


def _linear(config: ScheduleConfig, progress: jax.Array, decay_start: float) -> jax.Array:
    return 1.0 - (1.0 - config.final_fraction) * progress


def _cosine(config: ScheduleConfig, progress: jax.Array, decay_start: float) -> jax.Array:
    """Half a cosine from 1 to `final_fraction` (arXiv 1608.03983, equation 5, one cycle)."""
    return config.final_fraction + (1.0 - config.final_fraction) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


def _wsd(config: ScheduleConfig, progress: jax.Array, decay_start: float) -> jax.Array:
    """Flat, then linear to `final_fraction` over the last `decay_fraction` of the run (warm-up, stable, decay: arXiv 2404.06395)."""
    falling = jnp.clip((progress - decay_start) / max(1.0 - decay_start, 1e-9), 0.0, 1.0)
    return 1.0 - (1.0 - config.final_fraction) * falling


SCHEDULES: dict[str, Decay] = {"constant": _constant, "linear": _linear, "cosine": _cosine, "wsd": _wsd}


def build_schedule(config: ScheduleConfig, peak: float, steps: int) -> Schedule:
    """Return step -> learning rate for a run of `steps` steps with the given peak.

    Raises UserError for an unknown kind, or a warm-up (and wsd decay) that does not fit into the run.
    """
    decay: Decay = SCHEDULES.get(config.kind) or plugins.load_callable("schedules", config.kind, SCHEDULES)
    warmup, first = config.warmup_steps, config.initial_fraction
    if warmup > steps:
        raise UserError(f"schedule.warmup_steps={warmup} is longer than the run (trainer.steps={steps})")
    last = max(steps - 1, warmup + 1)
    decay_steps = config.decay_fraction * steps
    if config.kind == "wsd" and warmup + decay_steps > steps:
        raise UserError(
            f"schedule.warmup_steps={warmup} and schedule.decay_fraction={config.decay_fraction} overlap in trainer.steps={steps}; "
            f"decay_fraction may be at most {1 - warmup / steps:.3g}"
        )
    decay_start = max(last - decay_steps - warmup, 0.0) / (last - warmup)

    def schedule(step: jax.Array | int) -> jax.Array:
        at = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((at - warmup) / (last - warmup), 0.0, 1.0)
        rise = first + (1.0 - first) * (at + 1.0) / (warmup + 1.0)
        return jnp.float32(peak) * jnp.where(at < warmup, rise, decay(config, progress, decay_start))

    return schedule
