"""The error type for everything that a user can cause. The command line prints its message and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_MAX_SHOWN = 100
_MAX_PLACES = 4
"""Further problems that a message lists by file, line and key."""


class UserError(ValueError):
    """An error that the user can correct. The message has what is wrong and where, what is allowed, and what to type instead."""


def printable(text: str, most: int = _MAX_SHOWN) -> str:
    """Return a text for an error message: control characters escaped, and cut behind `most` characters."""
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text[:most])
    return shown if len(text) <= most else f"{shown}..."


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name closest to `name`; None when none is similar."""
    matches = difflib.get_close_matches(name[:_MAX_SHOWN], list(allowed), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown_name(kind: str, name: str, allowed: Iterable[str]) -> UserError:
    """Return the error for a name outside a closed set, with the nearest and all allowed names."""
    names = sorted(allowed)
    close = nearest(name, names)
    hint = f"; did you mean '{close}'?" if close else ""
    return UserError(f"unknown {kind} '{printable(name)}'{hint} (allowed: {', '.join(names)})")


def first_of(first: str, others: Sequence[str]) -> UserError:
    """Return one line for several problems: the first, and the places of the others."""
    if not others:
        return UserError(first)
    listed = ", ".join([*others[:_MAX_PLACES], *(["..."] if len(others) > _MAX_PLACES else [])])
    return UserError(f"{first} (and {len(others)} more: {listed})")
