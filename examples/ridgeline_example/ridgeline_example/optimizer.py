"""Signum: the sign of the momentum, with decoupled weight decay (arXiv 1802.04434, algorithm 2).

`ridge plan` imports this module, so JAX and optax are imported inside the rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.planner.optimizer_state import OptimizerPlugin

if TYPE_CHECKING:
    import optax

    from ridgeline.configs.schema import OptimizerConfig


def _rule(config: OptimizerConfig, moments: Any, param_axes: Any) -> optax.GradientTransformation:
    import jax
    import jax.numpy as jnp
    import optax

    sign = optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))
    return optax.chain(optax.ema(config.b1, debias=False, accumulator_dtype=moments), sign, optax.add_decayed_weights(config.weight_decay))


SIGNUM = OptimizerPlugin(rule=_rule, state_bytes_per_parameter=lambda moment_bytes: moment_bytes)
