"""Flax NNX decoders: families, attention backends, loss."""

from ridgeline.models.registry import build, family

__all__ = ["build", "family"]
