"""Ends the benchmark with one line where a package is missing that it cannot do without; imported before anything that needs them.

A machine without a network can be carried what is missing (pure Python but for one wheel of 2 MB), on one that has it:
`pip download --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d wheels pydantic ruamel.yaml`, and there:
`pip install --no-index --find-links wheels pydantic ruamel.yaml`.
"""

from __future__ import annotations

import importlib.util
import sys

NEEDED = {"jax": "jax", "flax": "flax", "optax": "optax", "pydantic": "pydantic", "ruamel.yaml": "ruamel.yaml"}
"""Module -> what to install. No loader, checkpoint or writer runs here: grain, orbax and tensorboard are not needed."""


def missing(needed: dict[str, str] = NEEDED) -> list[str]:
    """Return what to install of the needed modules, in their order."""
    return [package for module, package in needed.items() if not _found(module)]


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package a submodule is in
        return False


if lacking := missing():
    print(f"gpu.py: not installed: {', '.join(lacking)} (pip install {' '.join(lacking)}; without a network: {__file__})", file=sys.stderr)
    raise SystemExit(2)
