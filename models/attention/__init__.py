"""Scaled dot-product attention behind one interface: `attend` and the backends it chooses from."""

from models.attention.interface import AttentionRequest, attend, backend_names, resolve_backend

__all__ = ["AttentionRequest", "attend", "backend_names", "resolve_backend"]
