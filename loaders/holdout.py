"""Held-out sets: whole documents set aside by a hash of their text, the same on every machine and in every order of files.

Equal documents always land in the same set, so no copy of a held-out document is trained on.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence

from ridgeline.configs.errors import UserError

TRAIN = "train"


def parse_holdouts(texts: Sequence[str]) -> dict[str, float]:
    """Parse `name=fraction` settings. Raises UserError for a malformed one, a repeated name, or nothing left to train on."""
    holdouts: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or not value:
            raise UserError(f"holdout '{text}' is not NAME=FRACTION (such as validation=0.05)")
        if name == TRAIN or name in holdouts:
            raise UserError(f"holdout '{text}': the name '{name}' is already taken")
        try:
            fraction = float(value)
        except ValueError:
            fraction = math.nan
        if not 0 < fraction < 1:
            raise UserError(f"holdout '{text}': the fraction must lie between 0 and 1")
        holdouts[name] = fraction
    if sum(holdouts.values()) >= 1:
        raise UserError(f"holdouts leave nothing to train on: their fractions sum to {sum(holdouts.values()):g}")
    return holdouts


def set_of(text: str, holdouts: Mapping[str, float]) -> str:
    """Name the set of a document: `train` or a holdout, drawn in proportion by the hash of its text."""
    if not holdouts:
        return TRAIN
    draw = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
    for name, fraction in holdouts.items():
        draw -= fraction
        if draw < 0:
            return name
    return TRAIN
