"""Flax NNX decoders: families, attention backends, loss."""

from models.registry import build, family

__all__ = ["build", "family"]
