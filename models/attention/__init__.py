"""Scaled dot-product attention behind one interface: `attend` and the backends it chooses from."""

from ridgeline.models.attention.dispatch import attend, backend_names, resolve_backend
from ridgeline.models.attention.interface import AttentionRequest

__all__ = ["AttentionRequest", "attend", "backend_names", "resolve_backend"]
