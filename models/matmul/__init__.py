"""Matmuls with parameters behind one interface: `Matmul`, and `CollectiveMatmul`, which overlaps communication over `tensor`."""

from ridgeline.models.matmul.collective import CollectiveMatmul
from ridgeline.models.matmul.dense import platform_of
from ridgeline.models.matmul.interface import Matmul, Weight, set_amax, weight_of

__all__ = ["CollectiveMatmul", "Matmul", "Weight", "platform_of", "set_amax", "weight_of"]
