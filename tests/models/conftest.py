"""What the model tests share."""

import jax
import pytest


@pytest.fixture
def quick_compile():
    """Leave machine code unoptimised: the programs are the same, and run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
