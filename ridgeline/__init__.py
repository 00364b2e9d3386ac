"""Ridgeline trains language models on GPU clusters with JAX. The packages are folders at the top of the repository, linked here."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
"""Directory of the package `ridgeline`; its parent is what PYTHONPATH must hold, and the git working tree of a checkout."""
