"""What the sharding tests share."""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compile():
    """Leave machine code unoptimised: partitioning is the same, and these programs run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
