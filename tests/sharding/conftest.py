"""What the sharding tests share."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick(quick_compile):
    """Partitioning is the same without optimized machine code."""
