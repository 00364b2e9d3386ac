"""Experiment schema, loading and overrides. Imports no JAX."""

from configs.errors import UserError
from configs.schema import Config, ModelConfig

__all__ = ["Config", "ModelConfig", "UserError"]
