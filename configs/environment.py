"""Whole numbers in environment variables: of processes, nodes, devices and restarts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from ridgeline.configs.errors import UserError

MOST = 1 << 20
"""Larger numbers are refused as a mistake, before memory is allocated for each process."""


def is_number(text: str | None) -> TypeGuard[str]:
    """Return whether a text is a whole number in the digits 0 to 9."""
    return text is not None and text.isascii() and text.isdigit()


def read_number(env: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is a whole number; None if none is. Raises UserError for a number above MOST."""
    for name in names:
        text = env.get(name)
        if is_number(text):
            if len(text.lstrip("0")) > len(str(MOST)) or int(text) > MOST:
                raise UserError(f"{name}={shortened(text)} is above {MOST}: correct it, or unset it")
            return int(text)
    return None


def shortened(text: str, most: int = 80) -> str:
    """Return the value of a variable for a message: its first `most` characters, what cannot be printed as an escape."""
    start = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text[:most])
    return start + "..." * (len(text) > most)
