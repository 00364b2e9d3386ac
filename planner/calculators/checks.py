"""Range checks of the calculators' arguments."""

from __future__ import annotations

import math

from ridgeline.configs.errors import UserError


def positive(name: str, value: float) -> float:
    """Return the value. Raises UserError unless it is a finite number greater than 0."""
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name}={value:g}: must be a finite number greater than 0")
    return value


def not_negative(name: str, value: float) -> float:
    """Return the value. Raises UserError unless it is a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{name}={value:g}: must be a finite number of at least 0")
    return value


def share(name: str, value: float) -> float:
    """Return the value. Raises UserError unless it lies in (0, 1]."""
    if not (0 < value <= 1):
        hint = f" ({value:g} % is {value / 100:g})" if 1 < value <= 100 else ""
        raise UserError(f"{name}={value:g}: must be greater than 0 and at most 1{hint}")
    return value


def count(name: str, value: float) -> int:
    """Return the value as an integer. Raises UserError unless it is a whole number of at least 1."""
    if not (math.isfinite(value) and value >= 1 and value == int(value)):
        raise UserError(f"{name}={value:g}: must be a whole number of at least 1")
    return int(value)
