"""Plug-ins for Ridgeline: pyproject.toml registers one object of each module."""
