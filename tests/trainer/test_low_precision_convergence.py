"""Training with narrow state ends where float32 ends, and would not if either rounding were the obvious one."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ridgeline.configs.schema import OptimizerConfig, PrecisionConfig
from ridgeline.trainer import low_precision
from ridgeline.trainer.optimizers import build_optimizer

FEATURES, OUTPUTS, ROWS, STEPS, RATE = 128, 8, 512, 1500, 1e-3
AXES = {"weights": ("mlp", "embed")}
OPTIMIZED = {"xla_backend_optimization_level": 3}
"""Of the tests' programs (tests/xla_flags.py) these run for seconds, and not for milliseconds."""
NARROW = {"params": "bfloat16", "stochastic_rounding": True, "moments": "int8"}


def distance(**precision: Any) -> float:
    """Root mean square distance to the right weights after a linear regression whose features differ in scale by a hundred.

    Adam takes all weights there equally well; the loss would hear of the largest features only.
    """
    config = PrecisionConfig(**precision)
    optimizer = build_optimizer(OptimizerConfig(kind="adamw", weight_decay=0.0, eps=1e-12), config, AXES)
    scales = 10 ** jax.random.uniform(jax.random.key(1), (FEATURES,), minval=-2, maxval=0)
    right = 0.5 * jax.random.normal(jax.random.key(2), (FEATURES, OUTPUTS))

    def objective(params: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, (ROWS, FEATURES)) * scales
        return jnp.mean((x @ (params["weights"].astype(jnp.float32) - right)) ** 2)

    def step(carry: Any, number: jax.Array) -> Any:
        params, state = carry
        data, own, last = jax.random.split(jax.random.fold_in(jax.random.key(3), number), 3)
        rate = RATE * jnp.minimum(1.0, 2 * (1 - number / STEPS))
        updates, state = optimizer.update(jax.grad(objective)(params, data), state, params, learning_rate=rate, key=own)
        return (low_precision.apply_updates(params, updates, last), state), None

    params = {"weights": jnp.zeros(right.shape, config.params)}
    train = jax.jit(lambda: jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(STEPS)), compiler_options=OPTIMIZED)
    (params, _), _ = train()
    return float(jnp.sqrt(jnp.mean((params["weights"].astype(jnp.float32) - right) ** 2)))


@cache
def float32() -> float:
    return distance()


def test_narrow_state_ends_where_float32_does() -> None:
    assert distance(**NARROW) < 1.1 * float32()


def test_rounding_masters_to_nearest_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision, "to_bfloat16", lambda x, key: x.astype(jnp.bfloat16))
    assert not distance(**NARROW) < 1.5 * float32()


def test_linear_codes_for_second_moments_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(x: jax.Array, scale: jax.Array, uniform: jax.Array, blocks: low_precision.Blocks) -> jax.Array:
        return jnp.clip(jnp.floor(x / blocks.spread(jnp.maximum(scale, 1e-30)) * 255 + uniform), 0, 255).astype(jnp.uint8)

    monkeypatch.setattr(low_precision, "encode_second", encode)
    monkeypatch.setattr(low_precision, "decode_second", lambda code, scale, blocks: code.astype(jnp.float32) / 255 * blocks.spread(scale))
    assert not distance(**NARROW) < 1.5 * float32()
