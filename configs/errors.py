"""The one error type for what a user can cause. The command line turns it into one line and exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can mend: one line saying what is wrong, where, and what is allowed."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name closest to `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown_name(kind: str, name: str, allowed: Iterable[str]) -> UserError:
    """Build the error for a name outside a closed set, naming the nearest and all allowed ones."""
    names = sorted(allowed)
    close = nearest(name, names)
    hint = f"; did you mean '{close}'?" if close else ""
    return UserError(f"unknown {kind} '{name}'{hint} (allowed: {', '.join(names)})")
