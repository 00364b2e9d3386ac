"""Scaled dot-product attention with one interface: `attend` and its backends."""

from ridgeline.models.attention.dispatch import attend, backend_names, resolve_backend
from ridgeline.models.attention.interface import AttentionRequest

__all__ = ["AttentionRequest", "attend", "backend_names", "resolve_backend"]
