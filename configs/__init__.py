"""Experiment and cluster schemas, loading and overrides. Imports no JAX.

`Config` and `ModelConfig` are imported at first use, so that importing `configs.errors` does not import pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.configs.errors import UserError

if TYPE_CHECKING:
    from ridgeline.configs.model_schema import ModelConfig
    from ridgeline.configs.schema import Config

__all__ = ["Config", "ModelConfig", "UserError"]


def __getattr__(name: str) -> Any:
    if name in ("Config", "ModelConfig"):
        from ridgeline.configs import schema

        return getattr(schema, name)
    raise AttributeError(f"module 'configs' has no attribute '{name}'")
